"""How a round's time and memory grow with the cohort, the clients, the local steps and the devices, and memory with rounds.

    python -m benchmarks.scaling [--only cohort clients] [--repeats=7] [--json=benchmarks/results/scaling.json]

FixMatch, labels at the server, each step labeling its own batch of 4 on a small CNN on 8x8 random images; 4 images a client,
no state kept of clients, but in `states`, where each has its momentum, and in `hosted`, where these and the images are in the
host's memory. One number changes at a time from 10 of 1,000 clients, 8 local steps, one device. Every point is measured in
three processes (`--repeats`: where a verdict is undecided, more of them make intervals narrower), those of a series in a random
order, as from one process to the next the same work takes some percent more or less: 2 rounds to warm up, then at least 5 and 4
seconds of rounds, whose median counts. The table has the process with the median of these. Fits of seconds are over all
processes; those of bytes over a point's medians. The `devices` are virtual ones of a CPU, whatever else there is
(`--xla_force_host_platform_device_count`), and share its cores: on a machine of two, four are no faster than two.

Exponents, with 95 % intervals: of seconds against clients and devices that of s = b x^c, the slope of the logarithms; against
cohort and steps that of s = a + b x^c, as a round has a fixed cost. The interval of c there is what F's distribution leaves
when a and b are fitted anew for each c, by relative residuals. Two kinds of bytes are fitted in the latter
form: a round's, data and states included, as the compiler counts them, and the peak: the device's where it tells, else the
process's. A verdict says whether the interval holds the exponent of a claim (of seconds: 1 for cohort and steps, 0 for
numbers of clients; of bytes: no more than 1) and lies near it; it may be no, and it is undecided where the interval is wide.

`rounds` runs 10,000 of a linear network as `launch.run` does, with an evaluation every 10, a checkpoint every 500, the log and
TensorBoard's events, and fits the growth of resident memory over all but the first 1,000, in bytes a round; memory is flat
where at most 1 % of it would come in so many rounds. Memory grows in steps, so that the half interval beside the growth is too
narrow. Exit status 1 where a point failed, whatever the verdicts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from benchmarks.provenance import provenance
from benchmarks.spread import quartiles
from launch.command import ask_for_huge_pages

BASE = {"cohort": 10, "clients": 1_000, "steps": 8, "devices": 1, "states": 0, "hosted": 0}


class Series(NamedTuple):
    """A number that changes.

    Attributes:
        key: of BASE.
        values: what it takes.
        also: what a point has in place of BASE's.
    """

    key: str
    values: tuple[int, ...]
    also: dict[str, int]


SERIES = {
    "cohort": Series("cohort", (10, 20, 50, 100, 200, 500, 1_000), {}),
    "clients": Series("clients", (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000), {}),
    "states": Series("clients", (100, 300, 1_000, 3_000, 10_000, 30_000), {"states": 1}),
    "hosted": Series("clients", (100, 300, 1_000, 3_000, 10_000, 30_000), {"states": 1, "hosted": 1}),
    "steps": Series("steps", (2, 4, 8, 16, 32, 64, 128), {}),
    "devices": Series("devices", (1, 2, 4), {}),
}
CLAIMS = {"cohort": 1, "steps": 1, "clients": 0, "states": 0, "hosted": 0}
"""The exponents of a round's seconds that are claimed."""
CALLED = {1: "linear", 0: "flat"}
NEAR = {1: 0.25, 0: 0.05}
"""How far from a claimed exponent its interval may reach: .05 are 1.6 times over four powers of ten, 1.3 times over 2.5."""
EXPONENTS = np.linspace(-2.0, 3.0, 1001).round(3)
"""What is tried, where there is a fixed cost."""
UNDECIDED = "undecided: a wide interval"
FLAT = 1.1
"""Times as many bytes, at the end of a series, that are no growth."""
IMAGES_A_CLIENT, BATCH = 4, 4
REPEATS = 3
WARM_UP, LEAST_ROUNDS, LEAST_S = 2, 5, 4.0
ROUNDS, EVERY, EVALUATED = 10_000, 500, 10
FLAT_SHARE = 0.01
"""Of resident memory, that may come in ROUNDS rounds."""


