"""How a round's time and memory grow with the cohort, the clients, the local steps and the devices, and memory with rounds.

    python -m benchmarks.scaling [--only cohort clients] [--json=benchmarks/results/scaling.json]

FixMatch, labels at the server, each step labeling its own batch of 4 on a small CNN on 8x8 random images; 4 images a client,
no state kept of clients. One number changes at a time from 10 of 1,000 clients, 8 local steps, one device. Every point is a
process of its own: 2 rounds to warm up, then at least 5 and 5 seconds of rounds, of which median and quartiles; peak memory
is the process's, with data and compilation. Virtual devices (`--xla_force_host_platform_device_count`) share the CPU's cores:
on a machine of two, four are no faster than two.

The exponent b of seconds ~ x^b is the slope of the medians' logarithms, with its 95 % interval (Student's t). Below some 100
clients a round's fixed cost shows in that of the cohort: `marginal` is the exponent of what is beyond the smallest point's.
`rounds` runs 10,000 of a linear network and fits the growth of resident memory over all but the first 1,000, in bytes a round.
Run time: 20 minutes on two CPU cores, most of it data of a million clients and the 10,000 rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.provenance import provenance

BASE = {"cohort": 10, "clients": 1_000, "steps": 8, "devices": 1}
SERIES: dict[str, tuple[int, ...]] = {
    "cohort": (10, 30, 100, 300, 1_000),
    "clients": (100, 1_000, 10_000, 100_000, 1_000_000),
    "steps": (2, 8, 32, 128),
    "devices": (1, 2, 4),
}
IMAGES_A_CLIENT, BATCH = 4, 4
WARM_UP, LEAST_ROUNDS, LEAST_S = 2, 5, 5.0
ROUNDS, EVERY = 10_000, 500


def measure(point: dict[str, int], *, rounds: int = 0) -> dict[str, Any]:
    """A point's rounds in this process, which does nothing else; `rounds`: that many of a linear network, for their memory."""
    import jax

    from fedjax_ssl import build
    from fedjax_ssl.data.sources import from_arrays

    rng, count = np.random.default_rng(0), point["clients"] * IMAGES_A_CLIENT + 10
    images, labels = rng.integers(0, 256, (count, 8, 8, 1), np.uint8), np.arange(count, dtype=np.int32) % 10
    started = time.perf_counter()
    experiment = build(
        {
            "method": {"name": "fixmatch", "pseudo_labels": "local", "confidence": 0.0},
            "model": {"name": "linear"} if rounds else {"name": "cnn", "width": 16},
            "data": {"num_clients": point["clients"], "num_labels": 10, "weak": "none", "strong": "none"},
            "client": {
                "steps": point["steps"], "epochs": 0, "batch_size": BATCH,
                "optimizer": {"persistent": False, "schedule": "constant"},
            },
            "server": {"epochs": 1, "pretrain": 0, "sbn_data": "labeled"},
            "cohort_size": point["cohort"],
            "rounds": 10**9,
            "eval_every": 10**9,
            "execution": {"strategy": "sharded" if point["devices"] > 1 else "auto", "devices": point["devices"]},
        },
        from_arrays(train_images=images, train_labels=labels, test_images=images[:10], test_labels=labels[:10]),
    )  # fmt: skip
    built_s, seconds, resident = time.perf_counter() - started, [], []
    for _, row in experiment.rounds():
        if rounds:
            if row["round"] % EVERY == 0:
                resident.append((row["round"], resident_bytes()))
            if row["round"] == rounds:
                return {"resident": resident}
        elif row["round"] > WARM_UP:
            seconds.append(row["time/round_s"])
            if len(seconds) >= LEAST_ROUNDS and sum(seconds) >= LEAST_S:
                break
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "round_s": float(median),
        "quartiles_s": [float(low), float(high)],
        "rounds": len(seconds),
        "build_s": built_s,
        "compile_s": row["time/compile_s"],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": memory.get("peak_bytes_in_use"),
        **experiment.layout._asdict(),
    }


