"""How fast local steps are: client images per second, and the share of the device's measured ceilings, of every combination.

    python -m benchmarks.round_time [--workloads fl2_wrn28_2] [--conv hybrid im2col] [--loop scan vmap] [--dtype float32] ...
    python -m benchmarks.round_time --json=benchmarks/results/round_time_cpu.json

Workloads, whole rounds of them on random images: (FL)^2's step on WRN-28-2 (32 images, weak and strong views, ASAM) and on the
CNN of the digits, FedDure's on ResNet-9 (10 labeled and 90 unlabeled images, both regulators), FedSiam-Pi's on its network for
MNIST (10 images). The server takes one step on ten labels, beside which a client takes `--steps`. Convolution lowering x client
loop x compiler x dtype x cohort, on one device. `unrolled` is a scan over clients whose steps are written out, `separate` that
with a program for each client. Where no axis is given, a CPU has what is worth trying (WORTH_TRYING): XLA's convolution inside
a loop takes minutes a step there. Last comes, for each workload, the layout that `fedjax_ssl.tune` finds by itself: `of best`
is its rate over that of the best row above.

Ceilings are measured first: a large matrix product in each dtype, and adding 1 to a vector in place, which is read and written
once, counting the bytes of both. Arithmetic and
bytes of a pass are XLA's count for one forward, and one forward and backward, pass of the network in a program of their own,
times the passes that the round reports. So `matmul` is the share of the ceiling that useful arithmetic reached, whatever the
lowering does besides, and `memory` the share of the bandwidth by the bytes that such a program would move. Peak memory is what
the round's program asks for, arguments included. One round to warm up, then at least 3 and `--seconds` of rounds: median and
quartiles of images per second. What does not fit into `--budget` seconds in all is named and left out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import provenance
from fedjax_ssl import build, models, tune
from fedjax_ssl.data.sources import from_arrays
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.models.layers import DTYPES
from fedjax_ssl.simulation.execution import COMPILERS


class Workload(NamedTuple):
    """A method on a network.

    Attributes:
        method: its settings.
        model: the network's.
        image_shape: of the images.
        labels_at: where the labels are.
        batch_size: of a client's step (of its labeled examples where it has labels).
        optimizer: of the clients.
    """

    method: dict[str, Any]
    model: dict[str, Any]
    image_shape: tuple[int, int, int]
    labels_at: str
    batch_size: int
    optimizer: dict[str, Any]


WORKLOADS = {
    "fl2_wrn28_2": Workload({"name": "fl2"}, {"name": "wide_resnet"}, (32, 32, 3), "server", 32, {}),
    "feddure_resnet9": Workload(
        {"name": "feddure", "unlabeled_batch_size": 90},
        {"name": "resnet9", "variant": "feddure", "norm": "running"},
        (32, 32, 3),
        "clients",
        10,
        {"name": "adam", "learning_rate": 5e-4},
    ),
    "fl2_cnn": Workload({"name": "fl2"}, {"name": "cnn", "width": 32}, (8, 8, 1), "server", 32, {}),
    "fedsiam_mnist_cnn": Workload(
        {"name": "fedsiam_pi"}, {"name": "mnist_cnn", "norm": "running"}, (28, 28, 1), "clients", 10, {"learning_rate": 0.01}
    ),
}
ON_CPU = {
    "conv": ["winograd", "banded", "hybrid", "im2col", "shifted", "grouped"], "loop": ["scan", "vmap", "unrolled", "separate"],
    "compiler": list(COMPILERS), "dtype": ["float32"], "cohort": [2],
}  # fmt: skip
ON_ACCELERATOR = {
    "conv": ["grouped", "im2col", "shifted"], "loop": ["vmap", "scan", "unrolled"], "compiler": ["default"],
    "dtype": list(DTYPES), "cohort": [10],
}  # fmt: skip
WORTH_TRYING = {
    "scan": ["winograd", "banded", "hybrid", "im2col", "shifted"], "vmap": ["im2col", "shifted"], "unrolled": ["winograd"],
    "separate": ["winograd", "grouped"],
}  # fmt: skip
"""On a CPU, the lowerings for each loop over clients."""
WRITTEN_OUT = {"unrolled": "scan", "separate": "separate"}
"""Loops over clients whose local steps are written out, and the strategy of each."""
TUNED = "tuned"
LEAST_ROUNDS = 3


class Ceilings(NamedTuple):
    """What the device does at most: floating-point operations per second by dtype, and bytes per second."""

    flops: dict[str, float]
    bandwidth: float


def best_time(program: Callable[[], Any], repeats: int = 5) -> float:
    """The least seconds of some runs, after one to warm up."""
    times = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready(program())
        if repeat:
            times.append(time.perf_counter() - started)
    return min(times)


def ceilings(dtypes: list[str]) -> Ceilings:
    """Measures them."""
    on_cpu = jax.default_backend() == "cpu"
    size, length = (1536, 2**25) if on_cpu else (8192, 2**28)
    flops = {}
    for dtype in dtypes:
        matrix = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
        product = jax.jit(lambda a: a @ a).lower(matrix).compile()
        flops[dtype] = 2 * size**3 / best_time(lambda run=product, a=matrix: run(a))
    in_place = jax.jit(lambda x: x + 1, donate_argnums=0)  # a result of its own would take fresh pages each time
    vector = [jnp.zeros(length, jnp.float32)]

    def add() -> jax.Array:
        vector.append(in_place(vector.pop()))
        return vector[0]

    return Ceilings(flops, 2 * vector[0].nbytes / best_time(add))


@functools.cache
def costs(name: str, dtype: str) -> dict[str, tuple[float, float]]:
    """`flops` and `bytes accessed` of one example: (forward, back), as XLA counts them for a batch in no loop."""
    workload = WORKLOADS[name]
    options = {key: value for key, value in workload.model.items() if key not in ("name", "norm")}
    model = models.build(workload.model["name"], num_classes=10, conv="grouped", dtype=dtype, **options)
    params, stats = model.init(jax.random.key(0), workload.image_shape)
    images = jnp.zeros((workload.batch_size, *workload.image_shape))

    def loss(params: Any) -> jax.Array:
        logits, _ = model.apply(params, stats, images, train=True, key=jax.random.key(0))
        return jnp.sum(logits**2)

    forward, both = (jax.jit(f).lower(params).compile().cost_analysis() for f in (loss, jax.grad(loss)))
    names = ("flops", "bytes accessed")
    return {name: (forward[name] / len(images), (both[name] - forward[name]) / len(images)) for name in names}


def execution(case: dict[str, Any]) -> dict[str, Any]:
    """The settings of a combination's execution."""
    loop, shared = case["loop"], {"dtype": case["dtype"], "devices": 1}
    if loop == TUNED:
        return shared
    layout = {"conv": case["conv"], "compiler": case["compiler"], "steps": "unrolled" if loop in WRITTEN_OUT else "loop"}
    if loop.isdecimal():
        return {**shared, **layout, "strategy": "chunked", "chunk_size": int(loop)}
    return {**shared, **layout, "strategy": WRITTEN_OUT.get(loop, loop)}


