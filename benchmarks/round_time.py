"""How fast local steps are: client images per second, and the share of the machine's measured ceilings, of every combination.

    python -m benchmarks.round_time --json=FILE                 (28 minutes on a CPU, 8 on a GPU, and what is begun by then)
    python -m benchmarks.round_time --budget inf --json=benchmarks/results/round_time_cpu.json         (until all is measured)
    python -m benchmarks.round_time [--workloads fl2_wrn28_2] [--conv hybrid im2col] [--loop scan 4] [--cohort 4 10] ...

Workloads, whole rounds of them on random images: (FL)^2's step on WRN-28-2 (32 images, weak and strong views, ASAM) and on the
CNN of the digits, FedDure's on ResNet-9 (10 labeled and 90 unlabeled images, both regulators), FedSiam-Pi's on its network for
MNIST (10 images), FedAvg's on the network of pfl-research's benchmark (10 images). The server takes one step on ten labels;
images per second are the clients'. Convolution lowering x client loop x compiler x dtype x cohort, over all the devices there
are, of which a CPU has one for each core, as `launch.run` does: `scan` is each device's clients one after another, `vmap` all
of them at once, a number so many at a time, `unrolled` a scan whose local steps are written out, `separate` that with a
program for each client. Where none of `--conv`, `--loop` and `--compiler` is given, ON_CPU or ON_ACCELERATOR is what is tried,
the best guesses first: XLA's convolution inside a loop takes minutes a step on a CPU. Else it is the product of those that are
given, and of OTHERWISE.

Workloads take turns, the one next that has had the least time, until SHARE of `--budget` is over. In the rest of it
`fedjax_ssl.tune` looks for each workload's layout, in the first dtype. This one runs again, a round a turn, in balanced orders
with the layout that is usual where nothing is tuned (the first of `beside` in the file) and with the KEPT fastest of the fixed
ones that took less than NEAR times as long as the fastest, as the machine may have been slower for one than for another. Of
each of these there is the median of its times over the tuned one's, turn by turn: `of best` is the least of these medians, `of
usual` the usual layout's. Exit status 1 where `of best` is below WORST, and where anything failed; of fixed layouts some may
have no room in memory, but not all. As for any long run, a search tries no other layout after a quarter of an hour; one that
was cut short by the budget is marked and compared with nothing, so that large networks need `--budget inf`, with which one
workload follows another. `search_s` in the file is how long it took, next to nothing where its result was kept. What there is
no time for is named.

Ceilings are measured first: a large matrix product in each dtype, and adding 1 to a vector in place, counting the bytes that
are read and written. What a round computes is counted in its traced program, clients and server, by `fedjax_ssl.arithmetic`:
its convolutions and matrix products as direct ones, whatever lowering runs. `useful` is the share of the ceiling that this
arithmetic reached: what a lowering does besides does not count, and Winograd's, which multiplies half as much, may pass 100 %.
`memory` is likewise by the bytes of their operands and results, each read or written once by each of them; what lies between
them (batch norm, activations, the optimizer) is not in it. Peak memory is what a device's largest program asks for, arguments
included. One round to warm up, then at least LEAST_ROUNDS, or of a tuned layout LEAST_TURNS, and `--seconds` of rounds: median
and quartiles of images per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import ceilings
from benchmarks.ceilings import Ceilings
from benchmarks.provenance import provenance
from benchmarks.spread import balanced, quartiles, whole
from benchmarks.workloads import DTYPES, TUNED, USUAL, WORKLOADS, WRITTEN_OUT, Case, arithmetic_of, experiment
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.simulation import memory
from fedjax_ssl.simulation.execution import COMPILERS
from launch.command import ask_for_huge_pages, use_all_cores

ON_CPU = [
    ("winograd", "scan", "default"), ("winograd", "scan", "lean"), ("winograd", "unrolled", "lean"),
    ("im2col", "scan", "default"), ("grouped", "separate", "lean"), ("banded", "scan", "default"),
    ("im2col", "vmap", "default"), ("winograd", "vmap", "default"), ("hybrid", "scan", "default"),
    ("winograd", "separate", "lean"), ("shifted", "scan", "default"),
]  # fmt: skip
ON_ACCELERATOR = [
    ("tiled", "vmap", "default"), ("grouped", "vmap", "default"), ("tiled", "5", "default"),
    ("im2col", "vmap", "default"), ("grouped", "scan", "default"), ("shifted", "vmap", "default"),
    ("tiled", "scan", "default"), ("grouped", "unrolled", "default"),
]  # fmt: skip
"""(conv, loop, compiler) worth trying, the best guesses first."""
OTHERWISE = {
    "cpu": (["winograd", "banded", "hybrid", "im2col", "shifted"], ["scan", "vmap", *WRITTEN_OUT]),
    "accelerator": (["tiled", "grouped", "im2col", "shifted"], ["vmap", "5", "scan", "unrolled"]),
}
"""Lowerings and loops, where some axis is given and they are not."""
BUDGET = {"cpu": 1700.0, "accelerator": 480.0}
SHARE = {"cpu": 0.4, "accelerator": 0.6}
"""Seconds, and how much of them the fixed layouts have: a search takes up to 25 minutes for a large network on a CPU."""
STEPS = 4
"""Local steps on an accelerator; a CPU has each workload's own."""
LEAST_ROUNDS, LEAST_TURNS = 3, 6
"""Rounds of a fixed layout at least, and of each that is compared in turns."""
NEAR, KEPT = 1.4, 4
"""Fixed layouts that take less than NEAR times as long as the fastest may be the best, KEPT of them at most."""
WORST = 1 / 1.1
"""The share of the best fixed layout's speed that a tuned one has at least."""
IMAGES = "perf/client_images_per_s"


