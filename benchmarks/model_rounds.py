"""Four rounds of training for every network of the papers, on real images: time, peak memory, and whether the loss falls.

    python -m benchmarks.model_rounds --data_dir=DIR [--json=benchmarks/results/model_rounds.json] [--only=resnet,cnn]

The method `supervised`: 100 labels at the server, two epochs a round in batches of 20, SGD .01 with momentum .9, static batch
norm over the labels; CIFAR-10, or MNIST for the small ones. Each in a process of its own; peak memory is that of the whole
process, data and compilation included, the time of a round the median, with quartiles, of all rounds but the first. Exit status
1 where the loss, a mean over a round's steps, did not fall. Run time: nine minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import resource
import subprocess
import sys
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.spread import quartiles
from launch.command import ask_for_huge_pages

WARM_UP, ROUNDS = 1, 4
NETWORKS = {
    "mnist_cnn": ("mnist", {"name": "mnist_cnn"}),
    "cnn": ("cifar10", {"name": "cnn", "width": 32}),
    "cifar_cnn": ("cifar10", {"name": "cifar_cnn"}),
    "resnet9 feddure": ("cifar10", {"name": "resnet9", "variant": "feddure"}),
    "resnet9 fedmatch": ("cifar10", {"name": "resnet9", "variant": "fedmatch"}),
    "resnet9 semifl": ("cifar10", {"name": "resnet9", "variant": "semifl"}),
    "resnet 18": ("cifar10", {"name": "resnet", "depth": 18}),
    "resnet 34": ("cifar10", {"name": "resnet", "depth": 34}),
    "resnet 50": ("cifar10", {"name": "resnet", "depth": 50}),
    "wide_resnet 28-2": ("cifar10", {"name": "wide_resnet", "depth": 28, "width": 2}),
    "wide_resnet 28-2 bfloat16": ("cifar10", {"name": "wide_resnet", "depth": 28, "width": 2}),
    "wide_resnet 28-8": ("cifar10", {"name": "wide_resnet", "depth": 28, "width": 8}),
    "mlp": ("mnist", {"name": "mlp", "hidden": 64}),
    "linear": ("mnist", {"name": "linear"}),
}


def measure(network: str, data_dir: str) -> dict[str, Any]:
    """Runs the rounds in this process, which does nothing else."""
    from fedjax_ssl import build

    dataset, model = NETWORKS[network]
    optimizer = {"schedule": "constant", "learning_rate": 0.01, "clip_norm": 1.0, "persistent": False}
    experiment = build(
        {
            "method": {"name": "supervised"},
            "model": model,
            "data": {"name": dataset, "data_dir": data_dir, "num_labels": 100},
            "server": {"batch_size": 20, "epochs": 2, "pretrain": 0, "sbn_data": "labeled", "optimizer": optimizer},
            "rounds": ROUNDS + 1,  # the last round is evaluated, on the whole test set: it is not run
            "eval_every": ROUNDS + 1,
            "execution": {"dtype": "bfloat16" if network.endswith("bfloat16") else "float32"},
        }
    )
    rows = [row for _, row in itertools.islice(experiment.rounds(), ROUNDS)]
    low, median, high = quartiles(row["time/round_s"] for row in rows[WARM_UP:])
    return {
        "network": network,
        "dataset": dataset,
        "parameters": experiment.num_params,
        "compile_s": round(rows[-1]["time/compile_s"], 1),
        "round_s": round(median, 3),
        "quartiles_s": [round(low, 3), round(high, 3)],
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "loss": [round(row["server/loss"], 3) for row in rows],
        **experiment.layout._asdict(),
    }


def main() -> None:
    """Prints a table, one network a line, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="TFDS folder with cifar10 and mnist")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--only", default="", help="comma-separated beginnings of network names")
    parser.add_argument("--worker", choices=NETWORKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments.data_dir)))
        return
    results = []
    head = f"{'network':26} {'data':8} {'parameters':>11} {'compile s':>10} {'round s':>8} "
    print(head + f"{'quartiles':>17} {'peak GB':>8}  loss by round")
    for network in NETWORKS:
        if not network.startswith(tuple(arguments.only.split(","))):
            continue
        command = [sys.executable, "-m", "benchmarks.model_rounds", f"--data_dir={arguments.data_dir}", f"--worker={network}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{network}: {done.stderr}")
        r = json.loads(done.stdout.splitlines()[-1])
        results.append(r)
        losses = " ".join(f"{loss:.3f}" for loss in r["loss"])
        spread = "{:.3f} - {:.3f}".format(*r["quartiles_s"])
        print(
            f"{network:26} {r['dataset']:8} {r['parameters']:>11,} {r['compile_s']:>10} {r['round_s']:>8} {spread:>17} "
            f"{r['peak_gb']:>8}  {losses}",
            flush=True,
        )
    if arguments.json:
        settings = {"warm_up_rounds": WARM_UP, "timed_rounds": ROUNDS - WARM_UP}
        arguments.json.write_text(json.dumps({**provenance(), **settings, "results": results}, indent=1) + "\n")
    if stuck := [r["network"] for r in results if not r["loss"][-1] < r["loss"][0]]:
        sys.exit(f"the loss did not fall: {', '.join(stuck)}")


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
