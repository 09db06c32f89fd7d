"""What all benchmarks share: statistics, the order of turns, processes, and result files that say where they are from."""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from fedjax_ssl.files import replacing
from fedjax_ssl.report import cells
from fedjax_ssl.runs.provenance import cores, git_commit, processor

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
PLACES = {"--json": "FILE", "--peers": "DIR", "--compare-with": "DIR"}  # what a result's command has in place of a path
BEGAN = time.monotonic()
Result = dict[str, Any]
Rows = list[Sequence[str]]  # a result's rows in the table that its command prints and `report` writes


def spread(values: Sequence[float], name: str = "seconds", ends: str = "quartiles") -> Result:
    """The median of values and their quartiles, by these names, and how many there are."""
    low, median, high = (float(x) for x in np.quantile(values, (0.25, 0.5, 0.75)))
    return {name: median, ends: [low, high], "repeats": len(values)}


def number(value: float) -> str:
    """A number with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else np.format_float_positional(value, 3, fractional=False, trim="-")


def between(result: Result, key: str, ends: str) -> str:
    """A number of a result and its interval, if that is one; in place of seconds, what went wrong."""
    if key in result:
        interval = [number(end) for end in result[ends]]
        return number(result[key]) + f" ({interval[0]} to {interval[1]})" * (interval[0] != interval[1])
    return (result.get("error") or result.get("left_out", "")) if key == "seconds" else ""


def balanced(items: Sequence[Any], turn: int) -> list[Any]:
    """Items in the order of a turn. Over as many turns as items, or twice as many of an odd number, each has each place, and
    comes after each other one, equally often (Williams, Experimental designs balanced for the estimation of residual effects,
    1949)."""
    count = len(items)
    zigzag = [place // 2 if place % 2 == 0 else count - 1 - place // 2 for place in range(count)]
    order = [items[(one + turn) % count] for one in zigzag]
    return order[::-1] if count % 2 and turn // count % 2 else order


def provenance(device: str, warm_up: str, **settings: Any) -> dict[str, Any]:
    """Where results are from: command, commit, machine, device, versions, warm-up and seconds since the command began."""
    words = [f"benchmarks.{pathlib.Path(sys.argv[0]).stem}"]
    for before, word in itertools.pairwise(sys.argv):
        option, equals, _ = word.partition("=")
        words.append(PLACES.get(before) or (f"{option}={PLACES[option]}" if equals and option in PLACES else word))
    command, machine = f"python -m {shlex.join(words)}", f"{processor()}, {os.cpu_count()} cores"
    about = {"command": command, "commit": git_commit(), "machine": machine, "device": device}
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
    return about | {"versions": versions, "warm_up": warm_up, "elapsed_s": round(time.monotonic() - BEGAN, 1)} | settings


def load(path: pathlib.Path) -> list[dict[str, Any]]:
    """The commands whose results a file has, each as `provenance` with its `results`; none where there is no file."""
    return cells.from_json(path) if path.exists() else []


def save(path: pathlib.Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Adds a command's results to a file, one a line; results that the file has of the same `case` are replaced."""
    text = cells.as_json(cells.added(load(path), about, results))
    with replacing(path) as file:
        file.write(text.encode())


def launch(config: str, workdir: pathlib.Path | str, settings: dict[str, Any]) -> list[str]:
    """The command of a run of a config with other settings."""
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "launch.run", f"--config={config}", f"--workdir={workdir}", *overrides]


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """A command line with `--json`."""
    made = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=pathlib.Path, help="file to add the results to")
    return made


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end the command as Ctrl-C does: what it started ends with it."""
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, lambda number, _: sys.exit(128 + number)) for one in ends]
    try:
        yield
    finally:
        for one, handler in zip(ends, before, strict=True):
            signal.signal(one, handler)


def collect(path: pathlib.Path | None, found: Iterable[Result], rows: Callable[..., Rows], warm_up: str, **of: Any) -> None:
    """Prints each result as it is found and writes all so far, with settings `of` the command; exit status 1 after an error."""
    results: list[Result] = []
    with ending_all():
        for result in found:
            results.append(result)
            print(*(" | ".join(row) for row in rows(result)), sep="\n", flush=True)
            if path:
                device = next((one["device"] for one in results if "device" in one), "cpu")
                save(path, provenance(device, warm_up, **of), results)
    if any("error" in result for result in results):
        sys.exit(1)


class WorkerError(RuntimeError):
    """A request to a measured process failed; the message is one line."""


class Worker(contextlib.AbstractContextManager):
    """A process of `benchmarks/programs.py` on a checkout's package, with this process's environment and `environment`.

    `devices` is its number of JAX devices on a CPU; 0: one for each core, as `launch.run` has.
    """

    def __init__(self, package: pathlib.Path = ROOT, environment: dict[str, str] | None = None, devices: int = 0) -> None:
        of_jax = {"JAX_NUM_CPU_DEVICES": str(devices or cores()), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(pathlib.Path(__file__).with_name("programs.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=package,
            env={**os.environ, **of_jax, "PYTHONPATH": str(package.resolve()), **(environment or {})},
        )  # fmt: skip

    def ask(self, request: str, **arguments: Any) -> Any:
        """What a method of `Session` returns; raises WorkerError where it fails or the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([request, arguments]), file=self._process.stdin, flush=True)
        for line in self._process.stdout or ():
            if line.startswith("@"):
                answer = json.loads(line[1:])
                if "error" in answer:
                    raise WorkerError(answer["error"])
                return answer["found"]
        raise WorkerError(f"the process ended with status {self._process.wait()}")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def in_turns(workers: Sequence[Worker], request: str, seconds: float, least: int) -> list[list[Result]]:
    """What each worker's `rounds` (or `evaluate`) took after its warm-up, one a turn, in whole sets of balanced orders: at
    least `least` turns, of which the first worker's take at least `seconds`."""
    found: list[list[Result]] = [[] for _ in workers]
    whole = 2 * len(workers) if len(workers) % 2 and len(workers) > 1 else len(workers)
    while len(found[0]) < least or len(found[0]) % whole or sum(row["seconds"] for row in found[0]) < seconds:
        for worker, rows in balanced([*zip(workers, found, strict=True)], len(found[0])):
            rows += worker.ask(request, number=1)
    return found


def last_error(text: str) -> str:
    """The last line of a log that is an error's message, or else the last line; empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    messages = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|ERROR|error|Exception): \S", line)]
    return (messages or lines or [""])[-1]


def run_alone(command: Sequence[str], log: pathlib.Path, timeout: float, environment: dict[str, str]) -> str:
    """Runs a command with its output in a file, and ends its group of processes with it: what went wrong, or empty."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # none of them is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return (last_error(log.read_text(errors="replace")) or f"exit status {status}") if status else ""