class Running(NamedTuple):
    """A combination whose program is compiled and warm.

    Attributes:
        case: the combination.
        experiment: it, ready to run.
        search_s: what it took to build, with the search for a tuned one's layout.
        rounds: its rounds from the second on.
        compile_s: what it took to compile.
    """

    case: Case
    experiment: Experiment
    search_s: float
    rounds: Iterator[tuple[Any, dict[str, Any]]]
    compile_s: float

    def round(self) -> dict[str, Any]:
        """The row of the next round; raises ValueError where the clients did nothing in it."""
        _, row = next(self.rounds)
        if IMAGES not in row:
            raise ValueError("no client took a step")
        return row


def start(case: Case, give_up: Callable[[], bool] = lambda: False) -> Running:
    """Builds the combination, and runs its first round."""
    began = time.perf_counter()
    one = experiment(case, give_up)
    search_s, rounds = time.perf_counter() - began, one.rounds()
    _, row = next(rounds)
    return Running(case, one, search_s, rounds, row["time/compile_s"])


def summary(running: Running, rows: list[dict[str, Any]], most: Ceilings) -> dict[str, Any]:
    """What the rows of some of its rounds come to."""
    case, layout = running.case, running.experiment.layout
    low, median, high = quartiles(row[IMAGES] for row in rows)
    round_s, computed = median_s(rows), arithmetic_of(case)
    return {
        **case._asdict(),
        "images_per_s": median,
        "quartiles": [low, high],
        "rounds": len(rows),
        "round_s": round_s,
        "flops": computed.flops,
        "bytes": computed.bytes,
        "useful_share": computed.flops / round_s / most.flops[case.dtype],
        "memory_share": computed.bytes / round_s / most.bandwidth,
        "compile_s": running.compile_s,
        "peak_bytes": running.experiment.simulator.memory_bytes,
        "layout": layout._asdict(),
    }


def median_s(rows: list[dict[str, Any]]) -> float:
    """The median of the rounds' seconds."""
    return float(np.median([row["time/round_s"] for row in rows]))


def round_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and quartiles of the rounds' seconds."""
    low, median, high = quartiles(row["time/round_s"] for row in rows)
    return {"round_s": median, "round_quartiles_s": [low, high]}