def experiment_of(point: dict[str, int], *, rounds: int = 0) -> Any:
    """A point's experiment; `rounds`: of so many rounds, of a linear network, and evaluated."""
    from fedjax_ssl import build
    from fedjax_ssl.data.sources import from_arrays

    rng, count = np.random.default_rng(0), point["clients"] * IMAGES_A_CLIENT + 10
    images, labels = rng.integers(0, 256, (count, 8, 8, 1), np.uint8), np.arange(count, dtype=np.int32) % 10
    return build(
        {
            "method": {"name": "fixmatch", "pseudo_labels": "local", "confidence": 0.0},
            "model": {"name": "linear"} if rounds else {"name": "cnn", "width": 16},
            "data": {"num_clients": point["clients"], "num_labels": 10, "weak": "none", "strong": "none"},
            "client": {
                "steps": point["steps"], "epochs": 0, "batch_size": BATCH,
                "optimizer": {"persistent": bool(point["states"]), "schedule": "constant"},
            },
            "server": {"epochs": 1, "pretrain": 0, "sbn_data": "labeled"},
            "cohort_size": point["cohort"],
            "rounds": rounds or 10**9,
            "eval_every": EVALUATED if rounds else 10**9,
            "checkpoint_every": EVERY,
            "execution": {
                "strategy": "sharded" if point["devices"] > 1 else "auto", "devices": point["devices"],
                "data": "host" if point["hosted"] else "device",
            },
        },
        from_arrays(train_images=images, train_labels=labels, test_images=images[:10], test_labels=labels[:10]),
    )  # fmt: skip


def measure(point: dict[str, int]) -> dict[str, Any]:
    """A point's rounds in this process, which does nothing else."""
    import jax

    started = time.perf_counter()
    experiment = experiment_of(point)
    built_s, seconds = time.perf_counter() - started, []
    for _, row in experiment.rounds():
        if row["round"] > WARM_UP:
            seconds.append(row["time/round_s"])
            if len(seconds) >= LEAST_ROUNDS and sum(seconds) >= LEAST_S:
                break
    low, median, high = quartiles(seconds)
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "round_s": median,
        "quartiles_s": [low, high],
        "rounds": len(seconds),
        "build_s": built_s,
        "compile_s": row["time/compile_s"],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": memory.get("peak_bytes_in_use"),
        "round_bytes": experiment.simulator.memory_bytes,
        "device": jax.devices()[0].device_kind,
        **experiment.layout._asdict(),
    }


def measure_memory(rounds: int) -> dict[str, Any]:
    """A whole run in this process, with all that it writes: the resident memory every EVERY rounds."""
    from fedjax_ssl.experiment import loop
    from fedjax_ssl.experiment.experiment import Experiment

    resident = []

    class Watched(Experiment):
        def rounds(self, *begun: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
            for state, row in super().rounds(*begun):
                if row["round"] % EVERY == 0:
                    resident.append((row["round"], resident_bytes()))
                yield state, row

    experiment = Watched(**vars(experiment_of(BASE, rounds=rounds)))
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder, "run")
        loop.open_workdir(workdir, experiment.settings.to_dict(), overwrite=False)
        loop.run(experiment, workdir, loop.Stop())
    return {"resident": resident}


def resident_bytes() -> int:
    """Resident memory of the process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Fit(NamedTuple):
    """A power law.

    Attributes:
        exponent: c.
        interval: of 95 %; None where there are too few points to judge by.
        growth: what the fit has at the largest x over what it has at the smallest.
    """

    exponent: float
    interval: tuple[float, float] | None
    growth: float


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float | None]:
    """The least-squares slope of y over x, and half its 95 % interval; None where two points leave nothing to judge by."""
    fit = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, len(x) - 2) * fit.stderr) if len(x) > 2 else None
    return float(fit.slope), half


def power(x: Sequence[float], y: Sequence[float]) -> Fit:
    """The fit y = b x^c by the logarithms' slope, at least two points."""
    exponent, half = slope(np.log(x), np.log(y))
    return Fit(exponent, None if half is None else (exponent - half, exponent + half), float((x[-1] / x[0]) ** exponent))


