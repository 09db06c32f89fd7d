"""Runs a table of experiments, each over several seeds, as a queue of `launch.run`; the same command again goes on.

    python -m launch.sweep fl2_ablation [--small] [--workdir=DIR]
    python -m launch.sweep --config=digits:{method},labels=10 --methods=fl2,semifl --seeds=3 --set data.split=iid,dir0.3

A FILE is a name in `configs/sweeps` or the path of a TOML file: `config` with {row} and {column}, `seeds`, `[rows]` and
`[columns]`, each with a `name`, what it `set`s, and words of its own, such as `data` for {data}; `[paper]` has accuracies to
compare with; `[small]` has what `--small` puts in its place. On the command line the rows are methods, for {method} in the
config, and the columns are the product of the values of all `--set`. Further arguments, such as --config.data.data_dir=DIR, go
to every run. Each GPU, or each share of the cores, runs one job (`--jobs`).
Exit status: 0 done; 2 wrong arguments; 1 a run failed, which is named; 130 on Ctrl-C.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tqdm

from . import command

SWEEPS = command.CONFIGS / "sweeps"
ROOT = pathlib.Path(__file__).resolve().parent.parent if __package__ == "launch" else None  # a checkout's
METHOD = re.compile(r"\{(method|row)\}")


class Cell(NamedTuple):
    """One entry of the table: a config with overrides, over all seeds."""

    row: str
    column: str
    config: str
    overrides: dict[str, Any]
    paper: str = ""  # the paper's accuracy in %, as it is printed

    @property
    def name(self) -> str:
        """Its folder's name."""
        return re.sub(r"[^\w.=+-]+", "-", "-".join(filter(None, (self.row, self.column)))).strip("-") or "run"


