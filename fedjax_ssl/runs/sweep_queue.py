"""A queue that runs the programs of a sweep, each as a `launch.run`."""

import collections
import concurrent.futures
import contextlib
import importlib.util
import itertools
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from fedjax_ssl.experiment import plan
from fedjax_ssl.experiment.expansion import CLIENT_FILES, flattened, identity, runs_of
from fedjax_ssl.files import plain
from fedjax_ssl.host_memory import free_bytes
from fedjax_ssl.options import as_text, plural
from fedjax_ssl.runs import changes, reading
from fedjax_ssl.runs.folder import RUN
from fedjax_ssl.runs.lock import owned
from fedjax_ssl.runs.provenance import cores, dataset_digest
from fedjax_ssl.runs.sweep import Cell
from fedjax_ssl.runs.sweep_programs import Program, programs

JOB_BYTES = 2_000_000_000  # of memory for a job on a CPU; most need less
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
ROOT = None if (_PACKAGE / "launch").exists() else _PACKAGE.parent  # a checkout's, where `launch` stands beside the package
RUN_PROGRAM = "launch.run" if ROOT else "fedjax_ssl.launch.run"


class Done(NamedTuple):
    """What a cell has come to: its runs, why one of them has no result, and whether all have ended or stopped."""

    cell: Cell
    runs: list[reading.Run]
    error: str
    has_ended: bool

    @property
    def is_stopped(self) -> bool:
        """Whether its runs have gone as far as was asked for, and some have rounds left."""
        return self.has_ended and bool(self.error) and not any(run.reason for run in self.runs)

    def __str__(self) -> str:
        """Mean and standard deviation over seeds of the last round's accuracy, in percent; or why there are none, in a word."""
        if self.is_stopped:
            return "stopped"
        if self.error:
            return "diverged" if self.has_ended else "failed"
        accuracies = np.array([100 * run.summary["eval/accuracy"] for run in self.runs])
        return f"{accuracies.mean():.1f}" + (f" ± {accuracies.std(ddof=1):.1f}" if len(accuracies) > 1 else "")