def ratios(rival: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[float]:
    """Quartiles, over the turns, of the rival's seconds over the own ones."""
    return quartiles(a["time/round_s"] / b["time/round_s"] for a, b in zip(rival, own, strict=True))


def in_turns(all_: list[Running], seconds: float, least: int) -> list[list[dict[str, Any]]]:
    """The rows of their next rounds, in whole sets of balanced orders: of each at least so many, and of the first `seconds`."""
    rows: list[list[dict[str, Any]]] = [[] for _ in all_]
    for running in all_[1:]:  # they ran long ago: a round to warm up again
        running.round()
    turns = whole(len(all_))
    while len(rows[0]) < least or len(rows[0]) % turns or sum(row["time/round_s"] for row in rows[0]) < seconds:
        for number in balanced(len(all_), len(rows[0])):
            rows[number].append(all_[number].round())
    return rows


class Bench:
    """The measurements, and what is left of the time for them.

    Args:
        seconds: of rounds that each combination has at least.
        budget: seconds, from now on, after which nothing is begun.
        most: the ceilings.

    Attributes:
        near: the fixed layouts of each work that may be the fastest, in the order of their rounds' seconds, and these.
    """

    def __init__(self, seconds: float, budget: float, most: Ceilings) -> None:
        self._seconds, self._most = seconds, most
        self._began, self._budget = time.perf_counter(), budget
        self.near: dict[tuple, list[tuple[float, Running]]] = {}

    def left_s(self, share: float = 1.0) -> float:
        """Seconds that are left of so much of the budget."""
        return share * self._budget - (time.perf_counter() - self._began)

    def fixed(self, case: Case) -> dict[str, Any]:
        """A fixed layout's rounds."""
        running = start(case)
        (rows,) = in_turns([running], self._seconds, LEAST_ROUNDS)
        found = sorted([*self.near.get(case.work, []), (median_s(rows), running)], key=lambda pair: pair[0])
        self.near[case.work] = [(seconds, one) for seconds, one in found[:KEPT] if seconds < NEAR * found[0][0]]
        return summary(running, rows, self._most)

    def tuned(self, case: Case) -> dict[str, Any]:
        """The tuned layout's rounds, in turns with those of the usual one and the best; the search ends with the budget."""
        cut = False

        def give_up() -> bool:
            nonlocal cut
            cut = self.left_s() < 0
            return cut

        running = start(case, give_up)
        rivals = [] if cut else self._rivals(case)
        rows, *others = in_turns([running, *rivals], self._seconds, LEAST_TURNS)
        beside = [
            {**rival.case._asdict(), **round_of(own), "ratio_quartiles": ratios(own, rows)}
            for rival, own in zip(rivals, others, strict=True)
        ]
        medians = [rival["ratio_quartiles"][1] for rival in beside]
        of = {"of_best": min(medians), "of_usual": medians[0]} if medians else {}
        found = {**summary(running, rows, self._most), **round_of(rows)}
        return {**found, "beside": beside, **of, "search_s": running.search_s, "cut_short": cut}

    def forget(self, case: Case) -> None:
        """Frees the fixed layouts of its work."""
        self.near.pop(case.work, None)
        memory.trim()

    def _rivals(self, case: Case) -> list[Running]:
        """What a tuned layout is compared with: the usual one, and then those that may be the best."""
        near, layout = [one for _, one in self.near.get(case.work, [])], experiment(case._replace(loop=USUAL)).layout
        usual = next((one for one in near if one.experiment.layout == layout), None) or start(case._replace(loop=USUAL))
        return [usual, *(one for one in near if one is not usual)]


def attempt(measure: Callable[[Case], dict[str, Any]], case: Case) -> dict[str, Any]:
    """`measure`, or what went wrong, or that a fixed layout has no room; then the device's memory is free again."""
    try:
        return measure(case)
    except Exception as error:  # whatever it is: the other combinations are measured all the same
        kind = "no_room" if memory.is_short(error) and case.loop != TUNED else "error"
        return {**case._asdict(), kind: " ".join([f"{type(error).__name__}:", *str(error).split()])[:200]}
    finally:
        jax.clear_caches()
        memory.trim()


def client_loop(word: str) -> str:
    """Checks a word of `--loop`."""
    known = ("scan", "vmap", *WRITTEN_OUT)
    if word not in known and not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"got {word}, accepted: {', '.join(known)}, or a number of clients")
    return word


