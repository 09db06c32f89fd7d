"""How a round's time and memory grow with the cohort, the clients, the local steps and the devices, and memory with rounds.

    python -m benchmarks.scaling [--only cohort clients] --json=benchmarks/results/scaling_<machine>.json

FixMatch on a small CNN, 4 images a client. One number changes at a time from BASE; in `states` each client has its momentum,
in `hosted` these and the images are in the host's memory, in `on_disk` they are in a file, and `devices` are virtual ones of a
CPU. Exponents c, with 95 % intervals, are of s = b x^c for seconds against clients and devices, else of s = a + b x^c, as a
round has a fixed cost. `rounds` is the growth of resident memory over ROUNDS rounds of `launch.run` but the first tenth; it
needs Linux. Run time: half an hour on two CPU cores.
"""

import os
import pathlib
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

from benchmarks import harness
from benchmarks.harness import Result, Rows, Worker, WorkerError
from benchmarks.programs import RUNS_LONG

BASE = {"cohort": 10, "clients": 1_000, "steps": 8, "devices": 1, "states": 0, "hosted": 0, "width": 16}
CLIENTS = (100, 300, 1_000, 3_000, 10_000, 30_000)
SERIES: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "cohort": ("cohort", (10, 20, 50, 100, 200, 500, 1_000), {}),
    "clients": ("clients", (*CLIENTS, 100_000, 300_000, 1_000_000), {}),
    "states": ("clients", CLIENTS, {"states": 1}),
    "hosted": ("clients", CLIENTS, {"states": 1, "hosted": 1}),
    "on_disk": ("clients", (1_000, 10_000, 100_000, 1_000_000), {"states": 1, "hosted": 2, "width": 4}),
    "steps": ("steps", (2, 4, 8, 16, 32, 64, 128), {}),
    "devices": ("devices", (1, 2, 4), {}),
}  # which number of BASE changes, its values, and what else differs from BASE
WITH_FIXED_COST = ("cohort", "steps")  # series whose seconds are fitted by a + b x^c
KINDS = ("seconds", "program_bytes", "peak_bytes")
WARM_UP, LEAST, SECONDS, ROUNDS, REPEATS = 2, 5, 4.0, 10_000, 3
HEAD = (
    "series", "from and to", "ms a round", "its exponent (95 %)", "program MB", "exponent of it (95 %)", "peak MB",
    "exponent of the peak (95 %)",
)  # fmt: skip


def rows(one: Result) -> Rows:
    """The row of a series: what its first and last points have, and the exponents with their intervals."""
    name = one["case"]["series"]
    if name == "rounds":
        growth = "grows by {:.0f} ± {:.0f} bytes a round".format(*one["growth"]) if "growth" in one else one["error"]
        return [["rounds", f"{one['rounds']:,}", *["", "", "", ""], growth, ""]]
    cells = [f"{name}: {one['error']}" if "error" in one else name, f"{one['x'][0]:,} to {one['x'][-1]:,} {one['of']}"]
    for kind, scale in zip(KINDS, (1e3, 1e-6, 1e-6), strict=True):
        ends = [scale * np.median([point.get(kind, np.nan) for point in one["points"][i]]) for i in (0, -1)]
        fit = one["fits"].get(kind)
        interval = " ({:.3f} to {:.3f})".format(*fit["interval"]) if fit and fit["interval"] else ""
        cells += [" to ".join(map(harness.number, ends)), f"{fit['exponent']:.3f}{interval}" if fit else "flat"]
    return [cells]


def config_of(point: dict[str, int]) -> dict[str, Any]:
    """The config of a point."""
    optimizer = {"persistent": bool(point["states"]), "schedule": "constant"}
    strategy, data = "sharded" if point["devices"] > 1 else "auto", ("device", "host", "disk")[point["hosted"]]
    return {
        "method": {"name": "fixmatch", "pseudo_labels": "local", "confidence": 0.0},
        "model": {"name": "cnn", "width": point["width"]}, "cohort_size": point["cohort"], **RUNS_LONG,
        "data": {"num_clients": point["clients"], "num_labels": 10, "weak": "none", "strong": "none"},
        "client": {"steps": point["steps"], "epochs": 0, "batch_size": 4, "optimizer": optimizer},
        "server": {"training": {"epochs": 1, "pretrain": 0}, "static_norm": {"data": "labeled"}},
        "execution": {"strategy": strategy, "devices": point["devices"], "data": data},
    }  # fmt: skip


def measure(point: dict[str, int], *, on_cpu: bool = False) -> Result:
    """A point's rounds in a process of its own."""
    data = {"count": 4 * point["clients"] + 10, "shape": (8, 8, 1)}
    try:
        with Worker(environment={"JAX_PLATFORMS": "cpu"} if on_cpu else {}, devices=point["devices"]) as worker:
            built = worker.ask("build", config=config_of(point), data=data)
            worker.ask("rounds", number=WARM_UP)
            (rows,) = harness.in_turns([worker], "rounds", SECONDS, LEAST)
            return {**harness.spread([row["seconds"] for row in rows]), **worker.ask("about"), "build_s": built["build_s"]}
    except WorkerError as error:
        return {"error": str(error)}