def resident_bytes() -> int:
    """Resident memory of the process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float | None]:
    """The least-squares slope of y over x, and half its 95 % interval; None where two points leave nothing to judge by."""
    fit = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, len(x) - 2) * fit.stderr) if len(x) > 2 else None
    return float(fit.slope), half


def exponents(x: Sequence[int], seconds: Sequence[float]) -> dict[str, tuple[float, float | None]]:
    """The b of seconds ~ x^b, with half its interval; `marginal`: of what is beyond the first point, over x less the first.

    The latter is there where at least three points are left and each is beyond the first: else noise would choose them.
    """
    at, took = np.asarray(x, float), np.asarray(seconds)
    found = {"exponent": slope(np.log(at), np.log(took))}
    if len(at) > 3 and np.all(took[1:] > took[0]):
        found["marginal"] = slope(np.log(at[1:] - at[0]), np.log(took[1:] - took[0]))
    return found


def worker(point: dict[str, int], rounds: int = 0) -> dict[str, Any]:
    """`measure` in a process of its own; `error` where that fails."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={point['devices']}"
    command = [sys.executable, "-m", "benchmarks.scaling", f"--worker={json.dumps({'point': point, 'rounds': rounds})}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "XLA_FLAGS": flags})
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def series(name: str) -> dict[str, Any]:
    """Measures the points of a series, prints each as it comes, and fits those that ran."""
    points = {}
    for x in SERIES[name]:
        points[x] = point = worker(BASE | {name: x})
        if "error" in point:
            print(f"{name:8} {x:9,} {point['error']}", flush=True)
            continue
        spread = "{:.2f} - {:.2f}".format(*(1e3 * s for s in point["quartiles_s"]))
        print(
            f"{name:8} {x:9,} {1e3 * point['round_s']:10.2f} {spread:>21} {point['peak_bytes'] / 1e6:8.0f} "
            f"{point['build_s']:8.1f} {point['compile_s']:9.1f}",
            flush=True,
        )
    ran = {x: point["round_s"] for x, point in points.items() if "error" not in point}
    found = exponents(list(ran), list(ran.values())) if len(ran) > 1 else {}
    for what, (value, half) in found.items():
        print(f"{name:8} {what}: {value:.2f} ± {'?' if half is None else f'{half:.2f}'}", flush=True)
    return {"series": name, "x": list(points), "points": list(points.values()), **found}


def memory() -> dict[str, Any]:
    """Runs the many rounds and fits the growth of resident memory."""
    result = worker(BASE, ROUNDS)
    if "error" in result:
        print(f"rounds   {result['error']}", flush=True)
        return {"series": "rounds", **result}
    late = np.asarray([pair for pair in result["resident"] if pair[0] > 2 * EVERY])
    growth, half = slope(late[:, 0], late[:, 1])
    print(f"rounds   resident MB every {EVERY}: {', '.join(f'{size / 1e6:.0f}' for _, size in result['resident'])}")
    print(f"rounds   growth: {growth:.1f} ± {half:.1f} bytes a round", flush=True)
    return {"series": "rounds", **result, "growth": (growth, half)}


def main() -> None:
    """Measures the chosen series, prints a table and writes it; exit status 1 where a point failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*SERIES, "rounds"), default=(*SERIES, "rounds"))
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        asked = json.loads(arguments.worker)
        print(json.dumps(measure(asked["point"], rounds=asked["rounds"])))
        return
    print(f"{'series':8} {'x':>9} {'round ms':>10} {'quartiles':>21} {'peak MB':>8} {'build s':>8} {'compile s':>9}")
    results = [memory() if name == "rounds" else series(name) for name in arguments.only]
    if arguments.json:  # not before: asking for the device takes an accelerator's memory from the points' processes
        arguments.json.write_text(json.dumps({**provenance(), "base": BASE, "results": results}, indent=1) + "\n")
    if any("error" in point for result in results for point in (result, *result.get("points", ()))):
        sys.exit(1)


if __name__ == "__main__":
    main()