def experiment(case: dict[str, Any], steps: int) -> Experiment:
    """A round of the combination's workload: its cohort's clients with `steps` local steps each, and one of the server."""
    workload, cohort = WORKLOADS[case["workload"]], case["cohort"]
    at_clients = workload.labels_at == "clients"
    unlabeled = workload.method.get("unlabeled_batch_size", 0) or workload.batch_size
    per_client = workload.batch_size + unlabeled
    count = cohort * per_client + 10
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (count, *workload.image_shape), np.uint8), np.arange(count) % 10
    local = {"optimizer": workload.optimizer, "batch_size": workload.batch_size, "epochs": 0, "steps": steps}
    labeled = {"labeled_fraction": (workload.batch_size / per_client,)} if at_clients else {"num_labels": 10}
    made = build(
        {
            "method": workload.method,
            "model": workload.model,
            "data": {"labels_at": workload.labels_at, "num_clients": cohort, "weak": "none", "strong": "none", **labeled},
            "client": local,
            "server": {"epochs": 0, "steps": 1, "pretrain": 0} | ({} if at_clients else {"sbn_data": "labeled"}),
            "cohort_size": cohort,
            "rounds": 10**6,
            "eval_every": 10**6,
            "execution": execution(case),
        },
        from_arrays(train_images=images, train_labels=labels, test_images=images[:10], test_labels=labels[:10]),
    )
    return tune(made) if case["loop"] == TUNED else made


def measure(case: dict[str, Any], steps: int, seconds: float, most: Ceilings) -> dict[str, Any]:
    """One combination's rounds."""
    one = experiment(case, steps)
    took, rates, before = [], [], {"cost/forward_passes": 0, "cost/backward_passes": 0}
    for _, row in one.rounds():
        if row["round"] > 1:
            took.append(row["time/round_s"])
            rates.append(row["perf/client_images_per_s"])
            if len(took) >= LEAST_ROUNDS and sum(took) >= seconds:
                break
        before = row
    passes = [row[key] - before[key] for key in ("cost/forward_passes", "cost/backward_passes")]
    per_example = costs(case["workload"], case["dtype"])
    used = {name: sum(n * each for n, each in zip(passes, per_example[name], strict=True)) for name in per_example}
    low, median, high = np.quantile(rates, (0.25, 0.5, 0.75))
    round_s = float(np.median(took))
    return {
        **case,
        "images_per_s": float(median),
        "quartiles": [float(low), float(high)],
        "rounds": len(took),
        "round_s": round_s,
        "matmul_share": used["flops"] / round_s / most.flops[case["dtype"]],
        "memory_share": used["bytes accessed"] / round_s / most.bandwidth,
        "compile_s": row["time/compile_s"],
        "peak_bytes": one.simulator.memory_bytes,
        "layout": one.layout._asdict(),
    }


