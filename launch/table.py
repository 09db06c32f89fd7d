"""The table of a sweep: what a TOML file or the command line says, and the cells that come of it."""

import itertools
import re
from typing import Annotated, Any, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from fedjax_ssl.experiment.settings import MOST_RUNS
from fedjax_ssl.options import Model
from fedjax_ssl.report.cells import on_axis

from .programs import Cell

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


class Table(Model):
    """Experiments in rows and columns; `small` has what `--small` puts in the place of the rest, but adds to `set`."""

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
