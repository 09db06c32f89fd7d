"""How long a run takes to begin, the first time and again, and what several seeds as one program take beside one.

    python -m benchmarks.starts --json=benchmarks/results/starts_<machine>.json

`launch.run --config=configs/digits.py:fl2` for a few rounds, of one seed and of four, each in a process of its own: once with
an empty cache of programs, then some times with the one that the first left. `wall_s` is the whole process, `start_s` the same
without the rounds after the first, `compile_s` the part in which programs are compiled or read from the cache, `round_s` the
median of the later rounds. Run time: one to two minutes on two CPU cores.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result

CONFIG = "configs/digits.py:fl2"
SEEDS = (1, 4)
KEYS = ("wall_s", "start_s", "compile_s", "round_s")


def start(folder: pathlib.Path, cache: pathlib.Path, seeds: int, rounds: int) -> dict[str, Any]:
    """One run in a folder: seconds of the process, in all and to its first round's end, of compiling, and of a round."""
    overrides = [f"--config.rounds={rounds}", *([f"--config.seeds={seeds}"] if seeds > 1 else [])]
    command = [sys.executable, "-m", "launch.run", f"--config={CONFIG}", f"--workdir={folder}", *overrides]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    began = time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, check=True, cwd=harness.ROOT)
    wall = time.perf_counter() - began
    log = next(folder.rglob("metrics.jsonl"))  # of several seeds each has the times of the program
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        "wall_s": wall,
        "start_s": wall - (rows[-1]["time/total_s"] - rows[0]["time/total_s"]),
        "compile_s": rows[-1]["time/compile_s"],
        "round_s": float(np.median([row["time/round_s"] for row in rows[1:]])),
        "device": json.loads(next(folder.rglob("summary.json")).read_text())["device"],
    }


def measure(seeds: int, rounds: int, again: int) -> Result:
    """A first start, and `again` later ones."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        first, *later = [start(folder / str(number), folder / "cache", seeds, rounds) for number in range(1 + again)]
    return {"case": {"seeds": seeds}, "rounds": rounds, "first": first, "later": later, "device": first["device"]}


def spread(runs: list[dict[str, Any]], key: str) -> str:
    """The median of some runs' seconds, and the least and the greatest of several."""
    values = [run[key] for run in runs]
    return f"{np.median(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def line(result: Result) -> str:
    """Both rows of the printed table."""
    parts = (("first", [result["first"]]), ("later", result["later"]))
    head = f"{result['case']['seeds']} seeds"
    return "\n".join(f"{head}, {name}: " + ", ".join(f"{key} {spread(runs, key)}" for key in KEYS) for name, runs in parts)


def main() -> None:
    """Runs the cases, prints a table and writes it."""
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each run")
    parser.add_argument("--again", type=int, default=3, help="later starts of each case")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.again < 1:
        parser.error("--rounds, --again: accepted: at least 2 rounds, and 1 later start")
    found = (measure(seeds, arguments.rounds, arguments.again) for seeds in SEEDS)
    harness.collect(arguments.json, found, line, "1 round of each run", config=CONFIG)


if __name__ == "__main__":
    main()
