"""What a client of each method computes and sends in a round, counted in its own program: FedLabel's Table 5.

    python -m benchmarks.costs [--methods=fedtrinet,fedmatch,fedlabel] [--json=FILE]

Five clients that all take part hold half of their digits labeled; an epoch goes once through the labeled ones and once through
the others, each one batch of n. B is n examples that go back through a network, P n that go forward less those that go back,
and R what a model's parameters take. So P is what nothing is learned from, but for FedDure: of its 8 passes forward three lead
to no way back (the tangent, and the two losses whose difference is the reward), and through a fourth it goes back twice, 6 in
all; P is 2.

Where the paper's numbers differ: FedLabel takes a step on labels and one on the others, whose KL goes back through the plain
view too, its third B. FedTriNet, in its second phase as FedSem is, has the fine-tuning of its joined network for a third B; its
3P are a round's in which some examples have no label yet. FedMatch has its helpers in every round here, as in the paper's
table, and not in every tenth; its third B, too, is the plain view's, for its consistency with them; both of its parts travel
whole, down and up. Padding of batches counts. Seconds are of a round of all clients, without compilation, the median, in the
file with quartiles, of all rounds but the first two.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.spread import quartiles
from configs import digits
from fedjax_ssl.experiment.build import build

CLIENTS, WARM_UP, ROUNDS, BATCH = 5, 2, 6, 144  # n: half of a client's 287 or 288 training digits
PAPER = {"fedtrinet": "3P + 2B, 2R", "fedmatch": "(h+1)P + 2B, (2+h)R", "fedlabel": "2P + 2B, 2R"}
"""What FedLabel's Table 5 has, h being the number of helpers; its R is down and up together."""
SETTING: dict[str, Any] = {
    "rounds": ROUNDS, "cohort_size": CLIENTS, "eval_every": ROUNDS,
    "data.num_clients": CLIENTS, "data.labeled_fraction": (0.5,), "client.batch_size": BATCH,
    "client.epochs": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    # Networks that stay as they are leave some examples without a label: the others pass through none of the three any more.
    "fedtrinet": {"method.labeled_rounds": 1, "client.optimizer.learning_rate": 1e-6, "model.norm": "static"},
    "fedsem": {"method.labeled_rounds": 1},
    "fedmatch": {"method.helper_period": 1, "method.unlabeled_batch_size": BATCH},
    "fedlabel": {"client.epochs": 0, "client.steps": 1, "method.unlabeled_steps": 1},
    "feddure": {"method.unlabeled_batch_size": BATCH},
}
METHODS = (
    *("fedavg", "fedprox", "fixmatch", "uda", "fedmatch", "fedsem", "fedtrinet"),
    *("fedsiam_pi", "fedsiam_mt", "fedsiam_d", "fedlabel", "feddure"),
)


def measure(method: str) -> dict[str, Any]:
    """The table's line of a method: per client and round, over all rounds but the first two."""
    config = digits.get_config(f"{method},labels_at=clients")
    config.update_from_flattened_dict(SETTING | OWN.get(method, {}))
    experiment = build(config)
    rows = [row for _, row in experiment.rounds()]
    size = 4 * experiment.num_params

    def each(key: str, unit: int) -> float:
        return (rows[-1][key] - rows[WARM_UP - 1][key]) / (len(rows) - WARM_UP) / CLIENTS / unit

    low, median, high = quartiles(row["time/round_s"] for row in rows[WARM_UP:])
    forward, backward = each("cost/forward_passes", BATCH), each("cost/backward_passes", BATCH)
    return {
        "method": method,
        "P": forward - backward,
        "B": backward,
        "R_down": each("comm/bytes_down", size),
        "R_up": each("comm/bytes_up", size),
        "round_s": median,
        "quartiles_s": [low, high],
        "paper": PAPER.get(method, ""),
    }


def main() -> None:
    """Prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments = parser.parse_args()
    results = []
    print("| method | P | B | R down | R up | s a round | the paper |\n|---|---|---|---|---|---|---|")
    for method in arguments.methods.split(","):
        results.append(line := measure(method))
        numbers = " | ".join(f"{line[key]:.2f}" for key in ("P", "B", "R_down", "R_up", "round_s"))
        print(f"| {method} | {numbers} | {line['paper']} |", flush=True)
    if arguments.json:
        settings = {"warm_up_rounds": WARM_UP, "timed_rounds": ROUNDS - WARM_UP}
        arguments.json.write_text(json.dumps({**provenance(), **settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