def power_and_fixed(x: Sequence[float], y: Sequence[float]) -> Fit:
    """The fit y = a + b x^c with a, b >= 0, by relative residuals, at least three points.

    For each c of EXPONENTS, a and b are a linear problem with one best solution. The interval is of those c whose sum of
    squares is at most 1 + F / (n - 3) times the least one, F being the distribution's .95 with 1 and n - 3 degrees of freedom.
    An end at the last of them says that there is none. Of equal y any c will do: 0, without an interval.
    """
    if min(y) == max(y):
        return Fit(0.0, None, 1.0)
    at, size, freedom = np.asarray(x, float) / x[-1], np.asarray(y, float), len(x) - 3
    found = [optimize.nnls(np.stack([np.ones_like(at), at**c], axis=1) / size[:, None], np.ones_like(at)) for c in EXPONENTS]
    squares = np.array([residual**2 for _, residual in found])
    best = int(np.argmin(squares))
    (a, b), c = found[best][0], float(EXPONENTS[best])
    growth = float((a + b) / (a + b * at[0] ** c))
    if freedom < 1:
        return Fit(c, None, growth)
    inside = EXPONENTS[squares <= squares[best] * (1 + stats.f.ppf(0.95, 1, freedom) / freedom)]
    return Fit(c, (float(inside[0]), float(inside[-1])), growth)


def verdict(fit: Fit, claim: int) -> str:
    """Whether seconds are what is claimed: `linear` or `flat`, or `not` so where the interval leaves it out, or undecided."""
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


def peak(point: dict[str, Any]) -> int:
    """The device's peak of memory where it tells one, else the process's."""
    return point["device_peak_bytes"] or point["peak_bytes"]


