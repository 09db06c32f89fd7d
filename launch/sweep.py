"""Runs a table of experiments, each over several seeds, as a queue of `launch.run`; the same command again goes on.

    python -m launch.sweep fl2_ablation [--small] [--rows CAT 'CAT + SACR'] [--workdir=DIR]
    python -m launch.sweep --config=digits:{method} --methods=fl2,semifl --seeds=3 --set data.num_labels=10,40

A FILE is a name in `configs/sweeps` or the path of a TOML file: `config` with {row} and {column}, `seeds`, `[rows]` and
`[columns]`, each with a `name`, what it `set`s, and words of its own, such as `data` for {data}; `[paper]` has accuracies to
compare with; `[small]` has what `--small` puts in its place. On the command line the rows are methods, for {method} in the
config, and the columns are the product of the values of all `--set`. Further arguments, such as --config.data.data_dir=DIR, go
to every run. Seeds, and experiments that differ in one number alone, share a program where its method can; each GPU, or each
share of the cores, runs one program (`--jobs`).
Exit status: 0 done; 2 wrong arguments; 1 a run failed or diverged, which is named; 130 on Ctrl-C or SIGTERM.
"""

import argparse
import itertools
import os
import pathlib
import platform
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from fedjax_ssl.experiment.files import write_json
from fedjax_ssl.experiment.provenance import processor
from fedjax_ssl.experiment.report import tables
from fedjax_ssl.experiment.report.cells import SWEEP
from fedjax_ssl.experiment.settings import Settings

from . import arguments, command
from .jobs import Cell, Done, Queue

SWEEPS = command.CONFIGS / "sweeps"
METHOD = re.compile(r"\{(method|row)\}")
PAPER = re.compile(r"\d+(\.\d+)?( ± \d+(\.\d+)?)?")


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        parser = _parser()
        options, extra = parser.parse_known_args(argv[1:])
        if strange := [word for word in extra if not word.startswith("--config.")]:
            parser.refuse(strange[0])
        spec = from_file(options.file, options.small) if options.file else _from_options(options)
        # A mistake is said before anything runs.
        cells = [cell._replace(settings=settings_of(cell, extra)) for cell in cells_of(spec)]
        if len({cell.name for cell in cells}) < len(cells):
            raise ValueError("rows and columns: got two with the same name, accepted: different names")
        rows = list(dict.fromkeys(cell.row for cell in cells))
        if unknown := [row for row in options.rows or [] if row not in rows]:
            raise ValueError(f"--rows: got {unknown[0]!r}, accepted: {', '.join(rows)}")
        seeds = spec.get("seeds", 1) if options.seeds is None else options.seeds
        if type(seeds) is not int or seeds < 1:
            raise ValueError(f"--seeds: got {seeds!r}, accepted: a whole number >= 1")
        name = (pathlib.Path(options.file).stem if options.file else "sweep") + "-small" * options.small
        folder = pathlib.Path(options.workdir or pathlib.Path("runs", name)).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, {"name": name, "about": spec.get("about", ""), "command": _typed(options, extra)}, cells)
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    wanted = [cell for cell in cells if cell.row in (options.rows or rows)]
    queue = Queue(wanted, seeds, folder, extra, options.jobs)
    try:
        done = queue.run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    print(_table(done, seeds), end="")
    for one in done:
        for run in (run for run in one.results if "note" in run):
            print(f"note: {one.cell.label}, seed {run['seed']}: {run['note']}", file=sys.stderr)
    failed = [one for one in done if one.error]
    for one in failed:
        print(f"{one}: {one.cell.label}: {one.error}", file=sys.stderr)
    print(f"results in {folder}; figures and tables: {command.program('report')} {shlex.quote(str(folder))}", file=sys.stderr)
    return 1 if failed else 0


def _write(folder: pathlib.Path, about: dict[str, str], cells: Sequence[Cell]) -> None:
    """Writes what a report says of the sweep: its cells and the paper's numbers, its command, and where it runs."""
    keys = ("row", "column", "config", "overrides", "paper")
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in ("jax", "flax", "optax")}}
    where = {"machine": f"{processor()}, {os.cpu_count()} cores", "versions": versions}
    of_cells = [{**{key: getattr(cell, key) for key in keys}, "folder": cell.name} for cell in cells]
    write_json(folder / SWEEP, {**about, **where, "cells": of_cells})


def _typed(options: argparse.Namespace, extra: Sequence[str]) -> str:
    """The command without what this machine alone has: folders and jobs."""
    words = [options.file, *(f"--{key}={value}" for key in ("config", "methods") if (value := getattr(options, key)))]
    words += [f"--set={one}" for one in options.set] + ["--small"] * options.small
    words += [f"--seeds={options.seeds}"] * bool(options.seeds)
    words += [re.sub(r"^(--config\.data\.(data_dir|path))=.*", r"\1=DIR", word) for word in extra]
    words += ["--rows", *options.rows] if options.rows else []
    return f"{command.program('sweep')} {shlex.join(filter(None, words))}"


