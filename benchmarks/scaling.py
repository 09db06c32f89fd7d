"""How a round's time and memory grow with the cohort, the clients, the local steps and the devices, and memory with rounds.

    python -m benchmarks.scaling [--only cohort clients] [--repeats=7] --json=benchmarks/results/scaling_<machine>.json

FixMatch, labels at the server, each step labeling its own batch of 4 on a small CNN on 8x8 random images; 4 images a client, no
state of clients, except in `states`, where each has its momentum, and in `hosted`, where these and the images are in the host's
memory. One number changes at a time from 10 of 1,000 clients, 8 local steps, one device. Every point is measured in
`--repeats` processes, those of a series in a random order: 2 rounds to warm up, then LEAST or more in 4 seconds, whose median
counts. `devices` are virtual ones of a CPU, which share its cores.

Exponents c, with 95 % intervals: of seconds against clients and devices that of s = b x^c; against cohort and steps, and of bytes,
that of s = a + b x^c, as a round has a fixed cost. A verdict says whether the interval holds the exponent of a claim (of seconds: 1
for cohort and steps, 0 for numbers of clients; of bytes: no more than 1) and lies near it; else it is no, or undecided.

`rounds` is `launch.run` of a linear network on the digits for ROUNDS rounds, with an evaluation every 10 and a checkpoint every
500, and fits the growth of its resident memory over all but the first tenth. It needs Linux. Run time: half an hour on two cores.
"""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from benchmarks import harness
from benchmarks.harness import Result, Worker, WorkerError
from benchmarks.programs import RUNS_LONG

BASE = {"cohort": 10, "clients": 1_000, "steps": 8, "devices": 1, "states": 0, "hosted": 0}
CLIENTS = (100, 300, 1_000, 3_000, 10_000, 30_000)
SERIES: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "cohort": ("cohort", (10, 20, 50, 100, 200, 500, 1_000), {}),
    "clients": ("clients", (*CLIENTS, 100_000, 300_000, 1_000_000), {}),
    "states": ("clients", CLIENTS, {"states": 1}),
    "hosted": ("clients", CLIENTS, {"states": 1, "hosted": 1}),
    "steps": ("steps", (2, 4, 8, 16, 32, 64, 128), {}),
    "devices": ("devices", (1, 2, 4), {}),
}
"""Which number of BASE changes, its values, and what differs from BASE besides."""
CLAIMS = {"cohort": 1, "steps": 1, "clients": 0, "states": 0, "hosted": 0}
"""The exponents of a round's seconds that are claimed."""
CALLED, NEAR = {1: "linear", 0: "flat"}, {1: 0.25, 0: 0.05}
"""A claim in a word, and how far from its exponent the interval may reach."""
FLAT = 1.1
"""Times as many bytes, at the end of a series, that are no growth."""
UNDECIDED = "undecided: a wide interval"
PAGE = os.sysconf("SC_PAGE_SIZE")
IMAGES_A_CLIENT, WARM_UP, LEAST, SECONDS, ROUNDS = 4, 2, 5, 4.0, 10_000


def config_of(point: dict[str, int]) -> dict[str, Any]:
    """The config of a point."""
    optimizer = {"persistent": bool(point["states"]), "schedule": "constant"}
    return {
        "method": {"name": "fixmatch", "pseudo_labels": "local", "confidence": 0.0},
        "model": {"name": "cnn", "width": 16},
        "data": {"num_clients": point["clients"], "num_labels": 10, "weak": "none", "strong": "none"},
        "client": {"steps": point["steps"], "epochs": 0, "batch_size": 4, "optimizer": optimizer},
        "server": {"epochs": 1, "pretrain": 0, "sbn_data": "labeled"},
        "cohort_size": point["cohort"],
        "execution": {
            "strategy": "sharded" if point["devices"] > 1 else "auto", "devices": point["devices"],
            "data": "host" if point["hosted"] else "device",
        },
        **RUNS_LONG,
    }  # fmt: skip


def measure(point: dict[str, int], *, on_cpu: bool = False) -> Result:
    """A point's rounds in a process of its own."""
    data = {"count": point["clients"] * IMAGES_A_CLIENT + 10, "shape": (8, 8, 1)}
    environment = {"JAX_PLATFORMS": "cpu"} if on_cpu else {}
    try:
        with Worker(environment=environment, devices=point["devices"]) as worker:
            built = worker.ask("build", config=config_of(point), data=data)
            worker.ask("rounds", number=WARM_UP)
            (rows,) = harness.in_turns([worker], "rounds", SECONDS, LEAST)
            return {**harness.timed([row["seconds"] for row in rows]), **worker.ask("about"), "build_s": built["build_s"]}
    except WorkerError as error:
        return {"error": str(error)}