def fits(name: str, points: dict[int, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The fits of a series, of a round's seconds and of bytes, with a verdict where something is claimed.

    Those of seconds are over all processes of each point: intervals are made of what they differ by. Those of bytes are over
    each point's medians: the same number three times is not three times as sure.
    """
    x, seconds = zip(*[(x, point["round_s"]) for x, of_x in points.items() for point in of_x], strict=True)
    claim = CLAIMS.get(name)
    of_seconds = power_and_fixed(x, seconds) if claim == 1 and len(points) > 2 else power(x, seconds)
    found = {"seconds": {**of_seconds._asdict(), "verdict": None if claim is None else verdict(of_seconds, claim)}}
    if claim is None or len(points) < 3:  # devices divide a round's memory, and the process has all of them
        return found
    kinds = {"round's bytes": operator.itemgetter("round_bytes"), "peak bytes": peak}
    for kind, size in kinds.items():
        fit = power_and_fixed(list(points), [statistics.median(size(point) for point in of_x) for of_x in points.values()])
        found[kind] = {**fit._asdict(), "verdict": verdict_on_bytes(fit)}
    return found


def described(what: str, found: dict[str, Any], times: float) -> str:
    """A fit in words."""
    interval = "?" if found["interval"] is None else "{:.3f} to {:.3f}".format(*found["interval"])
    words = (
        f"{what}: exponent {found['exponent']:.3f} ({interval}), {found['growth']:.3g} times from first to last of {times:,.0f}"
    )
    return words + (f": {found['verdict']}" if found["verdict"] else "")


def worker(point: dict[str, int], *, rounds: int = 0, on_cpu: bool = False) -> dict[str, Any]:
    """`measure`, or with `rounds` `measure_memory`, in a process of its own; `error` where that fails."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={point['devices']}"
    environment = {**os.environ, "XLA_FLAGS": flags} | ({"JAX_PLATFORMS": "cpu"} if on_cpu else {})
    command = [sys.executable, "-m", "benchmarks.scaling", f"--worker={json.dumps({'point': point, 'rounds': rounds})}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def series(name: str, repeats: int = REPEATS) -> dict[str, Any]:
    """Measures the points of a series, prints each with the least and the most of its processes, and fits those that ran."""
    key, values, also = SERIES[name]
    order = [x for x in values for _ in range(repeats)]
    random.Random(0).shuffle(order)
    processes = [(x, worker({**BASE, **also, key: x}, on_cpu=name == "devices")) for x in order]
    points = {x: [point for at, point in processes if at == x] for x in values}
    for x, of_x in points.items():
        print(line(name, x, of_x), flush=True)
    ran = {x: of_x for x, of_x in points.items() if not any("error" in point for point in of_x)}
    found = fits(name, ran) if len(ran) > 1 else {}
    for what, fit in found.items():
        print(f"{name:8} {described(what, fit, max(ran) / min(ran))}", flush=True)
    return {"series": name, "of": key, "also": also, "x": list(points), "points": list(points.values()), "fits": found}


def line(name: str, x: int, points: list[dict[str, Any]]) -> str:
    """A line of the table: a point's typical process, and the least and the most of all."""
    if errors := [point["error"] for point in points if "error" in point]:
        return f"{name:8} {x:9,} {errors[0]}"
    seconds, one = [point["round_s"] for point in points], typical(points)
    spread = f"{1e3 * min(seconds):.2f} - {1e3 * max(seconds):.2f}"
    return (
        f"{name:8} {x:9,} {1e3 * one['round_s']:10.2f} {spread:>21} {one['round_bytes'] / 1e6:8.1f} {peak(one) / 1e6:8.0f} "
        f"{one['build_s']:7.1f} {one['compile_s']:9.1f}"
    )


def typical(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The process of a point whose rounds took the median time."""
    return sorted(points, key=lambda point: point["round_s"])[len(points) // 2]


def memory() -> dict[str, Any]:
    """Runs the many rounds and fits the growth of resident memory."""
    result = worker(BASE, rounds=ROUNDS)
    if "error" in result:
        print(f"rounds   {result['error']}", flush=True)
        return {"series": "rounds", **result}
    late = np.asarray([pair for pair in result["resident"] if pair[0] > 2 * EVERY])
    growth, half = slope(late[:, 0], late[:, 1])
    most = max(0.0, growth + (half or 0.0)) * ROUNDS
    flat = most <= FLAT_SHARE * late[0, 1]
    print(f"rounds   resident MB every {EVERY}: {', '.join(f'{size / 1e6:.0f}' for _, size in result['resident'])}")
    print(
        f"rounds   growth: {growth:.1f} ± {half:.1f} bytes a round, at most {most / 1e6:.2f} MB of {late[0, 1] / 1e6:.0f} in "
        f"{ROUNDS:,}: {'flat' if flat else 'not flat'}",
        flush=True,
    )
    return {"series": "rounds", **result, "growth": (growth, half), "flat": bool(flat)}


def main() -> None:
    """Measures the chosen series, prints a table and writes it; exit status 1 where a point failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*SERIES, "rounds"), default=(*SERIES, "rounds"))
    parser.add_argument("--repeats", type=int, default=REPEATS, help="processes of each point")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("argument --repeats: at least 1")
    if arguments.worker:
        asked = json.loads(arguments.worker)
        print(json.dumps(measure_memory(asked["rounds"]) if asked["rounds"] else measure(asked["point"])))
        return
    head = f"{'series':8} {'x':>9} {'round ms':>10} {'least - most':>21} {'round MB':>8} {'peak MB':>8} "
    print(head + f"{'build s':>7} {'compile s':>9}")
    results = [memory() if name == "rounds" else series(name, arguments.repeats) for name in arguments.only]
    if arguments.json:  # not before: asking for the device takes an accelerator's memory from the points' processes
        settings = {"base": BASE, "warm_up_rounds": WARM_UP, "processes": arguments.repeats}
        arguments.json.write_text(json.dumps({**provenance(), **settings, "results": results}, indent=1) + "\n")
    if any("error" in one for result in results for one in (result, *itertools.chain(*result.get("points", ())))):
        sys.exit(1)


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
