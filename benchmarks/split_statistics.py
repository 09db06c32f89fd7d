"""What the papers' Dirichlet splits give on CIFAR-10's labels, over many seeds: the table in the README.

    python -m benchmarks.split_statistics --data_dir=DIR [--seeds=100] [--json=benchmarks/results/split_statistics.json]

Prints, for each split of 100 clients, the mean over seeds of its smallest, median and largest client and of the classes that a
client holds, with the range of the first and the last. Run time: 2 minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

import numpy as np

from benchmarks.provenance import provenance
from configs import splits
from fedjax_ssl.data import sources, split
from fedjax_ssl.data.partition import summary
from fedjax_ssl.experiment.settings import Settings

SHOWN = ("fl2_dir0.1", "fl2_dir0.3", "feddure_dir_dir", "fedlabel_20")


def main() -> None:
    """Prints one line per split and kind of examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="TFDS folder with cifar10")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments = parser.parse_args()
    labels = sources.load("cifar10", data_dir=arguments.data_dir).train_labels
    results = []
    print(f"{'split':18}{'examples':12}{'smallest':>20}{'median':>9}{'largest':>24}{'classes':>9}")
    for name in SHOWN:
        settings = Settings.from_dict(splits.get_config(name).to_dict())
        how = split.Split(**{field.name: getattr(settings.data, field.name) for field in dataclasses.fields(split.Split)})
        drawn = [split.draw(labels, 10, how, seed) for seed in range(arguments.seeds)]
        kinds = ("labeled", "unlabeled") if how.labels_at == "clients" else ("unlabeled",)
        for kind in kinds:
            counts = np.array([summary(getattr(holdings, kind), labels, 10).histogram for holdings in drawn])
            sizes = counts.sum(2)
            ends = {"smallest": sizes.min(1), "largest": sizes.max(1)}  # of each seed
            found = {key: (x.mean(), int(x.min()), int(x.max())) for key, x in ends.items()}
            found |= {"median": np.median(sizes, 1).mean(), "classes": (counts > 0).sum(2).mean()}
            results.append({"split": name, "examples": kind, **found})
            smallest, largest = ("{:.0f} ({} to {})".format(*found[key]) for key in ("smallest", "largest"))
            print(f"{name:18}{kind:12}{smallest:>20}{found['median']:9.0f}{largest:>24}{found['classes']:9.2f}", flush=True)
    if arguments.json:
        about = {**provenance(), "seeds": arguments.seeds, "mean_least_most": ["smallest", "largest"]}
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
