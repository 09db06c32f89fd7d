"""How fast an evaluation is, by how many examples a forward pass has.

    python -m benchmarks.evaluation [--workloads fl2_wrn28_2] [--sizes 100 250] --json=benchmarks/results/evaluation_cpu.json

The networks and cohorts of `round_time` in their usual layout, on a GPU in TensorFloat-32, on random images: of each device as
many as a search measures, or as many more as are whole batches of each size. Each size is a program of its own, the sizes take
turns, in balanced orders: one to warm up, then at least LEAST_TURNS, and `--seconds` of the usual size, and as many more as
complete a set of these orders. The usual size is the one that runs have until a search finds a faster one
(`execution.batch_size=0`). Images per second are medians with quartiles; `of usual` is the usual size's time over that of
another, the median of the turns' ratios, with quartiles in the file.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time
from typing import Any

import jax
from fedjax_ssl.experiment.measurement import forward_sizes, images_a_device
from fedjax_ssl.experiment.tuning import in_layout

from benchmarks.provenance import provenance
from benchmarks.spread import balanced, quartiles, whole
from benchmarks.workloads import USUAL, WORKLOADS, Case, experiment
from fedjax_ssl.experiment.layout import FORWARD_BATCH_SIZE
from launch.command import ask_for_huge_pages, use_all_cores

LEAST_TURNS = 6
MOST_IMAGES = 10_000
"""Of a device: sizes that have no small common multiple would take hours."""


def measure(workload: str, sizes: list[int] | None, seconds: float) -> list[dict[str, Any]]:
    """An evaluation of a workload's network in its usual size and in each other one, or each that a search tries."""
    devices, on_cpu = len(jax.devices()), jax.default_backend() == "cpu"
    dtype, cohort = ("float32", 2 * devices) if on_cpu else ("tensorfloat32", 10)
    case = Case(workload, "", USUAL, "", dtype, cohort, steps=1)
    usual = experiment(case)
    others = forward_sizes(usual.settings) if sizes is None else sizes
    sizes = list(dict.fromkeys([usual.layout.forward_batch_size, *others]))
    batches = math.lcm(*sizes)
    images = devices * batches * math.ceil(images_a_device() / batches)
    begun = experiment(case, test_images=images)
    simulators = [in_layout(begun, begun.layout._replace(forward_batch_size=size)).simulator for size in sizes]
    state, _ = begun.simulator.initialize(0)
    turns: list[list[float]] = []
    for simulator in simulators:
        simulator.evaluate(state)
    while len(turns) < LEAST_TURNS or len(turns) % whole(len(sizes)) or sum(turn[0] for turn in turns) < seconds:
        turn = [0.0] * len(sizes)
        for number in balanced(len(sizes), len(turns)):
            began = time.perf_counter()
            simulators[number].evaluate(state)  # waits for the result
            turn[number] = time.perf_counter() - began
        turns.append(turn)
    return [
        {
            "workload": workload,
            "size": size,
            "images": images,
            "dtype": dtype,
            "layout": begun.layout._replace(forward_batch_size=size)._asdict(),
            "turns": len(turns),
            "images_per_s": quartiles(images / turn[number] for turn in turns),
            "of_usual": quartiles(turn[0] / turn[number] for turn in turns),
        }
        for number, size in enumerate(sizes)
    ]


def main() -> None:
    """Measures the chosen networks and sizes, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--sizes", nargs="+", type=int, help="beside the usual one; else those that a search tries")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the usual size, at least (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments = parser.parse_args()
    if arguments.sizes:
        if min(arguments.sizes) < 1:
            parser.error("argument --sizes: at least 1")
        if (images := math.lcm(FORWARD_BATCH_SIZE, *arguments.sizes)) > MOST_IMAGES:
            whole_batches = f"up to {images:,} images a device, whole batches of each"
            parser.error(f"argument --sizes: {whole_batches}, accepted: at most {MOST_IMAGES:,}")
    print(f"{'workload':18} {'size':>5} {'images/s':>9} {'quartiles':>17} {'of usual':>8}")
    results = []
    for workload in arguments.workloads:
        for one in measure(workload, arguments.sizes, arguments.seconds):
            low, median, high = one["images_per_s"]
            spread = f"{low:,.0f} - {high:,.0f}"
            print(f"{workload:18} {one['size']:5} {median:9,.0f} {spread:>17} {one['of_usual'][1]:8.2f}", flush=True)
            results.append(one)
        if arguments.json:
            written = {**provenance(), "warm_up_turns": 1, "results": results}
            arguments.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    ask_for_huge_pages()
    use_all_cores()
    main()
