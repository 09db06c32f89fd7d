"""Where a round's time goes: its instructions by kind of work, from XLA's profiler, beside what the machine needs at least.

    python -m benchmarks.profile [--workloads fl2_wrn28_2 ...] [--layout dtype=bfloat16] [--json=FILE]

The workloads are those of `round_time` with the usual views, and with one client on one device of a CPU, so that times add up.
The last column is what products need at the machine's ceiling, and what all else needs at its memory's bandwidth; what fits
into a cache may take less. Winograd's products are counted as they are computed, fewer than those of the direct convolution.
The profiler itself adds about a microsecond for each instruction. Run time: three minutes on two CPU cores.
"""

from collections import Counter
from typing import Any

from benchmarks import harness, round_time
from benchmarks.harness import Result, Rows, Worker

HEAD = ("workload", "layout", "work", "ms a round", "share", "ms by the ceilings")
KINDS = {
    "products": "convolutions and matrix products",
    "conv": "convolutions: patches, transforms, padding",
    "norm": "batch norm",
    "network": "ReLU, pools, sums and the rest of the network",
    "views": "augmentation and normalization of images",
    "optimizer": "optimizer steps",
    "copies": "copies",
    "rest": "losses, pseudo-labels, aggregation, other",
    "waiting": "between instructions",
}
SCOPES = {"norm": ("/BatchNorm_",), "conv": ("/Conv_",), "views": ("/views/",), "optimizer": ("/optimizer/",)}


def kind_of(instruction: dict[str, Any]) -> str:
    """The kind of work of an instruction, a key of KINDS, by what it computes and by the scopes in its name."""
    if instruction["flops"]:
        return "products"
    if instruction["operation"] == "copy":
        return "copies"
    name = instruction["scope"]
    for kind, scopes in SCOPES.items():
        if any(scope in name for scope in scopes):
            return kind
    return "network" if ".features/" in name or ".classifier/" in name else "rest"


def rows(one: Result) -> Rows:
    """A row for each kind of work of a workload."""
    case, lines = one["case"], []
    if "error" in one:
        return [[case["workload"], case["layout"], one["error"], "", "", ""]]
    for kind, found in one["kinds"].items():
        least = f"{found['least_s'] * 1e3:.1f}" if found["least_s"] else ""
        share, times = found["seconds"] / one["seconds"], f"{found['seconds'] * 1e3:.1f}"
        lines.append([case["workload"], case["layout"], KINDS[kind], times, f"{share:.0%}", least])
    return lines


def by_kind(instructions: list[dict[str, Any]], seconds: float, flops: float, bandwidth: float) -> dict[str, dict[str, float]]:
    """Seconds of each kind of work, and the least that a machine of that many operations and bytes a second needs."""
    took: Counter[str] = Counter()
    least: Counter[str] = Counter()
    for one in instructions:
        kind = kind_of(one)
        took[kind] += one["seconds"]
        least[kind] += max(one["flops"] / flops, 0 if one["flops"] else one["bytes"] / bandwidth)
    took["waiting"] = max(seconds - sum(took.values()), 0.0)
    return {kind: {"seconds": took[kind], "least_s": least[kind]} for kind in KINDS if kind in took}


def measured(name: str, layout: str) -> Result:
    """A workload's round by kind of work."""
    workload, case = round_time.WORKLOADS[name], {"workload": name, "layout": layout}
    precision = round_time.precision_of(layout)
    with Worker(devices=1) as worker:
        on_cpu = "cpu" in worker.ask("device").lower()
        cohort, steps = (1, workload.steps) if on_cpu else (10, 4)
        most = worker.ask("ceilings", precisions=[precision])
        images = {"count": cohort * workload.images + 10 * (not workload.at_clients), "shape": workload.shape}
        config = round_time.config_of(workload, layout, cohort, steps)
        config["data"] |= {"weak": "default", "strong": "default"}
        worker.ask("build", config=config, data=images)
        worker.ask("rounds", number=2)
        found = worker.ask("profile")
    kinds = by_kind(found["instructions"], found["seconds"], most["flops"][precision], most["bandwidth"])
    return {"case": case, "seconds": found["seconds"], "kinds": kinds}


def main() -> None:
    """Prints a table for each workload and writes it."""
    parser = harness.parser(__doc__)
    names = list(round_time.WORKLOADS)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names[:3], metavar="NAME")
    parser.add_argument("--layout", default="usual", help="as in round_time (%(default)s)")
    arguments = parser.parse_args()
    found = (measured(name, arguments.layout) for name in arguments.workloads)
    harness.collect(arguments.json, found, rows, "2 rounds")


if __name__ == "__main__":
    main()