def power_law(x: Sequence[float], y: Sequence[float], *, fixed: bool) -> Result | None:
    """The exponent c of y = b x^c, by the slope of the logarithms, or with a `fixed` cost of y = a + b x^c with a, b >= 0, by
    relative residuals, and its 95 % interval (Student's), None where points are too few; None where y is fixed to a tenth."""
    if fixed:
        if max(y) < 1.1 * min(y) or len(set(x)) < 3:
            return None
        guess, bounds, at = (min(y) / 2, max(y), 1), ([0, 0, -2], [np.inf, np.inf, 3]), np.divide(x, max(x))
        fit, covariance = optimize.curve_fit(lambda x, a, b, c: a + b * x**c, at, y, guess, y, bounds=bounds)
        exponent, deviation, freedom = fit[2], np.sqrt(covariance[2, 2]), len(x) - 3
    else:
        line = stats.linregress(np.log(x), np.log(y))
        exponent, deviation, freedom = line.slope, line.stderr, len(x) - 2
    half = float(stats.t.ppf(0.975, freedom) * deviation)
    return {"exponent": float(exponent), "interval": (float(exponent - half), float(exponent + half)) if freedom > 0 else None}


def fits(name: str, points: dict[int, list[Result]]) -> dict[str, Result]:
    """The fits of a series: of seconds over all processes of each point, of bytes, which vary little, over the medians."""
    x, seconds = zip(*[(x, point["seconds"]) for x, of_x in points.items() for point in of_x], strict=True)
    found = {"seconds": power_law(x, seconds, fixed=name in WITH_FIXED_COST)}
    for kind in KINDS[1:]:
        medians = [np.median([point[kind] for point in of_x]) for of_x in points.values()]
        found[kind] = power_law([*points], medians, fixed=True)
    return {kind: fit for kind, fit in found.items() if fit}


def series(name: str) -> Result:
    """Measures the points of a series, and fits those that ran."""
    key, values, also = SERIES[name]
    order = [x for x in values for _ in range(REPEATS)]
    random.Random(0).shuffle(order)
    points: dict[int, list[Result]] = {x: [] for x in values}
    for x in order:
        points[x].append(measure({**BASE, **also, key: x}, on_cpu=name == "devices"))
    measured = [point for of_x in points.values() for point in of_x]
    errors = [{"error": point["error"]} for point in measured if "error" in point]
    ran = {x: of_x for x, of_x in points.items() if not any("error" in point for point in of_x)}
    device = next((point["device"] for point in measured if "device" in point), "cpu")
    about = {"case": {"series": name}, "of": key, "also": also, "device": device, **(errors[0] if errors else {})}
    return {**about, "x": list(values), "points": list(points.values()), "fits": fits(name, ran) if len(ran) > 1 else {}}


def memory(rounds: int = ROUNDS, every_s: float = 0.2) -> Result:
    """Runs many rounds as a command, and fits the growth of its resident memory in bytes a round, by a look every so often."""
    case: Result = {"case": {"series": "rounds"}, "rounds": rounds}
    resident: list[tuple[int, int]] = []  # rounds finished, bytes
    with tempfile.TemporaryDirectory() as folder, pathlib.Path(folder, "errors").open("w+") as errors:
        settings = {"model.width": 4, "eval_every": 10, "checkpoint_every": 500, "rounds": rounds}
        command = harness.launch("configs/digits.py:fixmatch", f"{folder}/run", settings)
        process = subprocess.Popen(command, stdout=errors, stderr=errors, cwd=harness.ROOT)
        log = pathlib.Path(folder, "run", "metrics.jsonl")
        while process.poll() is None:
            time.sleep(every_s)
            pages = int(pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            finished = log.read_bytes().count(b"\n") if log.exists() else 0
            if pages and finished > (resident[-1][0] if resident else 0):
                resident.append((finished, pages * os.sysconf("SC_PAGE_SIZE")))
        errors.seek(0)
        error = harness.last_error(errors.read()) if process.returncode else "the run ended too soon to be watched"
    late = np.asarray([pair for pair in resident if pair[0] > rounds / 10])
    if process.returncode or len(late) < 3:
        return case | {"error": error}
    fit = stats.linregress(late[:, 0], late[:, 1])
    half = stats.t.ppf(0.975, len(late) - 2) * fit.stderr
    return case | {"growth": [float(fit.slope), float(half)], "resident": resident}


if __name__ == "__main__":
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=(*SERIES, "rounds"), default=(*SERIES, "rounds"))
    arguments = parser.parse_args()
    found = (memory() if name == "rounds" else series(name) for name in arguments.only)
    harness.collect(arguments.json, found, rows, f"{WARM_UP} rounds of each process", base=BASE, processes=REPEATS)