class Queue:
    """The cells' runs, `jobs` programs at a time, each on a GPU or on its share of the cores.

    A cell's runs are in `<folder>/<cell>/<seed>`. While a program that several cells share is running, they are in that
    program's folder. `extra` are further words of `launch.run`; `stop_after` is the round after which runs stop, None: their
    last one. With `overwrite` all of them start anew.
    """

    def __init__(
        self, cells: Sequence[Cell], seeds: int, folder: pathlib.Path, extra: Sequence[str], jobs: int, *,
        stop_after: int | None = None, overwrite: bool = False,
    ) -> None:  # fmt: skip
        self.cells, self.seeds, self.folder, self._overwrite = cells, seeds, folder, overwrite
        self.extra = [*extra, *([f"--stop_after={stop_after}"] if stop_after else []), *["--overwrite"] * overwrite]
        self._last = stop_after or math.inf
        self._gpus = gpus()
        self._jobs = max(1, min(jobs or len(self._gpus) or _cpu_jobs(), len(cells)))
        self._slots = collections.deque(range(self._jobs))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._starting = threading.Lock()
        self._is_stopped = False
        self._said = set[str]()
        self._datasets: dict[str, str] = {}
        self._rounds: dict[pathlib.Path, tuple[int, int]] = {}  # a log's size and its lines

    def recover(self) -> None:
        """Moves runs that a killed sweep left in programs' folders to their cells; OwnedError where one still goes on."""
        for path in self.folder.glob("shared@*/*/config.json"):
            try:
                tree = reading.read(path.parent, "").tree  # with the keys that it does not read
            except ValueError:  # it is damaged
                continue
            seed, there = tree["seed"], flattened(tree)
            owns = (self.folder / cell.name / f"{seed}" for cell in self.cells if _is_of(cell, seed, there))
            if own := next((one for one in owns if not one.exists()), None):
                _move(path.parent, own)

    def run(self) -> list[Done]:
        """Runs what is not done yet; results in the order of the cells. Ctrl-C and SIGTERM end it, and what it runs."""
        usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
        with concurrent.futures.ThreadPoolExecutor(self._jobs) as pool, self._bar() as bar:
            try:
                done = {cell.name: one for cell in self.cells if (one := self.done(cell)).has_ended and not self._overwrite}
                left = programs([cell for cell in self.cells if cell.name not in done], self._jobs)
                waiting = {pool.submit(self._program, one): one for one in left}
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
            except BaseException:
                self._stop()
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
            with contextlib.suppress(OSError):  # a folder that has just moved; Python 3.11's glob says so, too
                for log in self.folder.glob("*/*/metrics.jsonl"):
                    is_new = (size := log.stat().st_size) != before.get(log, (-1, 0))[0]
                    self._rounds[log] = (size, log.read_bytes().count(b"\n")) if is_new else before[log]
            bar.n, done_rounds = len(done), sum(lines for _, lines in self._rounds.values())
            bar.set_description_str(f"{plural(done_rounds, 'round')} done")
            return
        for name in [name for name in done if name not in self._said]:
            self._said.add(name)
            cell = done[name].cell
            print(f"{cell.label}: {done[name].error or done[name]}", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """Asks all runs to save their state and to end, for which the threads wait; none is started any more."""
        with self._starting:
            self._is_stopped = True
            for process in list(self._running):
                process.send_signal(signal.SIGTERM)

    def changes(self) -> list[str]:
        """How the code differs from what the `run.json` files of the cells' runs note, in lines; none with `overwrite`."""
        found: dict[str, dict[pathlib.Path, str]] = {changes.ENDED: {}, changes.GOES_ON: {}}
        for cell in () if self._overwrite else self.cells:
            consequence = changes.ENDED if self.done(cell).has_ended else changes.GOES_ON
            for seed in range(cell.settings.seed, cell.settings.seed + self.seeds):
                folder = self.folder / cell.name / f"{seed}"
                with contextlib.suppress(ValueError, OSError):  # a damaged file, which `launch.run` names
                    found[consequence][folder] = changes.changed(folder / RUN, cell.settings)
        return [line for consequence, said in found.items() for line in changes.lines(said, consequence).values()]

    def done(self, cell: Cell, error: str = "") -> Done:
        """What a cell's folder holds; `error` is why it has not ended."""
        found: list[reading.Run] = []
        problems: list[str] = []
        for seed in range(cell.settings.seed, cell.settings.seed + self.seeds):
            try:
                run = reading.read(self.folder / cell.name / f"{seed}", cell.name)
            except ValueError:  # there is none, or its config is damaged: `launch.run` says so
                continue
            except OSError as unreadable:
                problems.append(f"seed {seed}: {unreadable}")
                continue
            if not _is_of(cell, seed, flattened(run.tree)) or (run.dataset and self._dataset(cell) not in ("", run.dataset)):
                continue  # `launch.run` says of other data what is wrong
            is_stopped = not run.is_finished and not run.problems and run.rounds_done >= self._last
            if run.reason or is_stopped or (run.is_finished and run.summary):
                found.append(run)
            else:
                problems += [f"seed {seed}: {line}" for line in run.problems]
        if len(found) < self.seeds:
            return Done(cell, found, error or "; ".join(problems) or "no result", has_ended=False)
        errors = zip(found, reading.errors(found), strict=True)
        wrong = (f"seed {run.config['seed']}: {why}" for run, why in errors if why)
        return Done(cell, found, "; ".join(wrong), has_ended=True)

    def _dataset(self, cell: Cell) -> str:
        """The digest of the user's own data that a cell's runs read; empty where it has none, or they cannot be read."""
        data = cell.settings.data
        key = repr((data.name, data.path, data.renumber_labels, data.resplit))
        if data.path and key not in self._datasets:
            self._datasets[key] = ""
            with contextlib.suppress(ValueError, OSError):
                found = plan.load_dataset(cell.settings)
                self._datasets[key] = dataset_digest(found, found.train_images.shape[1:])
        return self._datasets.get(key, "")

    def _program(self, program: Program) -> list[Done]:
        """Runs a program on a slot that is free; empty where several cells are refused, and each needs its own program."""
        slot = self._slots.popleft()
        try:
            with self._together(program):
                error, is_refused = self._outcome(program, slot)
        except (ValueError, OSError) as wrong:  # such as a full disk; the other programs go on
            error, is_refused = str(wrong), False
        finally:
            self._slots.append(slot)
        return [] if is_refused and program.is_shared else [self.done(cell, error) for cell in program.cells]

    @contextlib.contextmanager
    def _together(self, program: Program) -> Iterator[None]:
        """Within it the runs of several cells are in the program's folder, under the names that they have there."""
        runs = runs_of(program.settings(self.seeds)) if program.is_shared else ()  # of each seed all values
        places = [
            (self.folder / cell.name / f"{run.settings.seed}", self.folder / program.name / run.name)
            for cell, run in zip(itertools.cycle(program.cells), runs)
        ]
        try:
            for own, shared in places:
                if own.exists():
                    _move(own, shared)
            yield
        finally:
            for own, shared in places:
                if shared.exists():
                    _move(shared, own)

    def _outcome(self, program: Program, slot: int) -> tuple[str, bool]:
        """Runs a program, or, where that is refused, the seeds of its cell one after another; as `_in_turn`."""
        settings, workdir = program.settings(self.seeds), self.folder / program.name
        words = [f"--config.{key}={as_text(getattr(settings, key))}" for key in ("vary", "values") if settings.vary]
        words += [f"--config.seeds={self.seeds}"] if self.seeds > 1 else []
        seeds = range(settings.seed, settings.seed + self.seeds)
        alone = [[f"--config.seed={seed}", f"--workdir={workdir / f'{seed}'}"] for seed in seeds]
        if not words:
            return self._in_turn(program, slot, alone)
        error, is_refused = self._in_turn(program, slot, [[*words, f"--workdir={workdir}"]])
        return self._in_turn(program, slot, alone) if is_refused and not program.is_shared else (error, is_refused)

    def _in_turn(self, program: Program, slot: int, commands: Sequence[Sequence[str]]) -> tuple[str, bool]:
        """Runs one `launch.run` after another; output is appended to the program's log.

        Each has further words. Returns (why the first that failed did, or "", whether one was refused).
        """
        cell, log, error, is_refused = program.cells[0], self.folder / f"{program.name}.log", "", False
        overrides = [f"--config.{key}={as_text(value)}" for key, value in cell.overrides.items()]
        for words in commands:
            of_key = {word.partition("=")[0]: word for word in (*overrides, *self.extra, *words)}  # the last one, once
            line = [sys.executable, "-m", RUN_PROGRAM, f"--config={cell.config}", *of_key.values()]
            with log.open("ab") as file:
                file.write(f"$ {shlex.join(line)}\n".encode())
                file.flush()
                with self._starting:  # so that `_stop` knows it
                    if self._is_stopped:
                        break
                    process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, env=self._environment(slot))
                    self._running.add(process)
                self._pin(process, slot)
                status = process.wait()
                self._running.discard(process)
            if status and not self._is_stopped:
                last = log.read_text(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
                why = last if status > 0 else f"ended by {signal.Signals(-status).name}, as where memory is short"
                error = error or f"{why} ({log})"
            is_refused |= status == 2
        return error, is_refused

    def _environment(self, slot: int) -> dict[str, str]:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))} if ROOT else {}
        return {**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {})}

    def _pin(self, process: subprocess.Popen[bytes], slot: int) -> None:
        """Gives a job its share of the cores, before it looks how many it has."""
        if self._jobs > 1 and not self._gpus and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            with contextlib.suppress(OSError):  # it has ended, or the system forbids it
                os.sched_setaffinity(process.pid, cores[slot % len(cores) :: self._jobs] or cores)