def attempt(case: dict[str, Any], steps: int, seconds: float, most: Ceilings) -> dict[str, Any]:
    """`measure`, or what went wrong, such as memory that is not there; then the device's memory is free again."""
    try:
        return measure(case, steps, seconds, most)
    except (ValueError, RuntimeError) as error:
        return {**case, "error": str(error).strip().splitlines()[0]}
    finally:
        jax.clear_caches()


def client_loop(word: str) -> str:
    """Checks a word of `--loop`."""
    known = ("scan", "vmap", *WRITTEN_OUT)
    if word not in known and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"got {word}, accepted: {', '.join(known)}, or a number of clients")
    return word


def combinations(axes: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Those of the chosen axes, and the tuned layout last for each workload, dtype and cohort."""
    choose = jax.default_backend() == "cpu" and (axes.conv, axes.loop) == (ON_CPU["conv"], ON_CPU["loop"])
    for workload, dtype, cohort in itertools.product(axes.workloads, axes.dtype, axes.cohort):
        work = {"workload": workload, "dtype": dtype, "cohort": cohort}
        for conv, loop, compiler in itertools.product(axes.conv, axes.loop, axes.compiler):
            if not choose or conv in WORTH_TRYING[loop]:
                yield {**work, "conv": conv, "loop": loop, "compiler": compiler}
        if not axes.fixed:
            yield {**work, "conv": "", "loop": TUNED, "compiler": ""}


def of_best(result: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, float]:
    """The rate of a tuned layout over the best of the fixed ones of the same work, where there are any."""
    work = [result[key] for key in ("workload", "dtype", "cohort")]
    same = [r for r in before if [r[key] for key in ("workload", "dtype", "cohort")] == work and "images_per_s" in r]
    best = max((r["images_per_s"] for r in same), default=0.0)
    return {"of_best": result["images_per_s"] / best} if best and "images_per_s" in result else {}


def main() -> None:
    """Measures the chosen combinations, prints a table and writes it as it grows; exit status 1 where one failed."""
    usual = ON_CPU if jax.default_backend() == "cpu" else ON_ACCELERATOR
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--conv", nargs="+", choices=list(LOWERINGS), default=usual["conv"])
    parser.add_argument(
        "--loop",
        nargs="+",
        type=client_loop,
        default=usual["loop"],
        help="scan, vmap, unrolled, separate, or clients to a chunk",
    )
    parser.add_argument("--compiler", nargs="+", choices=COMPILERS, default=usual["compiler"])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=usual["dtype"])
    parser.add_argument("--cohort", nargs="+", type=int, default=usual["cohort"], help="clients a round")
    parser.add_argument("--fixed", action="store_true", help="leave out the tuned layouts")
    parser.add_argument("--steps", type=int, default=4, help="local steps a round")
    parser.add_argument("--seconds", type=float, default=3.0, help="of rounds that each combination has at least")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no combination is begun")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments = parser.parse_args()
    started = time.perf_counter()
    most = ceilings(arguments.dtype)
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {dtype}" for dtype, rate in most.flops.items())
    print(f"ceilings: {rates}, {most.bandwidth / 1e9:,.1f} GB/s")
    head = f"{'workload':18} {'conv':8} {'loop':8} {'compiler':8} {'dtype':8} {'M':>4} {'images/s':>9} {'quartiles':>17} "
    print(head + f"{'matmul':>6} {'memory':>6} {'compile s':>9} {'peak MB':>8} {'of best':>7}")
    results: list[dict[str, Any]] = []
    for case in combinations(arguments):
        in_time = time.perf_counter() - started <= arguments.budget
        result = attempt(case, arguments.steps, arguments.seconds, most) if in_time else {**case, "left_out": "no time"}
        results.append(result | (of_best(result, results) if case["loop"] == TUNED else {}))
        print(line(results[-1]), flush=True)
        if arguments.json:
            settings = {"steps": arguments.steps, "ceilings": most._asdict()}
            arguments.json.write_text(json.dumps({**provenance(), **settings, "results": results}, indent=1) + "\n")
    if any("error" in result for result in results):
        sys.exit(1)


def line(r: dict[str, Any]) -> str:
    """A line of the table."""
    layout = r.get("layout", r)  # which a tuned one has found
    what = f"{r['workload']:18} {layout['conv']:8} {r['loop']:8} {layout['compiler']:8} {r['dtype']:8} {r['cohort']:4}"
    if "error" in r or "left_out" in r:
        return f"{what} {r['error'] if 'error' in r else 'left out: ' + r['left_out']}"
    spread = "{:,.0f} - {:,.0f}".format(*r["quartiles"])
    return (
        f"{what} {r['images_per_s']:9,.0f} {spread:>17} {r['matmul_share']:6.1%} {r['memory_share']:6.1%} "
        f"{r['compile_s']:9.1f} {r['peak_bytes'] / 1e6:8,.0f}" + (f" {r['of_best']:7.2f}" if "of_best" in r else "")
    )


if __name__ == "__main__":
    main()
