"""What a client of each method computes and sends in a round, counted in its own program: FedLabel's Table 5.

    python -m benchmarks.costs --json=benchmarks/results/costs_<machine>.json

Five clients that all take part have half of their digits labeled; an epoch is one labeled and one unlabeled batch of n. B is n
examples that go back through a network, P n that go forward less those that go back, and R what a model's parameters take.
FedDure goes forward 8 times and back 6 times, twice through one pass. Padding counts. Seconds are a client's share of a round.
"""

from typing import Any

from benchmarks import harness
from benchmarks.harness import Result, Rows
from benchmarks.programs import Session

CLIENTS, WARM_UP, ROUNDS, BATCH = 5, 2, 6, 144  # n: half of a client's 287 or 288 training digits
# What FedLabel's Table 5 has, h being the number of helpers; its R is down and up together.
PAPER = {"fedtrinet": "3P + 2B, 2R, 7.81 s", "fedmatch": "(h+1)P + 2B, (2+h)R, 11.24 s", "fedlabel": "2P + 2B, 2R, 3.76 s"}
SETTING: dict[str, Any] = {
    "rounds": ROUNDS, "cohort_size": CLIENTS, "eval_every": ROUNDS, "data.num_clients": CLIENTS,
    "data.labeled_fraction": (0.5,), "client.batch_size": BATCH, "client.epochs": 1, "execution.batch_size": BATCH,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    # Networks that stay as they are leave some examples without a label: the others pass through none of the three any more.
    "fedtrinet": {"method.labeled_rounds": 1, "client.optimizer.learning_rate": 1e-6, "model.norm": "static"},
    "fedsem": {"method.labeled_rounds": 1},
    "fedmatch": {"method.helper_period": 1, "method.unlabeled_batch_size": BATCH},
    "fedlabel": {"client.epochs": 0, "client.steps": 1, "method.unlabeled_steps": 1},
    "feddure": {"method.unlabeled_batch_size": BATCH},
}
METHODS = ("fedavg", "fedprox", "fixmatch", "uda", "fedmatch", "fedsem", "fedtrinet")
METHODS += ("fedsiam_pi", "fedsiam_mt", "fedsiam_d", "fedlabel", "feddure")
HEAD = ("method", "P", "B", "R down", "R up", "s (quartiles)", "FedLabel's Table 5")


def rows(one: Result) -> Rows:
    """A method's row of the table."""
    numbers = [f"{one[key]:.2f}" for key in ("P", "B", "R_down", "R_up")]
    share = one | {"seconds": one["seconds"] / CLIENTS, "quartiles": [end / CLIENTS for end in one["quartiles"]]}
    method = one["case"]["method"]
    return [[method, *numbers, harness.between(share, "seconds", "quartiles"), PAPER.get(method, "")]]


def measure(method: str) -> Result:
    """A method's costs, per client and round, over all rounds but the first two."""
    from configs import digits

    config = digits.get_config(f"{method},labels_at=clients")
    config.update_from_flattened_dict(SETTING | OWN.get(method, {}))
    session = Session()
    session.build(config.to_dict())
    found, about = session.rounds(ROUNDS), session.about()

    def each(key: str, unit: int) -> float:
        return (found[-1][key] - found[WARM_UP - 1][key]) / (ROUNDS - WARM_UP) / CLIENTS / unit

    forward, backward = each("cost/forward_passes", BATCH), each("cost/backward_passes", BATCH)
    model = 4 * about["num_params"]
    return {
        "case": {"method": method}, "P": forward - backward, "B": backward,
        "R_down": each("comm/bytes_down", model), "R_up": each("comm/bytes_up", model),
        **harness.spread([row["time/round_s"] for row in found[WARM_UP:]]),
        "device": about["device"],
    }  # fmt: skip


if __name__ == "__main__":
    arguments = harness.parser(__doc__).parse_args()
    harness.collect(arguments.json, map(measure, METHODS), rows, f"{WARM_UP} rounds")