def cells_of(spec: dict[str, Any]) -> Iterator[Cell]:
    """The cells of a table, row by row."""
    rows, columns = (_entries(spec.get(axis) or {"": {}}) for axis in ("rows", "columns"))
    papers = {row: of if isinstance(of, dict) else {"": of} for row, of in spec.get("paper", {}).items()}
    if strange := {(row, column) for row, of in papers.items() for column in of} - set(itertools.product(rows, columns)):
        raise ValueError(f"paper: got {' '.join(min(strange)).strip()!r}, accepted: a row, and a column where there are any")
    if wrong := [value for of in papers.values() for value in of.values() if not PAPER.fullmatch(str(value))]:
        raise ValueError(f"paper: got {wrong[0]!r}, accepted: an accuracy in %, such as 57.73 or '57.73 ± 0.31'")
    for (row, of_row), (column, of_column) in itertools.product(rows.items(), columns.items()):
        words = {**of_column, **of_row, "row": of_row["name"], "column": of_column["name"]}
        config = spec["config"]
        for key in words.keys() - {"name", "set"}:
            config = config.replace(f"{{{key}}}", str(words[key]))
        overrides = {**spec.get("set", {}), **of_row.get("set", {}), **of_column.get("set", {})}
        yield Cell(row, column, config, overrides, str(papers.get(row, {}).get(column, "")))


def _entries(axis: Any) -> dict[str, dict[str, Any]]:
    """Rows or columns, given as a list of names or a table, as a name in the table -> what it has."""
    items = {str(key): {} for key in axis} if isinstance(axis, list) else dict(axis)
    return {key: {"name": key, **(value if isinstance(value, dict) else {"name": value})} for key, value in items.items()}


def from_file(name: str, small: bool) -> dict[str, Any]:
    """What a sweep file says, by its name or path, or its small version; ValueError where it is none."""
    path = pathlib.Path(name).expanduser()
    path = path if path.suffix or path.exists() else SWEEPS / f"{name}.toml"
    if not path.is_file():
        raise ValueError(f"FILE: got {name}, accepted: a TOML file, or one of {', '.join(names())}")
    try:
        spec = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    smaller = spec.pop("small", None)
    if small and smaller is None:
        raise ValueError(f"--small: {path} has no [small] table, accepted: without it")
    spec |= {"paper": {}, **smaller} if small and smaller else {}
    if strange := set(spec) - {"about", "config", "seeds", "set", "rows", "columns", "paper"} or {"config"} - set(spec):
        keys = "about, config, seeds, set, rows, columns, paper and small"
        raise ValueError(f"{path}: got {'no config' if 'config' in strange else sorted(strange)[0]}, accepted: {keys}")
    return spec


def _from_options(options: argparse.Namespace) -> dict[str, Any]:
    config, methods = options.config, [one for one in options.methods.split(",") if one]
    if not config:
        raise ValueError("FILE or --config: missing; for example --config=digits:{method} --methods=fl2,semifl --seeds=3")
    if bool(METHOD.search(config)) != bool(methods):
        raise ValueError(
            f"--methods: got {options.methods!r} with --config={config}, accepted: methods for {{method}} in --config"
        )
    axes = []
    for text in options.set:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise ValueError(f"--set: got {text}, accepted: KEY=VALUE,VALUE,...")
        axes.append([(key, value) for value in values.split(",")])
    columns = {", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in one): {"set": dict(one)} for one in itertools.product(*axes)}
    return {"config": METHOD.sub("{row}", config), "rows": methods, "columns": columns}


def names() -> list[str]:
    """The sweeps that are known by name."""
    return sorted(path.stem for path in SWEEPS.glob("*.toml"))


def settings_of(cell: Cell, extra: Sequence[str]) -> Settings:
    """The settings of a cell's runs; ValueError where they are wrong."""
    words = dict(word.removeprefix("--config.").partition("=")[::2] for word in extra)
    given = {key: command.as_text(value) for key, value in cell.overrides.items()} | words
    settings = Settings.from_dict(command.read(cell.config, given).tree)
    if settings.is_several:
        raise ValueError("config.seeds, config.vary: got several runs, accepted: --seeds=N and --set KEY=VALUE,VALUE")
    return settings


def _table(done: Sequence[Done], seeds: int) -> str:
    """The accuracies as text, rows by columns, the paper's beside them."""
    rows, columns = (list(dict.fromkeys(getattr(one.cell, axis) for one in done)) for axis in ("row", "column"))
    entries = {(one.cell.row, one.cell.column): f"{one}" + f" [{one.cell.paper}]" * bool(one.cell.paper) for one in done}
    of_seeds = f", mean ± sd over {seeds} seeds" if seeds > 1 else ""
    of_paper = ", in brackets the paper's" if any(one.cell.paper for one in done) else ""
    header = ("", *columns) if columns != [""] else ("", "accuracy, %")
    lines = tuple((row, *(entries[row, column] for column in columns)) for row in rows)
    return tables.text(tables.Table("sweep", f"Accuracy of the last round in %{of_seeds}{of_paper}", header, lines))


def _parser() -> arguments.Parser:
    parser = arguments.Parser("sweep", __doc__)
    parser.add_argument("file", nargs="?", default="", metavar="FILE", help=f"one of {', '.join(names())}, or a TOML file")
    parser.add_argument("--config", default="", help="a config, with {method} in its argument")
    parser.add_argument("--config.KEY", metavar="VALUE", help="a key's value in every run")
    parser.add_argument("--methods", default="", help="names for {method}, separated by commas")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=V,V", help="values of a key; several --set: all products"
    )
    parser.add_argument("--seeds", type=int, help="seeds from 0 on (the file's number, or 1)")
    parser.add_argument("--rows", nargs="+", help="the rows to run (all)")
    parser.add_argument("--small", action="store_true", help="the file's small version")
    parser.add_argument("--jobs", type=int, default=0, help="programs at a time (one for each GPU, else 1)")
    parser.add_argument("--workdir", default="", help="where results go (runs/NAME)")
    return parser


if __name__ == "__main__":
    sys.exit(command.ended(main, sys.argv))