def layouts(axes: argparse.Namespace, kind: str) -> list[tuple[str, str, str]]:
    """(conv, loop, compiler) of the chosen axes, or what is worth trying where none is chosen."""
    if not (axes.conv or axes.loop or axes.compiler):
        return ON_CPU if kind == "cpu" else ON_ACCELERATOR
    convs, loops = OTHERWISE[kind]
    return list(itertools.product(axes.conv or convs, axes.loop or loops, axes.compiler or ["default"]))


def combinations(axes: argparse.Namespace, workload: str, kind: str) -> list[Case]:
    """A workload's, in the order in which they are measured.

    The first layout in all dtypes, and all layouts in the first dtype, in turns; then the second layout in the others; ...
    """
    steps = axes.steps or (WORKLOADS[workload].steps_on_cpu if kind == "cpu" else STEPS)
    both = itertools.product(enumerate(layouts(axes, kind)), enumerate(axes.dtype))
    ordered = sorted(both, key=lambda pair: (min(pair[0][0], pair[1][0]), pair[0][0] + pair[1][0]))
    return [
        Case(workload, conv, loop, compiler, dtype, cohort, steps)
        for ((_, (conv, loop, compiler)), (_, dtype)) in ordered
        for cohort in axes.cohort
    ]


def run(axes: argparse.Namespace, kind: str, bench: Bench) -> Iterator[dict[str, Any]]:
    """The results, one after another; without a budget of one workload after another, as what may be the best is in memory."""
    groups = [[workload] for workload in axes.workloads] if math.isinf(bench.left_s()) else [axes.workloads]
    for workloads in groups:
        yield from run_together(workloads, axes, kind, bench)


def run_together(workloads: list[str], axes: argparse.Namespace, kind: str, bench: Bench) -> Iterator[dict[str, Any]]:
    """The results of some workloads that take turns, one after another."""
    waiting = {workload: combinations(axes, workload, kind) for workload in workloads}
    spent, works = dict.fromkeys(workloads, 0.0), {w: cases[: len(axes.cohort)] for w, cases in waiting.items()}
    while bench.left_s(1.0 if axes.fixed else SHARE[kind]) > 0 and any(waiting.values()):
        workload = min((w for w in waiting if waiting[w]), key=lambda w: spent[w])
        began = time.perf_counter()
        case = waiting[workload].pop(0)
        yield attempt(bench.fixed, case)
        if axes.fixed or case.dtype != axes.dtype[0]:  # it is compared with nothing
            bench.forget(case)
        spent[workload] += time.perf_counter() - began
    for case in itertools.chain(*waiting.values()):
        yield {**case._asdict(), "left_out": "no time"}
    if axes.fixed:
        return

    def round_s(case: Case) -> float:
        return min((seconds for seconds, _ in bench.near.get(case.work, ())), default=float("inf"))

    for case in sorted(itertools.chain(*works.values()), key=round_s):  # short ones first: their searches are short, too
        of_work = case._replace(conv="", loop=TUNED, compiler="")
        if bench.left_s() > 0:
            yield attempt(bench.tuned, of_work)
        else:
            yield {**of_work._asdict(), "left_out": "no time"}
        bench.forget(case)


def slow(result: dict[str, Any]) -> bool:
    """Whether a search that had its time has come to a layout that is slower than it may be."""
    return not result.get("cut_short") and result.get("of_best", 1.0) < WORST


def without_room(results: list[dict[str, Any]]) -> set[str]:
    """The workloads of which memory had no room for any layout that was tried."""
    return {r["workload"] for r in results if "no_room" in r} - {r["workload"] for r in results if "images_per_s" in r}


HEAD = (
    f"{'workload':18} {'conv':8} {'loop':8} {'compiler':8} {'dtype':13} {'M':>4} {'S':>3} {'images/s':>9} {'quartiles':>17} "
    f"{'useful':>6} {'memory':>6} {'compile s':>9} {'peak MB':>8} {'of best':>7} {'of usual':>8}"
)