class Fit(NamedTuple):
    """A power law: its exponent, the exponent's interval of 95 % (None where there are too few points), and how many times as much
    the fit has at the last point as at the first."""

    exponent: float
    interval: tuple[float, float] | None
    growth: float


def half_interval(points: int, parameters: int, deviation: float) -> float | None:
    """Half of Student's 95 % interval; None where nothing is left to judge by."""
    return float(stats.t.ppf(0.975, points - parameters) * deviation) if points > parameters else None


def power(x: Sequence[float], y: Sequence[float]) -> Fit:
    """The fit y = b x^c, by the slope of the logarithms."""
    fit = stats.linregress(np.log(x), np.log(y))
    half = half_interval(len(x), 2, fit.stderr)
    interval = None if half is None else (float(fit.slope - half), float(fit.slope + half))
    return Fit(float(fit.slope), interval, float((max(x) / min(x)) ** fit.slope))


def power_and_fixed(x: Sequence[float], y: Sequence[float]) -> Fit:
    """The fit y = a + b x^c with a, b >= 0, by relative residuals."""
    at, size = np.asarray(x, float) / max(x), np.asarray(y, float)

    def law(at: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
        return a + b * at**c

    bounds = ([0, 0, -2], [np.inf, np.inf, 3])
    found, covariance = optimize.curve_fit(law, at, size, (size.min() / 2, size.max(), 1), size, bounds=bounds)
    half = half_interval(len(at), 3, np.sqrt(covariance[2, 2]))
    interval = None if half is None else (float(found[2] - half), float(found[2] + half))
    return Fit(float(found[2]), interval, float(law(1.0, *found) / law(at.min(), *found)))


def verdict(fit: Fit, claim: int) -> str:
    """Whether seconds grow as claimed: `linear` or `flat`, `not` so where the interval leaves it out, or undecided."""
    low, high = fit.interval or (-np.inf, np.inf)
    if not low <= claim <= high:
        return f"not {CALLED[claim]}"
    return CALLED[claim] if max(claim - low, high - claim) <= NEAR[claim] else UNDECIDED


def verdict_on_bytes(fit: Fit) -> str:
    """Whether bytes grow, and if so no faster than what grows."""
    low, high = fit.interval or (-np.inf, np.inf)
    if fit.growth <= FLAT:
        return CALLED[0]
    if low > 1:
        return "faster than linear"
    return "at most linear" if high <= 1 + NEAR[1] else UNDECIDED


def fits(name: str, points: dict[int, list[Result]]) -> dict[str, dict[str, Any]]:
    """The fits of a series, of a round's seconds and of bytes, with a verdict where something is claimed.

    Those of seconds are over all processes of each point. Those of bytes are over each point's medians, as the same number three
    times is not three times as sure.
    """
    x, seconds = zip(*[(x, point["seconds"]) for x, of_x in points.items() for point in of_x], strict=True)
    claim = CLAIMS.get(name)
    of_seconds = power_and_fixed(x, seconds) if claim == 1 and len(points) > 2 else power(x, seconds)
    found = {"seconds": {**of_seconds._asdict(), "verdict": None if claim is None else verdict(of_seconds, claim)}}
    if claim is None or len(points) < 3:  # devices divide a round's memory, and the process has all of them
        return found
    for kind in ("program_bytes", "peak_bytes"):
        sizes = [float(np.median([point[kind] for point in of_x])) for of_x in points.values()]
        flat = max(sizes) <= FLAT * min(sizes)
        fit = Fit(0.0, None, max(sizes) / min(sizes)) if flat else power_and_fixed(list(points), sizes)
        found[kind] = {**fit._asdict(), "verdict": verdict_on_bytes(fit)}
    return found


def series(name: str, repeats: int) -> Result:
    """Measures the points of a series, prints each, and fits those that ran."""
    key, values, also = SERIES[name]
    order = [x for x in values for _ in range(repeats)]
    random.Random(0).shuffle(order)
    processes = [(x, measure({**BASE, **also, key: x}, on_cpu=name == "devices")) for x in order]
    points = {x: [point for at, point in processes if at == x] for x in values}
    for x, of_x in points.items():
        print(line(name, x, of_x), flush=True)
    ran = {x: of_x for x, of_x in points.items() if not any("error" in point for point in of_x)}
    errors = [point["error"] for of_x in points.values() for point in of_x if "error" in point]
    found = fits(name, ran) if len(ran) > 1 else {}
    about = {"case": {"series": name}, "of": key, "also": also, **({"error": errors[0]} if errors else {})}
    return {
        **about,
        "x": list(values),
        "points": list(points.values()),
        "fits": found,
        "device": next((p["device"] for _, p in processes if "device" in p), "cpu"),
    }


def in_words(fit: dict[str, Any]) -> str:
    """A fit in words."""
    interval = "" if fit["interval"] is None else " ({:.3f} to {:.3f})".format(*fit["interval"])
    return f"{fit['exponent']:.3f}{interval}" + (f": {fit['verdict']}" if fit["verdict"] else "")


def described(result: Result) -> str:
    """The line that ends a series."""
    name = result["case"]["series"]
    if name == "rounds" and "growth" in result:
        return "rounds   {:.1f} ± {:.1f} bytes a round: ".format(*result["growth"]) + result["verdict"]
    words = [f"{what} {in_words(fit)}" for what, fit in result.get("fits", {}).items()]
    return f"{name:8} " + (", ".join(words) or result["error"])


def line(name: str, x: int, points: list[Result]) -> str:
    """A line of the printed table: the median of a point's processes, and the least and the greatest."""
    if errors := [point["error"] for point in points if "error" in point]:
        return f"{name:8} {x:9,} {errors[0]}"
    seconds = [1e3 * point["seconds"] for point in points]
    sizes = " ".join(f"{np.median([point[key] for point in points]) / 1e6:9,.1f} MB" for key in ("program_bytes", "peak_bytes"))
    return f"{name:8} {x:9,} {np.median(seconds):10.2f} ms ({min(seconds):.2f} - {max(seconds):.2f}) {sizes}"


def memory(rounds: int = ROUNDS) -> Result:
    """Runs many rounds as a command and fits the growth of its resident memory."""
    with tempfile.TemporaryDirectory() as folder:
        workdir, settings = pathlib.Path(folder, "run"), {"model.name": "linear", "eval_every": 10, "checkpoint_every": 500}
        overrides = [f"--config.{key}={value}" for key, value in {**settings, "rounds": rounds}.items()]
        command = [
            sys.executable,
            "-m",
            "launch.run",
            "--config=configs/digits.py:fixmatch",
            f"--workdir={workdir}",
            *overrides,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=harness.ROOT)
        resident = watched(process, workdir / "metrics.jsonl")
        error = harness.last_error(process.communicate()[1])
    case: Result = {"case": {"series": "rounds"}, "rounds": rounds, "resident": resident}
    late = np.asarray([pair for pair in resident if pair[0] > rounds / 10])
    if process.returncode or len(late) < 3:
        return case | {"error": error or "the run ended too soon to be watched"}
    fit = stats.linregress(late[:, 0], late[:, 1])
    half = half_interval(len(late), 2, fit.stderr)
    flat = max(0.0, fit.slope + half) * rounds <= 0.01 * late[0, 1]
    return case | {"growth": [float(fit.slope), half], "verdict": "flat" if flat else "not flat"}


def watched(process: subprocess.Popen, log: pathlib.Path, every_s: float = 0.2) -> list[tuple[int, int]]:
    """(rounds finished, resident bytes) of a running command, until it ends."""
    found: list[tuple[int, int]] = []
    while process.poll() is None:
        time.sleep(every_s)
        pages = pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()
        finished = log.read_bytes().count(b"\n") if log.exists() else 0
        if pages and int(pages[1]) and finished > (found[-1][0] if found else 0):
            found.append((finished, int(pages[1]) * PAGE))
    return found


def main() -> None:
    """Measures the chosen series, prints a table and writes it; exit status 1 where a point failed."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=(*SERIES, "rounds"), default=(*SERIES, "rounds"))
    parser.add_argument("--repeats", type=int, default=3, help="processes of each point")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats: accepted: at least 1")
    found = (memory() if name == "rounds" else series(name, arguments.repeats) for name in arguments.only)
    settings = {"base": BASE, "processes": arguments.repeats}
    harness.collect(arguments.json, found, described, f"{WARM_UP} rounds of each process", **settings)


if __name__ == "__main__":
    main()