def unread(done: Sequence[Done]) -> list[str]:
    """A line for each key that a column sets and no run that has ended reads."""
    keys = {key: None for one in done for key in one.cell.overrides}
    runs = [run for one in done for run in one.runs if not run.error]
    return [f"{key}: no run of this sweep reads it" for key in keys if runs and all(key not in run.config for run in runs)]


def _is_of(cell: Cell, seed: int, config: Mapping[str, Any]) -> bool:
    """Whether the config of a run, of dotted keys, is that of a cell with a seed."""
    asked = flattened(plain(cell.settings.model_copy(update={"seed": seed}).to_dict()))
    keys = ("data.path", *CLIENT_FILES)
    files, others = ([pathlib.PurePath(str(one.get(key, ""))).name for key in keys] for one in (config, asked))
    return identity(dict(config)) == identity(asked) and files == others


def _move(source: pathlib.Path, target: pathlib.Path) -> None:
    """Moves a run's folder, and removes the one that it was in once that is empty; OwnedError where it is in use."""
    with owned([source]):
        pass
    target.parent.mkdir(exist_ok=True)
    source.rename(target)
    with contextlib.suppress(OSError):  # there are more
        source.parent.rmdir()


def _cpu_jobs() -> int:
    """How many programs run at a time without a GPU: one for each core that has JOB_BYTES of free memory.

    Together they do more than one after another, each on all cores. One alone where the free memory is not known, or JAX has a
    plugin for another device, which a process has for itself.
    """
    is_told = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
    if not is_told and any(importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins")):
        return 1
    free = free_bytes()
    return max(1, min(cores(), free // JOB_BYTES)) if free else 1


def gpus() -> list[str]:
    """The GPUs that jobs can be dealt to, without a look at JAX: the visible ones, else those that the driver lists."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [word for word in visible.split(",") if word.strip()]
    return [str(number) for number, _ in enumerate(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))]
