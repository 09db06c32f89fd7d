"""How long a run takes to begin, the first time and again, and what several seeds as one program take beside one.

    python -m benchmarks.starts --json=benchmarks/results/starts_<machine>.json

`launch.run --config=configs/digits.py:fl2` for a few rounds, of one seed and of four: once with an empty cache of programs,
then some times with what the first left. `wall_s` is the whole process, `start_s` the same up to the end of round 1,
`compile_s` what compiling or reading programs takes, `round_s` the median of the later rounds. Run time: two minutes on two CPU
cores.
"""

import os
import pathlib
import subprocess
import tempfile

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result, Rows
from benchmarks.programs import clocked
from fedjax_ssl.files import read_json
from fedjax_ssl.runs.log import MetricsLog

CONFIG = "configs/digits.py:fl2"
SEEDS, ROUNDS, LATER = (1, 4), 5, 3
KEYS = ("wall_s", "start_s", "compile_s", "round_s")
HEAD = ("", "whole process s (range)", "to the end of round 1 (range)", "compiling (range)", "a round (range)")


def rows(one: Result) -> Rows:
    """The rows of the first start and of the later ones: medians, and the least and the greatest of several."""

    def cell(values: list[float]) -> str:
        return f"{np.median(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")

    starts = (("first", [one["first"]]), ("later", one["later"]))
    return [[f"{one['case']['seeds']} seeds, {name}", *(cell([r[k] for r in runs]) for k in KEYS)] for name, runs in starts]


def start(folder: pathlib.Path, cache: pathlib.Path, seeds: int) -> Result:
    """One run in a folder: seconds of the process, in all and to its first round's end, of compiling, and of a round."""
    command = harness.launch(CONFIG, folder, {"rounds": ROUNDS} | ({"seeds": seeds} if seeds > 1 else {}))
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    _, wall = clocked(lambda: subprocess.run(command, env=environment, capture_output=True, check=True, cwd=harness.ROOT))
    run = next(folder.rglob("metrics.jsonl")).parent  # of several seeds each has the times of the program
    found = MetricsLog(run).rows()
    return {
        "wall_s": wall,
        "start_s": wall - (found[-1]["time/total_s"] - found[0]["time/total_s"]),
        "compile_s": found[-1]["time/compile_s"],
        "round_s": float(np.median([row["time/round_s"] for row in found[1:]])),
        "device": read_json(run / "summary.json")["device"],
    }


def measure(seeds: int) -> Result:
    """A first start, and later ones."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        first, *later = [start(folder / str(number), folder / "cache", seeds) for number in range(1 + LATER)]
    return {"case": {"seeds": seeds}, "rounds": ROUNDS, "first": first, "later": later, "device": first["device"]}


if __name__ == "__main__":
    arguments = harness.parser(__doc__).parse_args()
    harness.collect(arguments.json, map(measure, SEEDS), rows, "1 round of each run", config=CONFIG)