class Done(NamedTuple):
    """What a cell has come to: its seeds' summaries, and why it failed; empty: it has not."""

    cell: Cell
    summaries: list[dict[str, Any]]
    error: str


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    arguments, extra = _parser().parse_known_args(argv[1:])
    try:
        spec = _from_file(arguments.file, arguments.small) if arguments.file else _from_arguments(arguments)
        strange = [word for word in extra if not word.startswith("--config.")]
        if strange:
            raise ValueError(f"{strange[0]}: not an argument; accepted: --config.KEY=VALUE for every run, or --help")
        cells = list(cells_of(spec))
        if len({cell.name for cell in cells}) < len(cells):
            raise ValueError("rows and columns: got two with the same name, accepted: different names")
        for cell in cells:  # a mistake is said before anything runs
            _checked(cell, extra)
        seeds = arguments.seeds or int(spec.get("seeds", 1))
        default = pathlib.Path("runs", (pathlib.Path(arguments.file).stem if arguments.file else "sweep"))
        folder = pathlib.Path(arguments.workdir).expanduser() if arguments.workdir else default
        folder = folder.with_name(f"{folder.name}-small") if arguments.small and not arguments.workdir else folder
        folder.mkdir(parents=True, exist_ok=True)
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    queue = Queue(cells, seeds, folder, extra, arguments.jobs)
    try:
        done = queue.run()
    except KeyboardInterrupt:
        queue.stop()
        print("stopped; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    print(table(done, seeds))
    failed = [one for one in done if one.error]
    for one in failed:
        print(f"failed: {one.cell.row} {one.cell.column}: {one.error} ({folder / one.cell.name}.log)", file=sys.stderr)
    print(f"results in {folder}; figures and tables: {command.program('report')} {shlex.quote(str(folder))}", file=sys.stderr)
    return 1 if failed else 0


def cells_of(spec: dict[str, Any]) -> Iterator[Cell]:
    """The cells of a table, row by row."""
    rows, columns = (_entries(spec.get(axis) or {"": {}}) for axis in ("rows", "columns"))
    papers = {row: of if isinstance(of, dict) else {"": of} for row, of in spec.get("paper", {}).items()}
    if strange := {(row, column) for row, of in papers.items() for column in of} - set(itertools.product(rows, columns)):
        raise ValueError(f"paper: got {' '.join(min(strange)).strip()!r}, accepted: a row, and a column where there are any")
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


def _from_file(name: str, small: bool) -> dict[str, Any]:
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


def _from_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    config, methods = arguments.config, [one for one in arguments.methods.split(",") if one]
    if not config:
        raise ValueError("FILE or --config: missing; for example --config=digits:{method} --methods=fl2,semifl --seeds=3")
    if bool(METHOD.search(config)) != bool(methods):
        raise ValueError(
            f"--methods: got {arguments.methods!r} with --config={config}, accepted: methods for {{method}} in --config"
        )
    axes = []
    for text in arguments.set:
        key, equals, values = text.partition("=")
        if not equals or not key or not values:
            raise ValueError(f"--set: got {text}, accepted: KEY=VALUE,VALUE,...")
        axes.append([(key, value) for value in values.split(",")])
    columns = {", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in one): {"set": dict(one)} for one in itertools.product(*axes)}
    return {"config": METHOD.sub("{row}", config), "rows": methods, "columns": columns}


def names() -> list[str]:
    """The sweeps that are known by name."""
    return sorted(path.stem for path in SWEEPS.glob("*.toml"))


def _checked(cell: Cell, extra: Sequence[str]) -> None:
    """Raises ValueError where the cell's config is wrong."""
    from fedjax_ssl.experiment.settings import Settings

    words = dict(word.removeprefix("--config.").partition("=")[::2] for word in extra)
    given = {key: _text(value) for key, value in cell.overrides.items()} | words
    Settings.from_dict(command.read(cell.config, given).tree)


def _text(value: Any) -> str:
    return (
        ",".join(map(str, value)) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
    )


class Queue:
    """The cells' runs, `jobs` at a time, each on a GPU or on its share of the cores."""

    def __init__(self, cells: Sequence[Cell], seeds: int, folder: pathlib.Path, extra: Sequence[str], jobs: int) -> None:
        self.cells, self.seeds, self.folder, self.extra = cells, seeds, folder, extra
        self._gpus = gpus()
        self._jobs = min(jobs or max(len(self._gpus), 1), len(cells))
        self._slots = collections.deque(range(self._jobs))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def run(self) -> list[Done]:
        """Runs what is not done yet; results in the order of the cells."""
        with concurrent.futures.ThreadPoolExecutor(self._jobs) as pool, _Bar(self) as bar:
            futures = [pool.submit(self._cell, cell) for cell in self.cells]
            try:
                while not all(future.done() for future in futures):
                    bar.update([future.result() for future in futures if future.done()])
                    time.sleep(0.5)
            except KeyboardInterrupt:
                self.stop()
                raise
            results = [future.result() for future in futures]
            bar.update(results)
        return results

    def stop(self) -> None:
        """Asks all runs to save their state and to end, and waits for them."""
        self._stopped.set()
        for process in list(self._running):
            process.send_signal(signal.SIGTERM)
        for process in list(self._running):
            process.wait()

    def summaries(self, cell: Cell) -> list[dict[str, Any]]:
        """The summaries of the seeds that have finished."""
        from fedjax_ssl.experiment.files import read_json

        found = []
        for seed in range(self.seeds):
            with contextlib.suppress(OSError, ValueError):  # none yet, or damaged: its run writes it anew
                found.append(read_json(self.folder / cell.name / str(seed) / "summary.json"))
        return found

    def _cell(self, cell: Cell) -> Done:
        """All seeds of a cell in one program, or, where its method refuses that, one after another."""
        several = [f"--config.seeds={self.seeds}"] if self.seeds > 1 else []
        workdir, noted = self.folder / cell.name, self.folder / f"{cell.name}.done"
        asked = shlex.join([*self._words(cell), *several])  # another config is another experiment, which launch.run refuses
        finished = noted.exists() and noted.read_text() == asked and len(self.summaries(cell)) == self.seeds
        if finished or self._stopped.is_set():
            return Done(cell, self.summaries(cell), "")
        slot = self._slots.popleft()
        try:
            status, error = self._process(cell, several, workdir if several else workdir / "0", slot)
            if status == 2 and several:
                for seed in range(self.seeds):
                    status, error = self._process(cell, [f"--config.seed={seed}"], workdir / str(seed), slot)
                    if status:
                        break
            if status == 0:
                noted.write_text(asked)
        finally:
            self._slots.append(slot)
        return Done(
            cell, self.summaries(cell), "" if status == 0 or self._stopped.is_set() else error or f"exit status {status}"
        )

    def _words(self, cell: Cell) -> list[str]:
        """The arguments of a cell's runs, but for seeds and folder."""
        overrides = [f"--config.{key}={_text(value)}" for key, value in cell.overrides.items()]
        return [f"--config={cell.config}", *overrides, *self.extra]

    def _process(self, cell: Cell, words: Sequence[str], workdir: pathlib.Path, slot: int) -> tuple[int, str]:
        """(exit status, last line) of a run, whose output is appended to the cell's log."""
        line = [sys.executable, "-m", f"{__package__}.run", *self._words(cell), *words, f"--workdir={workdir}"]
        log = self.folder / f"{cell.name}.log"
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(line)}\n".encode())
            file.flush()
            process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=self._environment(slot))
            self._running.add(process)
            self._pin(process, slot)
            status = process.wait()
            self._running.discard(process)
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        return status, last.removeprefix("error: ")

    def _environment(self, slot: int) -> dict[str, str]:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))} if ROOT else {}
        return {**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {})}

    def _pin(self, process: subprocess.Popen[bytes], slot: int) -> None:
        """Gives a job its share of the cores, before it looks how many it has."""
        if self._jobs > 1 and not self._gpus and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(process.pid, cores[slot % len(cores) :: self._jobs] or cores)


