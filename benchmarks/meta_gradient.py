"""What FedDure's meta-gradient costs: a local step of FedDure beside a plain step on the same batch.

    python -m benchmarks.meta_gradient [--json=benchmarks/results/meta_gradient.json] [--only=cnn] [--repeats=5]

The plain step is FixMatch's, one forward and one backward pass over the labeled, weak and strong views, with the same Adam.
FedDure's have the meta-gradient in its direct and in its nested form; without F-reg (`no_f`) the step is all but the
meta-gradient, so that its cost is the difference of the two; without C-reg (`no_c`) it goes through theta. The networks:
FedDure's ResNet-9 on 32x32 color images, 10 labeled and 20 unlabeled examples a batch (`--unlabeled=90`: as many as on CIFAR-10
split IID), and the small network of the digits, 8 and 24. Random images, no augmentation, one client, steps in a compiled loop
as in training. Cases take turns, so that other work on the machine meets all of them; after one run each to warm up, the median
and the quartiles of wall time per step, the median of processor time over all threads, and both as multiples of the plain
step's.
Run time: some minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import provenance
from fedjax_ssl import build
from fedjax_ssl.data.sources import from_arrays
from fedjax_ssl.method import Cohort
from fedjax_ssl.simulation.round import attach, gather
from launch.command import ask_for_huge_pages

# Model, image shape, labeled and unlabeled batch size, steps per run.
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, int, int], int, int, int]] = {
    "cnn": ({"name": "cnn", "width": 32}, (8, 8, 1), 8, 24, 20),
    "resnet9": ({"name": "resnet9", "variant": "feddure"}, (32, 32, 3), 10, 20, 1),
}
PLAIN = {"name": "fixmatch", "pseudo_labels": "local", "divisor": "batch", "strict": False, "confidence": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "direct": {"name": "feddure", "meta_gradient": "direct"},
    "nested": {"name": "feddure", "meta_gradient": "nested"},
    "no_c": {"name": "feddure", "regulators": "no_c"},
    "no_f": {"name": "feddure", "regulators": "no_f"},
}


def program(network: str, case: str, unlabeled: int) -> Callable[[], Any]:
    """A client's update of a few steps, compiled: a function that runs it; `unlabeled`: the batch size, 0: the network's."""
    model, shape, labeled, usual, steps = NETWORKS[network]
    unlabeled = unlabeled or usual
    rng, count = np.random.default_rng(0), 10 * (labeled + unlabeled)
    images, labels = rng.integers(0, 256, (count, *shape)).astype(np.uint8), np.arange(count) % 10
    experiment = build(
        {
            "method": CASES[case] | {"unlabeled_batch_size": unlabeled},
            "model": model | {"norm": "running"},
            "data": {
                "labels_at": "clients", "num_clients": 1, "labeled_fraction": (labeled / (labeled + unlabeled),),
                "weak": "none", "strong": "none",
            },
            "client": {
                "optimizer": {"name": "adam", "learning_rate": 5e-4, "schedule": "constant", "persistent": False},
                "batch_size": labeled, "epochs": 0, "steps": steps,
            },
            "cohort_size": 1,
        },
        from_arrays(train_images=images, train_labels=labels, test_images=images[:10], test_labels=labels[:10]),
    )  # fmt: skip
    method, data, spec, _ = experiment.problem
    data = jax.tree.map(jnp.asarray, data)
    server, clients = method.init(jax.random.key(0), spec)
    cohort = Cohort(jnp.arange(1), jnp.int32(0))
    shared, _ = method.broadcast(server, clients, cohort)
    rows = gather(data, cohort, cohort)
    shard, kept = jax.tree.map(lambda x: x[0], (rows.clients, clients))
    arguments = (shared, (), kept, attach(shard, rows.images), jax.random.key(0))
    compiled = jax.jit(method.client_update).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def measure(network: str, repeats: int, unlabeled: int = 0) -> list[dict[str, Any]]:
    """The table's lines of one network."""
    steps = NETWORKS[network][-1]
    programs = {case: program(network, case, unlabeled) for case in CASES}
    wall: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for case, run in programs.items():
            started, used = time.perf_counter(), time.process_time()
            run()
            if repeat:  # the first warms up
                wall.setdefault(case, []).append((time.perf_counter() - started) / steps)
                processor.setdefault(case, []).append((time.process_time() - used) / steps)
    lines = []
    for case in CASES:
        quartiles = np.quantile(wall[case], (0.25, 0.75))
        line = {
            "network": network,
            "case": case,
            "step_ms": statistics.median(wall[case]) * 1e3,
            "spread_ms": [float(q) * 1e3 for q in quartiles],
            "processor_ms": statistics.median(processor[case]) * 1e3,
        }
        first = lines[0] if lines else line
        line |= {f"{key}_ratio": line[f"{key}_ms"] / first[f"{key}_ms"] for key in ("step", "processor")}
        lines.append(line)
    return lines


def meta_cost(lines: list[dict[str, Any]], case: str) -> float:
    """Processor time of the meta-gradient, a step of `case` less one without F-reg, as a multiple of the plain step's."""
    times = {line["case"]: line["processor_ms"] for line in lines}
    return (times[case] - times["no_f"]) / times["plain"]


def main() -> None:
    """Measures the chosen networks and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(NETWORKS), nargs="+", default=list(NETWORKS), help="networks")
    parser.add_argument("--unlabeled", type=int, default=0, help="unlabeled examples a batch, 0: the network's own")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case that count")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments = parser.parse_args()
    results, costs = [], {}
    print(f"{'network':8} {'case':7} {'step ms':>9} {'quartiles':>19} {'x plain':>8} {'cpu ms':>9} {'x plain':>8}")
    for network in arguments.only:
        lines = measure(network, arguments.repeats, arguments.unlabeled)
        results += lines
        for r in lines:
            spread = "{:.2f} - {:.2f}".format(*r["spread_ms"])
            print(
                f"{network:8} {r['case']:7} {r['step_ms']:9.2f} {spread:>19} {r['step_ratio']:8.2f} {r['processor_ms']:9.2f} "
                f"{r['processor_ratio']:8.2f}",
                flush=True,
            )
        costs[network] = {case: meta_cost(lines, case) for case in ("direct", "nested")}
        print(f"{network}: the meta-gradient alone, x plain: " + ", ".join(f"{k} {v:.2f}" for k, v in costs[network].items()))
    if arguments.json:
        settings = {"warm_up_runs": 1, "repeats": arguments.repeats, "unlabeled": arguments.unlabeled}
        text = json.dumps({**provenance(), **settings, "results": results, "meta_gradient_x_plain": costs}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