def line(r: dict[str, Any]) -> str:
    """A line of the table."""
    layout = r.get("layout", r)  # which a tuned one has found
    what = f"{r['workload']:18} {layout['conv']:8} {r['loop']:8} {layout['compiler']:8} {r['dtype']:13} {r['cohort']:4}"
    if failed := r.get("error") or r.get("no_room"):
        return f"{what} {r['steps']:3} {failed}"
    spread = "{:,.0f} - {:,.0f}".format(*r["quartiles"])
    beside = f" {r['of_best']:7.2f} {r['of_usual']:8.2f}" if "of_best" in r else ""
    return (
        f"{what} {r['steps']:3} {r['images_per_s']:9,.0f} {spread:>17} {r['useful_share']:6.1%} {r['memory_share']:6.1%} "
        f"{r['compile_s']:9.1f} {r['peak_bytes'] / 1e6:8,.0f}{beside}{' (search cut short)' if r.get('cut_short') else ''}"
    )


def left_out(results: list[dict[str, Any]]) -> Iterator[str]:
    """For each workload a line with what there was no time for."""
    without = [r for r in results if "left_out" in r]
    for workload in dict.fromkeys(r["workload"] for r in without):
        keys = ("conv", "loop", "compiler", "dtype", "cohort")
        named = (" ".join(str(r[key]) for key in keys if r[key]) for r in without if r["workload"] == workload)
        yield f"{workload}: no time for {'; '.join(named)}"


def arguments_of(words: list[str] | None, kind: str) -> argparse.Namespace:
    """The command line, with what is usual on a `cpu` or an `accelerator`."""
    on_cpu = kind == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--conv", nargs="+", choices=list(LOWERINGS))
    parser.add_argument("--loop", nargs="+", type=client_loop, help="scan, vmap, unrolled, separate, or clients to a chunk")
    parser.add_argument("--compiler", nargs="+", choices=COMPILERS)
    parser.add_argument(
        "--dtype", nargs="+", choices=list(DTYPES), default=["float32"] if on_cpu else ["tensorfloat32", "bfloat16", "float32"]
    )
    cohort = 2 * len(jax.devices()) if on_cpu else 10
    parser.add_argument("--cohort", nargs="+", type=int, default=[cohort], help="clients a round (%(default)s)")
    parser.add_argument("--fixed", action="store_true", help="leave out the tuned layouts")
    parser.add_argument("--steps", type=int, help="local steps a round")
    parser.add_argument("--seconds", type=float, default=3.0, help="of rounds that each combination has at least (%(default)s)")
    parser.add_argument("--budget", type=float, default=BUDGET[kind], help="seconds after which nothing is begun (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    return parser.parse_args(words)


def main() -> None:
    """Measures the chosen combinations, prints a table and writes it as it grows; exit status 1 where one failed."""
    kind = "cpu" if jax.default_backend() == "cpu" else "accelerator"
    arguments = arguments_of(None, kind)
    began = time.perf_counter()
    most = ceilings.measured(arguments.dtype)
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {dtype}" for dtype, rate in most.flops.items())
    print(f"ceilings of {len(jax.devices())} devices: {rates}, {most.bandwidth / 1e9:,.1f} GB/s\n{HEAD}")
    bench = Bench(arguments.seconds, arguments.budget - (time.perf_counter() - began), most)
    results: list[dict[str, Any]] = []
    for result in run(arguments, kind, bench):
        results.append(result)
        if "left_out" not in result:
            print(line(result), flush=True)
        if arguments.json:
            written = {**provenance(), "ceilings": most._asdict(), "warm_up_rounds": 1, "results": results}
            arguments.json.write_text(json.dumps(written, indent=1) + "\n")
    for words in left_out(results):
        print(words)
    for result in filter(slow, results):
        print(f"{result['workload']}: the tuned layout takes {1 / result['of_best']:.2f} times the best fixed one's time")
    if any("error" in result or slow(result) for result in results) or without_room(results):
        sys.exit(1)


if __name__ == "__main__":
    ask_for_huge_pages()
    use_all_cores()
    main()
