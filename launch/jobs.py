"""The programs that the cells of a sweep need, and a queue that runs them, each as a `launch.run`."""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import operator
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tqdm

from fedjax_ssl.experiment.files import plain
from fedjax_ssl.experiment.report import cells, runs
from fedjax_ssl.experiment.report.tables import spread
from fedjax_ssl.experiment.run import DIVERGED, SUMMARY
from fedjax_ssl.experiment.runs import flattened, identity, runs_of

from . import command

ROOT = pathlib.Path(__file__).resolve().parent.parent if __package__ == "launch" else None  # a checkout's


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


class Done(NamedTuple):
    """What a cell has come to: the results of its runs, why one of them has none, and whether all have ended."""

    cell: Cell
    results: list[dict[str, Any]]
    error: str
    has_ended: bool

    def __str__(self) -> str:
        """Mean and standard deviation over seeds of the last round's accuracy, in percent; or why there are none, in a word."""
        if self.error:
            return "diverged" if self.has_ended else "failed"
        return str(spread([100 * one["accuracy"] for one in self.results], 1))


class Program(NamedTuple):
    """The cells of one `launch.run`: one, or several, in a folder `shared`, that differ in the number `vary` alone."""

    cells: tuple[Cell, ...]
    vary: str = ""
    shared: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.shared if len(self.cells) > 1 else self.cells[0].name

    @property
    def log(self) -> str:
        """The name of its log, of which each part of a folder that programs share has its own."""
        return f"{self.shared}-{self.cells[0].name}" if len(self.cells) > 1 else self.cells[0].name

    def settings(self, seeds: int) -> Any:
        """The settings of all its runs."""
        several = {"vary": self.vary, "values": tuple(map(self._value, self.cells))} if len(self.cells) > 1 else {}
        return self.cells[0].settings.model_copy(update={"seeds": seeds, **several})

    def _value(self, cell: Cell) -> Any:
        return functools.reduce(operator.getitem, self.vary.split("."), cell.settings.to_dict())


def programs(cells: Sequence[Cell], least: int) -> list[Program]:
    """The programs of cells, in their order: those that differ in a number that `vary` takes share one.

    There are at least `least`, if there are so many cells. A cell whose number is 0 has one of its own: 0 often switches a part
    of a program off.
    """
    flat = {cell.name: flattened(cell.settings.to_dict()) for cell in cells}
    kinds: dict[tuple[str, str], list[Cell]] = {}
    for key in sorted({key for own in flat.values() for key, value in own.items() if type(value) is float}):
        if len({own.get(key) for own in flat.values()}) > 1:
            for cell in (cell for cell in cells if flat[cell.name].get(key)):
                others = repr({other: value for other, value in flat[cell.name].items() if other != key})
                kinds.setdefault((key, others), []).append(cell)
    left, found = {cell.name: cell for cell in cells}, []
    for (key, others), own in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        name = f"shared-{key.rpartition('.')[2]}-{hashlib.sha256(f'{key}{others}'.encode()).hexdigest()[:8]}"
        program = Program(tuple(cell for cell in own if cell.name in left), key, name)
        if len(program.cells) > 1 and _are_its_runs(program):
            found.append(program)
            left = {name: cell for name, cell in left.items() if cell not in program.cells}
    found += [Program((cell,)) for cell in left.values()]
    while len(found) < min(least, len(cells)):
        largest = max(found, key=lambda one: len(one.cells))
        half = len(largest.cells) // 2
        found.remove(largest)
        found += [largest._replace(cells=part) for part in (largest.cells[:half], largest.cells[half:])]
    return sorted(found, key=lambda one: cells.index(one.cells[0]))


def _are_its_runs(program: Program) -> bool:
    """Whether the runs of a program with several values are those that its cells ask for."""
    try:
        return [run.settings for run in runs_of(program.settings(seeds=1))] == [cell.settings for cell in program.cells]
    except ValueError:  # a number that does not vary
        return False


