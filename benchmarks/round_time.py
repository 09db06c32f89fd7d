"""How long rounds take: five networks, in the usual layout and in others, in turns, and their share of the machine's ceiling.

    python -m benchmarks.round_time --json=benchmarks/results/round_time_<machine>.json
    python -m benchmarks.round_time --workloads fl2_cnn --layouts usual strategy=chunked,chunk_size=5 dtype=bfloat16
    python -m benchmarks.round_time --layouts usual --compare-with DIR          (DIR: another checkout of this repository)
    python -m benchmarks.round_time --evaluations 10 25 250

Workloads are whole rounds with random images; the server takes one step on ten labels. A layout is `usual`, the default, or
comma-separated `execution.*` settings; `conv=xla` takes minutes a step on a CPU. Layouts and checkouts take turns, a round
each, in processes of their own; `ratio` is the median of times over the first one's, turn by turn. The ceiling is a large
matrix product in the layout's dtype and precision; `share` is the part of it that passes through the network reach, counted as
direct convolutions, a pass back twice. Winograd's multiply half as much and may be above 100 %.
"""

import argparse
import contextlib
import itertools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import ROOT, Result, Rows, Worker, WorkerError
from benchmarks.programs import RUNS_LONG


class Workload(NamedTuple):
    """A method on a network, and what clients have; labels are the server's, or a batch of each client's images."""

    method: dict[str, Any]
    model: dict[str, Any]
    shape: tuple[int, int, int]
    images: int  # of a client
    batch_size: int
    optimizer: dict[str, Any]
    steps: int  # local ones on a CPU; an accelerator has 4
    at_clients: bool = True


WORKLOADS = {
    "fl2_wrn28_2": Workload({"name": "fl2"}, {"name": "wide_resnet"}, (32, 32, 3), 64, 32, {}, 2, at_clients=False),
    "feddure_resnet9": Workload(
        {"name": "feddure", "unlabeled_batch_size": 90},
        {"name": "resnet9", "variant": "feddure", "norm": "running"},
        (32, 32, 3), 100, 10, {"name": "adam", "learning_rate": 5e-4}, 1,
    ),
    "fl2_cnn": Workload({"name": "fl2"}, {"name": "cnn", "width": 32}, (8, 8, 1), 64, 32, {}, 4, at_clients=False),
    "fedsiam_mnist_cnn": Workload(
        {"name": "fedsiam_pi"}, {"name": "mnist_cnn", "norm": "running"}, (28, 28, 1), 20, 10, {"learning_rate": 0.01}, 4
    ),
    "fedavg_emnist_cnn": Workload({"name": "fedavg"}, {"name": "emnist_cnn"}, (32, 32, 3), 20, 10, {"learning_rate": 0.01}, 4),
}  # fmt: skip
LAYOUTS = {
    "cpu": ["usual", "strategy=vmap", "strategy=scan", "conv=gpu", "dtype=bfloat16"],
    "gpu": ["usual", "strategy=scan", "strategy=chunked,chunk_size=5", "conv=xla", "dtype=bfloat16", "precision=float32"],
}
LEAST, SECONDS, WARM_UP = 6, 5.0, 2  # rounds at least, seconds of the first layout's at least
EVALUATED = 1_000  # test images, where evaluations are timed
HEAD = ("of", "workload", "M, S", "layout", "seconds (quartiles)", "times the first (quartiles)", "of the ceiling", "MB")
SORTED = ("of", "workload", "cohort")


def rows(one: Result) -> Rows:
    """The row of a workload in a layout."""
    case = one["case"]
    layout = case["layout"] + ("" if case["code"] == "this" else f", at {(one['commit'] or 'unknown')[:9]}")
    share, size = f"{one['share']:.0%}" if "share" in one else "", f"{one.get('program_bytes', 0) / 1e6:,.0f}"
    times = harness.between(one, "seconds", "quartiles"), harness.between(one, "ratio", "ratio_quartiles")
    return [[case["of"], case["workload"], f"{case['cohort']}, {case['steps']}", layout, *times, share, size]]


def in_words(ceilings: dict[str, Any]) -> str:
    """The ceilings of a machine."""
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {name}" for name, rate in ceilings["flops"].items())
    return f"ceilings {rates}, {ceilings['bandwidth'] / 1e9:,.0f} GB/s"


def settings_of(layout: str) -> dict[str, Any]:
    """A layout's `execution.*` settings."""
    pairs = [pair.partition("=") for pair in layout.split(",") if pair != "usual"]
    return {key: int(value) if value.isdecimal() else value for key, _, value in pairs}


