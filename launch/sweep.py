"""Runs a table of experiments, each over several seeds, as a queue of `launch.run`; the same command again goes on.

    python -m launch.sweep fl2_ablation [--small] [--rows CAT 'CAT + SACR'] [--columns ...] [--workdir=DIR]
    python -m launch.sweep --config=digits:{method} --methods=fl2,semifl --seeds=3 --set data.num_labels=10,40

A FILE is a name in `configs/sweeps` or the path of a TOML file: `config` with {row} and {column}, `seeds`, `[rows]` and
`[columns]`, each with a `name`, what it `set`s, and words of its own, such as `data` for {data}; `[paper]` has accuracies to
compare with; `x` says what the numbers in names are, for a figure against them; `[small]` has what `--small` puts in its
place, and its `set` is added. On the command line the rows are methods, for {method} in the config, and the columns are the
product of the values of all `--set`. Further arguments, such as --config.data.data_dir=DIR, go to every run. Seeds, and
experiments that differ in one number alone, share a program where its method can; each GPU, or each core without one, runs
one program (`--jobs`).
Exit status: 0 done; 2 wrong arguments; 1 a run failed or diverged, which is named; 130 on Ctrl-C or SIGTERM.
"""

import argparse
import contextlib
import functools
import itertools
import os
import pathlib
import platform
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from fedjax_ssl.experiment.settings import MOST_RUNS, Settings
from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.options import parse, plural
from fedjax_ssl.report import tables
from fedjax_ssl.report.cells import NUMBER, SWEEP, grid
from fedjax_ssl.report.groups import short
from fedjax_ssl.runs.folder import check_place
from fedjax_ssl.runs.lock import owned
from fedjax_ssl.runs.provenance import git_commit, processor

from . import arguments, command, prepare
from .jobs import Done, Queue
from .programs import Cell
from .table import Table

SWEEPS = command.CONFIGS / "sweeps"
METHOD = re.compile(r"\{(method|row)\}")


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    with contextlib.ExitStack() as until_the_end:
        try:
            queue = _accepted(argv, until_the_end)
        except command.WRONG_INPUT as error:
            return command.refuse(error)
        changed = queue.changes()  # before runs go on, and note the files as they are now
        try:
            done = queue.run()
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
            return 128 + signal.SIGINT
    print(_table(done, queue.seeds), end="")
    for one in done:
        for run in (run for run in one.results if "note" in run):
            print(f"note: {one.cell.label}, seed {run['seed']}: {run['note']}", file=sys.stderr)
    for line in changed:
        print(f"note: {line}", file=sys.stderr)
    failed = [one for one in done if one.error and not one.is_stopped]
    for one in failed:
        print(f"{one}: {one.cell.label}: {one.error}", file=sys.stderr)
    where = f"{command.program('report')} {shlex.quote(str(queue.folder))}"
    print(f"results in {queue.folder}; figures and tables: {where}", file=sys.stderr)
    return 1 if failed else 0


def _accepted(argv: list[str], until_the_end: contextlib.ExitStack) -> Queue:
    """What the command line asks for, in a folder that is owned until the end; ValueError or OSError for wrong input."""
    config, extra, words = command.split_words(argv[1:])
    options = _parser().parse_args(words, meant=functools.partial(command.meant, config))
    options.config = config
    for name in ("config", "methods", "set"):
        if options.file and getattr(options, name):
            raise ValueError(f"--{name}: got it with FILE {options.file}, accepted: without FILE")
    if options.small and not options.file:
        raise ValueError("--small: got it without FILE, accepted: with a sweep's file")
    table = from_file(options.file, options.small) if options.file else parse(Table, _from_options(options))
    # A mistake is said before anything runs.
    for key in extra:
        if len({repr(cell.overrides.get(key)) for cell in table.cells()}) > 1:
            raise ValueError(f"config.{key}: got it for all runs, and rows or columns set it, too, accepted: one of both")
    cells = [cell._replace(settings=settings_of(cell, extra)) for cell in table.cells()]
    for axis, there in (("rows", table.rows), ("columns", table.columns)):
        if unknown := [name for name in getattr(options, axis) or [] if name not in there]:
            meant = command.hint(unknown[0], there)
            raise ValueError(f"--{axis}: got {unknown[0]!r}, accepted: {', '.join(there) or 'none'}{meant}")
    seeds = table.seeds if options.seeds is None else options.seeds
    if seeds > MOST_RUNS:
        raise ValueError(f"--seeds: got {seeds}, accepted: a whole number >= 1 and <= {MOST_RUNS}")
    name = (pathlib.Path(options.file).stem if options.file else "sweep") + "-small" * options.small
    folder = pathlib.Path(options.workdir or pathlib.Path("runs", name)).expanduser()
    name = name if options.file else folder.resolve().name or name
    check_place(folder, is_several=True)
    until_the_end.enter_context(owned([folder]))
    _write(folder, {"name": name, "about": table.about, "x": table.x, "command": _typed(options, extra)}, cells)
    chosen = set(itertools.product(options.rows or table.rows, options.columns or table.columns))
    cells = [cell for cell in cells if (cell.row, cell.column) in chosen]
    keys = [f"--config.{key}={text}" for key, text in extra.items()]
    queue = Queue(cells, seeds, folder, keys, options.jobs, stop_after=options.stop_after, overwrite=options.overwrite)
    queue.recover()
    left = (cell for cell in cells if options.overwrite or not queue.done(cell).has_ended)
    prepare.fetch_missing(cell.settings.data for cell in left)  # here, where it is seen
    return queue


def _write(folder: pathlib.Path, about: dict[str, str], cells: Sequence[Cell]) -> None:
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


