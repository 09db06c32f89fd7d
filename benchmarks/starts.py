"""How long a run takes to begin, the first time and again, and what several seeds as one program take beside one.

    python -m benchmarks.starts [--json=benchmarks/results/starts.json]

`launch.run --config=configs/digits.py:fl2` for a few rounds, of one seed and of several, each in a process of its own: once
with an empty cache of programs, then some times with the one that the first left. `wall` is the whole process, `start` the same
without the rounds after the first, `compile` the part in which programs are compiled or read from the cache, and `round` the
median of the rounds after the first. Of the later starts: medians, with the least and the most. Run time: one to two minutes on
two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.provenance import devices, provenance

CONFIG = "configs/digits.py:fl2"
CASES = {"1 seed": {}, "4 seeds": {"seeds": 4}}


def start(folder: pathlib.Path, cache: pathlib.Path, settings: dict[str, Any]) -> dict[str, float]:
    """One run in a folder: seconds of the process, in all and to its first round's end, of compiling, and of a round."""
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "launch.run", f"--config={CONFIG}", f"--workdir={folder}", *overrides]
    began = time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, check=True)
    wall = time.perf_counter() - began
    log = next(folder.rglob("metrics.jsonl"))  # of several seeds each has the times of the program
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    after = rows[-1]["time/total_s"] - rows[0]["time/total_s"]
    return {
        "wall_s": wall,
        "start_s": wall - after,
        "compile_s": rows[-1]["time/compile_s"],
        "round_s": statistics.median(row["time/round_s"] for row in rows[1:]),
        "devices": json.loads((log.parent / "layout.json").read_text())["layout"]["devices"],
    }


def case(settings: dict[str, Any], again: int) -> dict[str, Any]:
    """A first start, and `again` later ones."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        runs = [start(folder / str(number), folder / "cache", settings) for number in range(1 + again)]
    return {"first": runs[0], "later": runs[1:]}


def line(name: str, what: str, runs: list[dict[str, float]]) -> str:
    """A line of the table."""

    def spread(key: str) -> str:
        values = [run[key] for run in runs]
        if len(values) == 1:
            return f"{values[0]:.2f}"
        return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"

    columns = " ".join(f"{spread(key):>22}" for key in ("wall_s", "start_s", "compile_s", "round_s"))
    return f"{name:8} {what:6} {columns}"


def main() -> None:
    """Runs the cases, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each run")
    parser.add_argument("--again", type=int, default=3, help="later starts of each case")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.again < 1:
        parser.error("accepted: at least 2 rounds, and 1 later start")
    print(f"{'':15} {'wall s':>22} {'start s':>22} {'compile s':>22} {'round s':>22}")
    results = []
    for name, settings in CASES.items():
        found = case({**settings, "rounds": arguments.rounds}, arguments.again)
        print(line(name, "first", [found["first"]]), line(name, "later", found["later"]), sep="\n", flush=True)
        results.append({"case": name, **found})
    if arguments.json:
        settings = {"config": CONFIG, "rounds": arguments.rounds, "warm_up_rounds": 1}
        where = provenance(devices(results[0]["first"]["devices"]))
        arguments.json.write_text(json.dumps({**where, **settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