class _Bar:
    """Progress of a whole sweep in rounds, on a terminal; in a log a line for each finished cell."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._said = queue, set[str]()

    def __enter__(self) -> "_Bar":
        cells = len(self._queue.cells)
        layout = "{n_fmt}/{total_fmt} experiments {bar:30} {elapsed}, {desc}"
        self._bar = tqdm.tqdm(
            total=cells, file=sys.stderr, bar_format=layout, disable=not sys.stderr.isatty(), dynamic_ncols=True
        )
        return self

    def update(self, done: Sequence[Done]) -> None:
        """Shows how far the sweep is."""
        self._bar.n = len(done)
        self._bar.set_description_str(f"{self._rounds():,} rounds done")
        for one in done:
            if self._bar.disable and one.cell.name not in self._said:
                self._said.add(one.cell.name)
                print(f"{one.cell.row} {one.cell.column}: {one.error or accuracy(one)}".strip(), file=sys.stderr, flush=True)

    def _rounds(self) -> int:
        logs = self._queue.folder.glob("*/*/metrics.jsonl")
        return sum(log.read_bytes().count(b"\n") for log in logs)

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def gpus() -> list[str]:
    """The GPUs that jobs can be dealt to, without a look at JAX: the visible ones, else those that the driver lists."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    return [str(number) for number, _ in enumerate(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))]


def accuracy(done: Done) -> str:
    """Mean and standard deviation over seeds of the last round's accuracy, in percent."""
    values = [100 * one["eval/accuracy"] for one in done.summaries]
    if not values:
        return "-"
    return f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def table(done: Sequence[Done], seeds: int) -> str:
    """The accuracies as text, rows by columns, the paper's beside them."""
    rows, columns = (list(dict.fromkeys(getattr(one.cell, axis) for one in done)) for axis in ("row", "column"))
    of_cell = {(one.cell.row, one.cell.column): _entry(one) for one in done}
    head = ["", *columns] if columns != [""] else ["", "accuracy %"]
    lines = [head, *([row, *(of_cell[row, column] for column in columns)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  ".join(f"{word:<{width}}" for word, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    of_seeds = f", mean ± sd over {seeds} seeds" if seeds > 1 else ""
    of_paper = ", in brackets the paper's" if any(one.cell.paper for one in done) else ""
    return f"accuracy of the last round in %{of_seeds}{of_paper}\n{text}" if of_seeds or of_paper else text


def _entry(done: Done) -> str:
    return ("failed" if done.error else accuracy(done)) + (f" [{done.cell.paper}]" if done.cell.paper else "")


def _parser() -> argparse.ArgumentParser:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        command.program("sweep"), description=__doc__, formatter_class=as_written, allow_abbrev=False
    )
    parser.add_argument("file", nargs="?", default="", metavar="FILE", help=f"one of {', '.join(names())}, or a TOML file")
    parser.add_argument("--config", default="", help="a config, with {method} in its argument")
    parser.add_argument("--methods", default="", help="names for {method}, separated by commas")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=V,V", help="values of a key; several --set: all products"
    )
    parser.add_argument("--seeds", type=int, default=0, help="seeds from 0 on (the file's number, or 1)")
    parser.add_argument("--small", action="store_true", help="the file's small version")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time (one for each GPU, else 1)")
    parser.add_argument("--workdir", default="", help="where results go (runs/NAME)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv))
