"""A sweep: the table of experiments that a TOML file or the command line describes, its cells, and the file that keeps them."""

import itertools
import os
import pathlib
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Annotated, Any, NamedTuple, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from fedjax_ssl.experiment.settings import MOST_RUNS
from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.options import Model, parse, plural
from fedjax_ssl.runs.provenance import git_commit, processor

SWEEP = "sweep.json"
"""In a sweep's folder: its cells, and where their runs are."""
NUMBER = re.compile(r"(?P<rest>|.*[ =])(?P<number>\d*\.?\d+)( %)?( \(.*\))?")
"""A row's or column's name as a place on the axis of a figure: a number, after other words or before words in parentheses."""
METHOD = re.compile(r"\{(method|row)\}")
PAPER = re.compile(r"\d+(\.\d+)?( ± \d+(\.\d+)?)?")


def _text(value: Any) -> str:
    """A name or another word, which may be given as a number."""
    if not isinstance(value, str | int | float):
        raise ValueError(f"rows, columns and paper: got {value!r} for a word, accepted: text or a number")
    return str(value)


def _accuracy(text: str) -> str:
    if not PAPER.fullmatch(text):
        raise ValueError(f"paper: got {text!r}, accepted: an accuracy in %, such as 57.73 or '57.73 ± 0.31'")
    return text


def _entries(axis: Any) -> Any:
    """Rows or columns, given as a list of names or a table, as a name in the table -> what it has."""
    items = {str(name): {"name": name} for name in axis} if isinstance(axis, list) else axis
    if not isinstance(items, dict):  # which the check of its type says
        return items
    entries = {key: {"name": key, **(of if isinstance(of, dict) else {"name": of})} for key, of in items.items()}
    return entries or {"": {"name": ""}}


def _of_columns(paper: Any) -> Any:
    """Accuracies of a table's rows, where there are no columns, as those of the column without a name."""
    return {row: of if isinstance(of, dict) else {"": of} for row, of in paper.items()} if isinstance(paper, dict) else paper


Word = Annotated[str, BeforeValidator(_text)]
Overrides = dict[str, pydantic.JsonValue]


class Entry(Model):
    """A row or a column: its name in the config, the keys that it sets, and further words for the config."""

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Word]

    name: Word
    set: Overrides = Field({})


Axis = Annotated[dict[str, Entry], BeforeValidator(_entries)]


class Cell(NamedTuple):
    """One entry of a sweep's table: a config with overrides, over all seeds, and the settings that they make."""

    row: str
    column: str
    config: str
    overrides: dict[str, Any]
    paper: str = ""  # the paper's accuracy in %, as it is printed
    settings: Any = None

    @property
    def label(self) -> str:
        """Its place in the table, in words."""
        return " ".join(filter(None, (self.row, self.column))) or "run"

    @property
    def name(self) -> str:
        """Its folder's name."""
        return re.sub(r"[^\w.=+-]+", "-", "-".join(filter(None, (self.row, self.column)))).strip("-") or "run"


class Table(Model):
    """Experiments in rows and columns.

    With `--small`, the keys in `small` replace those of the table, except that its `set` is added to the table's `set`.
    """

    about: str = ""
    x: str = ""  # what the numbers in the names of columns, or of rows, are: the axis of a figure
    config: Annotated[str, Field(min_length=1)] = Field("", validate_default=True)
    seeds: Annotated[int, Field(ge=1, le=MOST_RUNS)] = 1
    set: Overrides = Field({})
    rows: Axis = Field({}, validate_default=True)
    columns: Axis = Field({}, validate_default=True)
    paper: Annotated[dict[str, dict[str, Annotated[Word, AfterValidator(_accuracy)]]], BeforeValidator(_of_columns)] = Field({})
    small: dict[str, Any] = Field({})

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        of_paper = {(row, column) for row, of in self.paper.items() for column in of}
        if strange := of_paper - set(itertools.product(self.rows, self.columns)):
            got = " ".join(min(strange)).strip()
            raise ValueError(f"paper: got {got!r}, accepted: a row, and a column where there are any")
        if self.x and not on_axis([cell._asdict() for cell in self.cells()]):
            raise ValueError(f"x: got {self.x!r}, accepted: where all columns, or all rows, have a number in their names")
        names = [cell.name for cell in self.cells()]
        if len(set(names)) < len(names):
            raise ValueError("rows and columns: got two with the same name, accepted: different names")
        return self

    def cells(self) -> list[Cell]:
        """The cells, row by row."""
        return [self._cell(row, column) for row, column in itertools.product(self.rows, self.columns)]

    def _cell(self, row: str, column: str) -> Cell:
        of_row, of_column = self.rows[row], self.columns[column]
        words = {**(of_column.model_extra or {}), **(of_row.model_extra or {}), "row": of_row.name, "column": of_column.name}
        config = self.config
        for key, word in words.items():
            config = config.replace(f"{{{key}}}", word)
        return Cell(row, column, config, self.set | of_row.set | of_column.set, self.paper.get(row, {}).get(column, ""))