PLACES = {"data.data_dir": "DIR", "data.path": "PATH"}


def _typed(options: argparse.Namespace, extra: Mapping[str, str]) -> str:
    """The command without what this machine alone has: folders and jobs."""
    words = [options.file, *(f"--{key}={value}" for key in ("config", "methods") if (value := getattr(options, key)))]
    words += [f"--set={one}" for one in options.set] + ["--small"] * options.small
    words += [f"--{key}={value}" for key in ("seeds", "stop_after") if (value := getattr(options, key))]
    words += [f"--config.{key}={PLACES.get(key, text)}" for key, text in extra.items()]
    for axis in ("rows", "columns"):
        words += [f"--{axis}", *chosen] if (chosen := getattr(options, axis)) else []
    return f"{command.program('sweep')} {shlex.join(filter(None, words))}"


def from_file(name: str, small: bool) -> Table:
    """The table of a sweep file, by its name or path, or its small version; ValueError where it is none."""
    path = pathlib.Path(name).expanduser()
    path = path if path.suffix or path.is_file() else SWEEPS / f"{name}.toml"
    if not path.is_file():
        meant = command.hint(name, names())
        raise ValueError(f"FILE: got {name}, accepted: a TOML file, or one of {', '.join(names())}{meant}")
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


def _from_options(options: argparse.Namespace) -> dict[str, Any]:
    config, methods = options.config, _once("--methods", [one for one in options.methods.split(",") if one])
    if not config:
        raise ValueError("FILE or --config: missing; for example --config=digits:{method} --methods=fl2,semifl --seeds=3")
    if bool(METHOD.search(config)) != bool(methods):
        raise ValueError(
            f"--methods: got {options.methods!r} with --config={config}, accepted: methods for {{method}} in --config"
        )
    axes: dict[str, list[str]] = {}
    for text in options.set:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise ValueError(f"--set: got {text}, accepted: KEY=VALUE,VALUE,...")
        if key in axes:
            raise ValueError(f"--set: got {key} twice, accepted: once, with all of its values: {key}=VALUE,VALUE,...")
        axes[key] = _once(f"--set {key}", values.split(","))
    given = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    columns = {", ".join(f"{short(key, [*axes])}={value}" for key, value in one.items()): {"set": one} for one in given}
    numbers = len(axes) == 1 and all(NUMBER.fullmatch(value) for values in axes.values() for value in values)
    compared = {"method": methods} if methods else {}
    about = "; ".join(f"{key}: {', '.join(values)}" for key, values in (compared | axes).items())
    own = {"about": f"{about} ({config})" if about else config, "x": next(iter(axes)) if numbers else ""}
    return {"config": METHOD.sub("{row}", config), "rows": methods, "columns": columns, **own}


def _once(option: str, values: list[str]) -> list[str]:
    """The values; ValueError where one is given twice."""
    if twice := [one for one in values if values.count(one) > 1]:
        raise ValueError(f"{option}: got {twice[0]} twice, accepted: each value once")
    return values


def names() -> list[str]:
    """The sweeps that are known by name."""
    return sorted(path.stem for path in SWEEPS.glob("*.toml"))


def settings_of(cell: Cell, extra: Mapping[str, str]) -> Settings:
    """The settings of a cell's runs, with `extra` keys; ValueError where they are wrong."""
    given = {key: command.as_text(value) for key, value in cell.overrides.items()} | dict(extra)
    settings = Settings.from_dict(command.read(cell.config, given).tree)
    if settings.is_several:
        raise ValueError("config.seeds, config.vary: got several runs, accepted: --seeds=N and --set KEY=VALUE,VALUE")
    return settings


def _table(done: Sequence[Done], seeds: int) -> str:
    """The accuracies as text, rows by columns, the paper's beside them."""
    entries = {(one.cell.row, one.cell.column): f"{one}" + f" [{one.cell.paper}]" * bool(one.cell.paper) for one in done}
    of_seeds = f", mean ± sd over {seeds} seeds" if seeds > 1 else ""
    of_paper = ", in brackets the paper's" if any(one.cell.paper for one in done) else ""
    return tables.text(grid("sweep", f"Accuracy of the last round in %{of_seeds}{of_paper}", entries))


def _parser() -> arguments.Parser:
    parser = arguments.Parser("sweep", __doc__)
    parser.add_argument("file", nargs="?", default="", metavar="FILE", help=f"one of {', '.join(names())}, or a TOML file")
    parser.add_argument("--config", default="", help="a config, with {method} in its argument")
    parser.add_argument("--methods", default="", help="names for {method}, separated by commas")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=V,V", help="values of a key; several --set: all products"
    )
    parser.add_argument("--seeds", metavar="N", type=arguments.whole(1), help="seeds from 0 on (the file's number, or 1)")
    for axis in ("rows", "columns"):
        parser.add_argument(f"--{axis}", nargs="+", help=f"the {axis} to run (all)")
    parser.add_argument("--small", action="store_true", help="the file's small version")
    parser.add_argument("--jobs", type=arguments.whole(0), default=0, help="programs at a time (one for each GPU, or core)")
    parser.add_argument(
        "--stop_after", type=arguments.whole(1), help="end each run after so many rounds; the command without it goes on"
    )
    parser.add_argument("--overwrite", action="store_true", help="run anew what has ended or stopped, too")
    parser.add_argument("--workdir", default="", help="where results go (runs/NAME)")
    parser.add_argument("--config.KEY", metavar="VALUE", help="a key's value in every run")
    return parser


if __name__ == "__main__":
    sys.exit(command.ended(main, sys.argv))