class Queue:
    """The cells' runs, `jobs` programs at a time, each on a GPU or on its share of the cores.

    A cell's runs end in `<folder>/<cell>/<seed>`. Those of a program that cells share move there once they have ended.
    """

    def __init__(self, cells: Sequence[Cell], seeds: int, folder: pathlib.Path, extra: Sequence[str], jobs: int) -> None:
        self.cells, self.seeds, self.folder, self.extra = cells, seeds, folder, extra
        self._gpus = gpus()
        self._jobs = max(1, min(jobs or max(len(self._gpus), 1), len(cells)))
        self._slots = collections.deque(range(self._jobs))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()
        self._said = set[str]()
        self._rounds: dict[pathlib.Path, tuple[int, int]] = {}  # a log's size and its lines

    def run(self) -> list[Done]:
        """Runs what is not done yet; results in the order of the cells. Ctrl-C and SIGTERM end it, and what it runs."""
        done = {cell.name: one for cell in self.cells if (one := self.done(cell)).has_ended}
        new = [cell for cell in self.cells if not (self.folder / cell.name).exists()]
        begun = [Program((cell,)) for cell in self.cells if cell.name not in done and (self.folder / cell.name).exists()]
        usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
        with concurrent.futures.ThreadPoolExecutor(self._jobs) as pool, self._bar() as bar:
            waiting = {pool.submit(self._program, one): one for one in (*begun, *programs(new, self._jobs - len(begun)))}
            try:
                while True:
                    for future in [future for future in waiting if future.done()]:
                        program, found = waiting.pop(future), future.result()
                        done |= {one.cell.name: one for one in found}
                        if not found:  # it was refused
                            waiting |= {pool.submit(self._program, one): one for one in map(Program, zip(program.cells))}
                    self._show(bar, done)
                    if not waiting:
                        return [done[cell.name] for cell in self.cells]
                    time.sleep(0.5)
            except KeyboardInterrupt:
                self.stop()
                raise
            finally:
                signal.signal(signal.SIGTERM, usual)

    def _bar(self) -> Any:
        layout = "{n_fmt}/{total_fmt} experiments {bar:30} {elapsed}, {desc}"
        stream, total = sys.stderr, len(self.cells)
        return tqdm.tqdm(total=total, file=stream, bar_format=layout, disable=not stream.isatty(), dynamic_ncols=True)

    def _show(self, bar: Any, done: Mapping[str, Done]) -> None:
        """Shows how far the sweep is: on a terminal in rounds, in a log by a line for each finished cell."""
        if not bar.disable:
            before, self._rounds = self._rounds, {}
            for log in self.folder.glob("*/*/metrics.jsonl"):
                with contextlib.suppress(OSError):  # it has just moved
                    is_new = (size := log.stat().st_size) != before.get(log, (-1, 0))[0]
                    self._rounds[log] = (size, log.read_bytes().count(b"\n")) if is_new else before[log]
            bar.n = len(done)
            bar.set_description_str(f"{sum(lines for _, lines in self._rounds.values()):,} rounds done")
            return
        for name in [name for name in done if name not in self._said]:
            self._said.add(name)
            cell = done[name].cell
            print(f"{cell.label}: {done[name].error or done[name]}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Asks all runs to save their state and to end, and waits for them."""
        self._stopped.set()
        for process in list(self._running):
            process.send_signal(signal.SIGTERM)
        for process in list(self._running):
            process.wait()

    def done(self, cell: Cell, error: str = "") -> Done:
        """What a cell's folder holds; `error` is why it has not ended."""
        found: list[dict[str, Any]] = []
        problems: list[str] = []
        for seed in range(cell.settings.seed, cell.settings.seed + self.seeds):
            asked = identity(flattened(plain(cell.settings.model_copy(update={"seed": seed}).to_dict())))
            with contextlib.suppress(ValueError):  # there is none, or its config is damaged: `launch.run` says so
                run = runs.read(self.folder / cell.name / f"{seed}", cell.name)
                if identity(run.config) != asked:
                    continue
                if run.reason or (run.is_finished and run.summary):
                    found.append(cells.result(run))
                else:
                    problems += [f"seed {seed}: {line}" for line in run.problems]
        if len(found) < self.seeds:
            return Done(cell, found, error or "; ".join(problems), has_ended=False)
        wrong = (f"seed {one['seed']}: {one['error']}" for one in found if "error" in one)
        return Done(cell, found, "; ".join(wrong), has_ended=True)

    def _program(self, program: Program) -> list[Done]:
        """Runs a program on a slot that is free; empty where several cells are refused, and each needs its own program."""
        if self._stopped.is_set():
            return [self.done(cell) for cell in program.cells]
        slot = self._slots.popleft()
        try:
            return self._on_slot(program, slot)
        finally:
            self._slots.append(slot)

    def _on_slot(self, program: Program, slot: int) -> list[Done]:
        """Runs a program; where that is refused, the seeds of its cell one after another."""
        settings, first = program.settings(self.seeds), program.cells[0].settings.seed
        words = [f"--config.{key}={command.as_text(getattr(settings, key))}" for key in ("vary", "values") if settings.vary]
        words += [f"--config.seeds={self.seeds}"] if self.seeds > 1 else []
        workdir = self.folder / program.name
        error, is_refused = self._process(program, words, workdir if words else workdir / f"{first}", slot)
        if len(program.cells) > 1:
            self._collect(program)
            if is_refused:
                return []
        if is_refused and words:
            error = ""
            for seed in range(first, first + self.seeds):
                wrong, is_refused = self._process(program, [f"--config.seed={seed}"], workdir / f"{seed}", slot)
                error = error or wrong
                if is_refused:
                    break
        return [self.done(cell, error) for cell in program.cells]

    def _collect(self, program: Program) -> None:
        """Moves the runs that have ended from a shared folder into those of their cells."""
        shared = self.folder / program.shared
        for number, run in enumerate(runs_of(program.settings(self.seeds))):  # of each seed all values
            target = self.folder / program.cells[number % len(program.cells)].name / f"{run.settings.seed}"
            if any((shared / run.name / name).exists() for name in (SUMMARY, DIVERGED)):
                target.parent.mkdir(exist_ok=True)
                (shared / run.name).rename(target)
        with contextlib.suppress(OSError):  # some are left
            shared.rmdir()

    def _process(self, program: Program, words: Sequence[str], workdir: pathlib.Path, slot: int) -> tuple[str, bool]:
        """(why a run failed or "", whether it was refused); its output is appended to the program's log."""
        cell = program.cells[0]
        overrides = [f"--config.{key}={command.as_text(value)}" for key, value in cell.overrides.items()]
        given = [f"--config={cell.config}", *overrides, *self.extra, *words, f"--workdir={workdir}"]
        line, log = [sys.executable, "-m", f"{__package__}.run", *given], self.folder / f"{program.log}.log"
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(line)}\n".encode())
            file.flush()
            process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=self._environment(slot))
            self._running.add(process)
            self._pin(process, slot)
            status = process.wait()
            self._running.discard(process)
        last = log.read_text(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
        return "" if status == 0 or self._stopped.is_set() else f"{last or f'exit status {status}'} ({log})", status == 2

    def _environment(self, slot: int) -> dict[str, str]:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))} if ROOT else {}
        return {**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {})}

    def _pin(self, process: subprocess.Popen[bytes], slot: int) -> None:
        """Gives a job its share of the cores, before it looks how many it has."""
        if self._jobs > 1 and not self._gpus and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(process.pid, cores[slot % len(cores) :: self._jobs] or cores)


def gpus() -> list[str]:
    """The GPUs that jobs can be dealt to, without a look at JAX: the visible ones, else those that the driver lists."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [word for word in visible.split(",") if word.strip()]
    return [str(number) for number, _ in enumerate(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))]