def on_axis(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """For each cell the name of its line in a figure and its place on the x-axis.

    The place is a number that all columns, or else all rows, have in their names. The result is empty if neither have one. A
    cell has `row` and `column`.
    """
    for axis, other in (("column", "row"), ("row", "column")):
        found = [match for one in cells if (match := NUMBER.fullmatch(one[axis]))]
        if len(found) == len(cells):
            rests = [match["rest"].strip(" ,=") for match in found]
            rests = rests if len(set(rests)) > 1 else [""] * len(rests)  # such as `rounds=`
            lines = [", ".join(filter(None, (one[other], rest))) for one, rest in zip(cells, rests, strict=True)]
            return [(line, float(match["number"])) for line, match in zip(lines, found, strict=True)]
    return []


def from_file(path: pathlib.Path, small: bool) -> Table:
    """The table of a sweep's TOML file, or its small version; ValueError where it is none."""
    try:
        table = parse(Table, said := tomllib.loads(path.read_text(encoding="utf-8-sig")))
        if not small:
            return table
        if not table.small:
            raise ValueError("got no [small] table, accepted: without --small")
        made = parse(Table, said | {"paper": {}} | table.small)
        return made.model_copy(update={"set": table.set | made.set})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_words(config: str, methods: str, sets: Sequence[str]) -> Table:
    """The table of a command line: a row for each of the methods, columns for all products of the values in `sets`.

    `sets` are texts `KEY=VALUE,VALUE`. ValueError where the words do not go together.
    """
    rows = _once("--methods", [one for one in methods.split(",") if one])
    if not config:
        raise ValueError("FILE or --config: missing; for example --config=digits:{method} --methods=fl2,semifl --seeds=3")
    if bool(METHOD.search(config)) != bool(rows):
        raise ValueError(f"--methods: got {methods!r} with --config={config}, accepted: methods for {{method}} in --config")
    axes: dict[str, list[str]] = {}
    for text in sets:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise ValueError(f"--set: got {text}, accepted: KEY=VALUE,VALUE,...")
        if key in axes:
            raise ValueError(f"--set: got {key} twice, accepted: once, with all of its values: {key}=VALUE,VALUE,...")
        axes[key] = _once(f"--set {key}", values.split(","))
    given = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    columns = {", ".join(f"{short(key, [*axes])}={value}" for key, value in one.items()): {"set": one} for one in given}
    numbers = len(axes) == 1 and all(NUMBER.fullmatch(value) for values in axes.values() for value in values)
    compared = {"method": rows} if rows else {}
    about = "; ".join(f"{key}: {', '.join(values)}" for key, values in (compared | axes).items())
    own = {"about": f"{about} ({config})" if about else config, "x": next(iter(axes)) if numbers else ""}
    return parse(Table, {"config": METHOD.sub("{row}", config), "rows": rows, "columns": columns, **own})


def check_apart(cells: Sequence[Cell]) -> None:
    """Raises ValueError where two cells of one command are the same experiment, as with --set client.epochs=1,1.0."""
    first: dict[str, Cell] = {}
    for cell in cells:
        same = first.setdefault(repr(cell.settings), cell)
        if same is not cell:
            raise ValueError(f"--set: got {same.column} and {cell.column}, which are the same, accepted: each value once")


def short(key: str, keys: Sequence[str]) -> str:
    """A key's name in labels: its last part, or all of it where several of the keys end with that."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _once(option: str, values: list[str]) -> list[str]:
    """The values; ValueError where one is given twice."""
    if twice := [one for one in values if values.count(one) > 1]:
        raise ValueError(f"{option}: got {twice[0]} twice, accepted: each value once")
    return values


class CellFile(Model):
    """A cell in `sweep.json`: its place in the table, its config, the paper's accuracy in %, and the folder of its runs."""

    row: str
    column: str
    config: str
    overrides: dict[str, Any]
    paper: str
    folder: str


class SweepFile(Model):
    """The content of `sweep.json`: what `launch.sweep` writes before it runs anything.

    `x` names what the numbers in the names of its columns or rows are; it may be empty. If a sweep was resumed, `command` has a
    line for each different command, and `commit`, `machine` and `versions` list all different values.
    """

    name: str
    about: str
    command: str
    commit: str = ""
    machine: str
    versions: dict[str, str]
    x: str = ""
    cells: list[CellFile]


def write(folder: pathlib.Path, about: dict[str, str], cells: Sequence[Cell]) -> None:
    """Writes what a report says of the sweep: its cells and the paper's numbers; its commands so far, and where they ran.

    ValueError where the folder has another sweep, whose cells are not all among these.
    """
    keys = ("row", "column", "config", "overrides", "paper")
    try:
        before = read_json(folder / SWEEP)
    except (OSError, ValueError):  # there is none, or it is damaged and written anew
        before = {}
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in ("jax", "flax", "optax")}}
    earlier = before.get("versions", {})
    said = {
        "command": _with(before.get("command", ""), about["command"], "\n"),
        "commit": _with(before.get("commit", ""), git_commit() or "", ", "),
        "machine": _with(before.get("machine", ""), f"{processor()}, {plural(os.cpu_count() or 1, 'core')}", "; "),
        "versions": {name: _with(earlier.get(name, ""), one, ", ") for name, one in versions.items()},
    }
    of_cells = [{**{key: getattr(cell, key) for key in keys}, "folder": cell.name} for cell in cells]
    known = [one | {"paper": ""} for one in of_cells]
    if other := [one["folder"] for one in before.get("cells", ()) if one | {"paper": ""} not in known]:
        raise ValueError(f"--workdir: got {folder}, which has another sweep, with {other[0]!r}, accepted: another --workdir")
    write_json(folder / SWEEP, {**about, **said, "cells": of_cells})


def _with(before: str, one: str, between: str) -> str:
    """Texts of earlier calls and one more, each once."""
    return between.join(dict.fromkeys(filter(None, [*before.split(between), one])))
