"""Runs a table of experiments, each over several seeds, as a queue of `launch.run`; the same command again goes on.

    python -m launch.sweep fl2_ablation [--small] [--rows CAT 'CAT + SACR'] [--columns ...] [--workdir=DIR]
    python -m launch.sweep --config=digits:{method} --methods=fl2,semifl --seeds=3 --set data.num_labels=10,40

A FILE is a name in `configs/sweeps` or the path of a TOML file, which `configs/README.md` describes; `[small]` in it is what
`--small` runs. Without a FILE there is one row for each of `--methods`, which takes the place of {method} in the config, and
one column for each combination of the values given by `--set`. Further arguments, such as --config.data.data_dir=DIR, go to
every run.
Exit status: 0 done; 2 wrong arguments; 1 a run failed or diverged, which is named; 130 on Ctrl-C or SIGTERM.
"""

import argparse
import contextlib
import functools
import itertools
import pathlib
import shlex
import signal
import sys
from collections.abc import Mapping

from fedjax_ssl.experiment.settings import MOST_RUNS, Settings
from fedjax_ssl.options import as_text
from fedjax_ssl.report import statistics, tables
from fedjax_ssl.report.cells import chosen_by_validation, last_accuracies, results_of
from fedjax_ssl.runs import sweep
from fedjax_ssl.runs.folder import check_place
from fedjax_ssl.runs.lock import owned
from fedjax_ssl.runs.sweep_queue import Queue, unread

from . import arguments, command, config_file, prepare

PLACES = {"data.data_dir": "DIR", "data.path": "PATH"}


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
    print(tables.text(last_accuracies(done, queue.seeds)), end="")
    results = [{"case": one.cell._asdict(), **one.cell._asdict(), "runs": results_of(one.runs)} for one in done]
    if (best := chosen_by_validation("", results)) is not None:
        print(tables.text(best), end="")
    ended = [(f"{one.cell.label}, seed {run.config['seed']}", run) for one in done for run in one.runs if not run.error]
    notes = [f"{name}: {note}" for name, run in ended if (note := statistics.instability(run.columns))]
    for line in (*notes, *unread(done), *changed):
        print(f"note: {line}", file=sys.stderr)
    failed = [one for one in done if one.error and not one.is_stopped]
    for one in failed:
        print(f"{one}: {one.cell.label}: {one.error}", file=sys.stderr)
    where = f"{command.program('report')} {shlex.quote(str(queue.folder))}"
    print(f"results in {queue.folder}; figures and tables: {where}", file=sys.stderr)
    return 1 if failed else 0


def _accepted(argv: list[str], until_the_end: contextlib.ExitStack) -> Queue:
    """What the command line asks for, in a folder that is owned until the end; ValueError or OSError for wrong input."""
    config, extra, words = arguments.split_words(argv[1:])
    options = _parser().parse_args(words, meant=functools.partial(arguments.meant, config))
    options.config = config
    for name in ("config", "methods", "set"):
        if options.file and getattr(options, name):
            raise ValueError(f"--{name}: got it with FILE {options.file}, accepted: without FILE")
    if options.small and not options.file:
        raise ValueError("--small: got it without FILE, accepted: with a sweep's file")
    of_words = options.config, options.methods, options.set
    table = config_file.sweep(options.file, options.small) if options.file else sweep.from_words(*of_words)
    for key in extra:
        if len({repr(cell.overrides.get(key)) for cell in table.cells()}) > 1:
            raise ValueError(f"config.{key}: got it for all runs, and rows or columns set it, too, accepted: one of both")
    cells = [cell._replace(settings=settings_of(cell, extra)) for cell in table.cells()]
    if not options.file:  # a file may give one experiment several names
        sweep.check_apart(cells)
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
    sweep.write(folder, {"name": name, "about": table.about, "x": table.x, "command": _typed(options, extra)}, cells)
    chosen = set(itertools.product(options.rows or table.rows, options.columns or table.columns))
    cells = [cell for cell in cells if (cell.row, cell.column) in chosen]
    keys = [f"--config.{key}={text}" for key, text in extra.items()]
    queue = Queue(cells, seeds, folder, keys, options.jobs, stop_after=options.stop_after, overwrite=options.overwrite)
    queue.recover()
    left = (cell for cell in cells if options.overwrite or not queue.done(cell).has_ended)
    prepare.fetch_missing(cell.settings.data for cell in left)  # here, where it is seen
    return queue


def _typed(options: argparse.Namespace, extra: Mapping[str, str]) -> str:
    """The command without what this machine alone has: folders and jobs."""
    words = [options.file, *(f"--{key}={value}" for key in ("config", "methods") if (value := getattr(options, key)))]
    words += [f"--set={one}" for one in options.set] + ["--small"] * options.small
    words += [f"--{key}={value}" for key in ("seeds", "stop_after") if (value := getattr(options, key))]
    words += [f"--config.{key}={PLACES.get(key, text)}" for key, text in extra.items()]
    for axis in ("rows", "columns"):
        words += [f"--{axis}", *chosen] if (chosen := getattr(options, axis)) else []
    return f"{command.program('sweep')} {shlex.join(filter(None, words))}"


def settings_of(cell: sweep.Cell, extra: Mapping[str, str]) -> Settings:
    """The settings of a cell's runs, with `extra` keys; ValueError where they are wrong."""
    given = {key: as_text(value) for key, value in cell.overrides.items()} | dict(extra)
    settings = Settings.from_dict(config_file.read(cell.config, given).tree)
    if settings.is_several:
        raise ValueError("config.seeds, config.vary: got several runs, accepted: --seeds=N and --set KEY=VALUE,VALUE")
    return settings


def _parser() -> arguments.Parser:
    parser = arguments.Parser("sweep", __doc__)
    whole, several = arguments.whole, "a key and its values; with several --set, all combinations of their values are run"
    known = ", ".join(config_file.sweep_names())
    parser.add_argument("file", nargs="?", default="", metavar="FILE", help=f"one of {known}, or a TOML file")
    parser.add_argument("--config", default="", help="a config, with {method} in its argument")
    parser.add_argument("--methods", default="", help="names for {method}, separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=V,V", help=several)
    seeds = "number of seeds, which are 0 to N - 1 unless the config sets `seed` (default: the file's number, or 1)"
    parser.add_argument("--seeds", metavar="N", type=whole(1), help=seeds)
    for axis in ("rows", "columns"):
        parser.add_argument(f"--{axis}", nargs="+", help=f"the {axis} to run (all)")
    parser.add_argument("--small", action="store_true", help="the file's small version")
    parser.add_argument("--jobs", type=whole(0), default=0, help="programs at a time (one for each GPU, or core)")
    parser.add_argument("--stop_after", type=whole(1), help="end runs after so many rounds; the command without it goes on")
    parser.add_argument("--overwrite", action="store_true", help="run anew what has ended or stopped, too")
    parser.add_argument("--workdir", default="", help="where results go (runs/NAME)")
    parser.add_argument("--config.KEY", metavar="VALUE", help="a key's value in every run")
    return parser


if __name__ == "__main__":
    command.exit_with(main)