def config_of(workload: Workload, layout: str, cohort: int, steps: int) -> dict[str, Any]:
    """The config of a workload in a layout, all of whose clients take part in each round."""
    data = {"num_clients": cohort, "weak": "none", "strong": "none"}
    server: dict[str, Any] = {"training": {"epochs": 0, "steps": 1, "pretrain": 0}}
    if workload.at_clients:
        data |= {"labels_at": "clients", "labeled_fraction": (workload.batch_size / workload.images,)}
    else:
        data |= {"labels_at": "server", "num_labels": 10}
        server |= {"static_norm": {"data": "labeled"}}
    return {
        "method": workload.method, "model": workload.model, "data": data, "server": server, "cohort_size": cohort,
        "client": {"optimizer": workload.optimizer, "batch_size": workload.batch_size, "epochs": 0, "steps": steps},
        "execution": settings_of(layout), **RUNS_LONG,
    }  # fmt: skip


def passes_of(rounds: list[Result]) -> float:
    """Images' passes forward in a round, by the metrics of several: one back has twice the arithmetic."""
    keys = ("cost/forward_passes", "cost/backward_passes")
    forward, back = ((rounds[-1][key] - rounds[0][key]) / (len(rounds) - 1) for key in keys)
    return forward + 2 * back


def precision_of(layout: str) -> str:
    """The key of the ceiling of a layout: its dtype and its precision of products."""
    settings = settings_of(layout)
    return f"{settings.get('dtype', 'float32')} {settings.get('precision', 'default')}"


def measure(name: str, arguments: argparse.Namespace, ceilings: dict[str, Any]) -> list[Result]:
    """A workload in all layouts and checkouts: a result of each, the first being what the others are compared with."""
    workload, request = WORKLOADS[name], "evaluate" if arguments.evaluations else "rounds"
    steps = workload.steps if arguments.on_cpu else 4
    checkouts = {"this": ROOT} | ({"other": arguments.compare_with} if arguments.compare_with else {})
    data = {"count": arguments.cohort * workload.images + 10, "shape": workload.shape}
    data |= {"test": EVALUATED} if arguments.evaluations else {}
    results, running = [], []
    with contextlib.ExitStack() as stack:
        for layout, (code, folder) in itertools.product(arguments.layouts, checkouts.items()):
            case = {"workload": name, "layout": layout, "code": code, "cohort": arguments.cohort, "steps": steps, "of": request}
            result: Result = {"case": case, "commit": harness.git_commit(folder / "pyproject.toml")}
            results.append(result)
            worker = stack.enter_context(Worker(folder))
            try:
                built = worker.ask("build", config=config_of(workload, layout, arguments.cohort, steps), data=data)
                if pathlib.Path(built["package"]).resolve() != folder.resolve():
                    raise WorkerError(f"--compare-with: got a package in {built['package']}, accepted: one in {folder}")
                worker.ask(request, number=WARM_UP)
                result |= worker.ask("about")
                running.append((result, worker))
            except WorkerError as error:
                result["error"] = str(error)
        if not running:
            return results
        found = harness.in_turns([worker for _, worker in running], request, SECONDS, LEAST)
        forward = running[0][1].ask("forward_flops", model=workload.model, shape=workload.shape)
    seconds = [[row["seconds"] for row in rounds] for rounds in found]
    for (result, _), rounds, own in zip(running, found, seconds, strict=True):
        result |= harness.spread(own) | harness.spread(np.divide(own, seconds[0]), "ratio", "ratio_quartiles")
        result["flops"] = forward * (EVALUATED if arguments.evaluations else passes_of(rounds))
        result["share"] = result["flops"] / ceilings["flops"][precision_of(result["case"]["layout"])] / result["seconds"]
    return results


def main() -> None:
    """Measures the chosen workloads, prints a table and writes it as it grows; exit status 1 where something failed."""
    parser = harness.parser(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--layouts", nargs="+", help="`usual`, or execution settings such as strategy=chunked,chunk_size=5")
    parser.add_argument("--evaluations", nargs="+", type=int, help="images of a forward pass; times evaluations, not rounds")
    parser.add_argument("--compare-with", type=pathlib.Path, help="another checkout, to run in turns with this one")
    parser.add_argument("--cohort", type=int, help="clients a round; default: two for each CPU core, on an accelerator 10")
    arguments = parser.parse_args()
    with Worker() as worker:
        device = worker.ask("device")
        arguments.on_cpu = "cpu" in device.lower()
        if arguments.evaluations:
            arguments.layouts = ["usual", *(f"batch_size={size}" for size in arguments.evaluations)]
        arguments.layouts = arguments.layouts or LAYOUTS["cpu" if arguments.on_cpu else "gpu"]
        arguments.cohort = arguments.cohort or (2 * harness.cores() if arguments.on_cpu else 10)
        ceilings = worker.ask("ceilings", precisions=sorted(set(map(precision_of, arguments.layouts))))
    print(f"{device}: {in_words(ceilings)}", flush=True)
    found = (result for name in arguments.workloads for result in measure(name, arguments, ceilings))
    harness.collect(arguments.json, found, rows, f"{WARM_UP} of each process", ceilings=ceilings)


if __name__ == "__main__":
    main()
