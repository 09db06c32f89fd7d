"""FedSiam's setting, which its three config files share."""

from typing import Any

from fedjax_ssl.methods import METHODS

from . import common
from .common import ConfigDict, one_of
from .splits import SPLITS

FEDSIAM = {"d": "fedsiam_d", "mt": "fedsiam_mt", "pi": "fedsiam_pi", "no_siamese": "fedsiam_pi"}
"""First words for FedSiam itself; every other method runs in the same setting (Table 2)."""
CONTROL = "fedavg_repeated"
"""First word for FedAvg with FedSiam's optimizer and as many passes over labels: what FedSiam adds to these."""
DATA: dict[str, dict[str, dict[str, Any]]] = {
    "clients": {name: SPLITS[f"fedsiam_{name}"] for name in ("iid", "noniid1", "noniid2", "noniid3")},
    "server": {"iid": {"partition": "iid"}, "noniid": SPLITS["fedsiam_server_noniid"]},
}
"""Where the labels are -> split -> what it sets under `data`."""


def make(argument: str | None, dataset: str, model: str, *, server_rounds: int, curve: str, kl: bool = False) -> ConfigDict:
    """FedSiam's setting (Tables 2 and 4): 10 of 100 clients a round, SGD .01 with momentum .9 and weight decay 1e-4.

    Labels at the clients: 50 rounds of 5 local epochs, batch 10. At the server: `server_rounds` rounds of one local epoch,
    batch 100, and one epoch of the server, batch 10. The argument is `word,labels_at=clients,gamma=.1,split=iid,variant=paper`,
    and D's `curve`, and `small`. With `kl` J is KL and not the squared error in non-IID splits (released: all but Non-IID-I).
    """
    words = (*FEDSIAM, *(name for name in METHODS if name not in FEDSIAM.values()), CONTROL)
    keys = {"labels_at": "clients", "gamma": "0.1", "split": "iid", "variant": "paper", "curve": curve}
    word, given = common.parse(argument, words, has_small=True, **keys)
    at = one_of("labels_at", given["labels_at"], DATA)
    released = one_of("variant", given["variant"], ("paper", "released")) == "released"
    split = one_of("split", given["split"], DATA[at])
    of_curve = one_of("curve", given["curve"], ("linear", "rectangle"))
    gamma = common.real("gamma", given["gamma"], maximum=1)
    _check(word, words, given, curve)

    method = "fedavg" if word == CONTROL else FEDSIAM.get(word, word)
    config = common.base(method, model, variant=given["variant"], **common.running_norm(model))
    of_split = SPLITS[f"fedsiam_{split}_released"] if released else DATA[at][split]
    config.data.update(of_split, name=dataset, weak="fedsiam", strong="fedsiam")
    if split != "noniid3":
        config.data.labeled_fraction = (gamma,)
    for training in common.trainings(config):
        training.optimizer.update(learning_rate=0.01, schedule="constant", nesterov=False, weight_decay=1e-4, persistent=False)
    config.server.optimizer.momentum = 0.0
    if at == "server":
        config.server.training.update(pretrain=0, epochs=1)
    lengths = {"clients": (50, 5, 10, 1), "server": (server_rounds, 1, 100, 5)}
    config.rounds, config.client.epochs, config.client.batch_size, config.eval_every = lengths[at]

    # How often the released code goes through labeled data in an epoch; in Non-IID-III where less than 40 % is labeled.
    by_gamma = {"labeled_repeats": {0.1: 3, 0.15: 2, 0.2: 2}.get(gamma, 1)}
    repeats = {"labeled_repeats": 6, "repeats_below": 0.4} if split == "noniid3" else by_gamma
    own = {"consistency_weight": 0.0 if word == "no_siamese" else 1.0, "curve": of_curve}
    own["consistency"] = "kl" if kl and split != ("noniid1" if released else "iid") else "mse"
    # The rectangle is rounds 10 to 40 of 50, as shares of all.
    own |= {"pi_rounds": 3 / config.rounds} if of_curve == "linear" else {"pi_rounds": 0.2, "end_round": 0.8}
    if released:
        own |= {"divisor": "batch", "alpha_counts": "epochs", "target_delay": 1, **repeats}
    if word in FEDSIAM:
        config.method.update({key: value for key, value in own.items() if key in config.method})
    else:
        _set_other_method(config, word, released, repeats)
    return common.without_unread_views(config)


def _check(word: str, words: tuple[str, ...], given: dict[str, str], curve: str) -> None:
    """ValueError for parts of an argument that do not go together; `curve` is the dataset's own."""
    at, split = given["labels_at"], given["split"]
    if given["curve"] != curve and word != "d":
        raise ValueError(f"the config's argument curve: got {given['curve']!r} with {word}, accepted: d's alone")
    at_clients = [other for other in words if FEDSIAM.get(other, other) in (*common.LABELS_AT_CLIENTS, CONTROL)]
    if at == "clients" and word not in at_clients:
        raise ValueError(f"the config's argument: got {word!r} with labels_at=clients, accepted: {', '.join(at_clients)}")
    if given["variant"] == "released" and at == "server":  # there its clients do not use their data
        raise ValueError("the config's argument variant: got 'released' with labels_at=server, accepted: paper")
    if split == "noniid3" and float(given["gamma"]) != 0.1:
        raise ValueError(f"the config's argument gamma: got {given['gamma']!r} with split=noniid3, accepted: 0.1")


def _set_other_method(config: ConfigDict, method: str, released: bool, repeats: dict[str, Any]) -> None:
    """Sets what a method that is compared with FedSiam has of its own."""
    at_clients = config.data.labels_at == "clients"
    if method in ("fedavg", CONTROL):
        config.data.labeled = "none"
    if method == "fedmatch":  # with FixMatch's threshold, and clipped, as some seeds diverge without
        config.update_from_flattened_dict(common.FEDMATCH_AT_LARGE_RATES)
        config.method.confidence = 0.95
        for training in common.trainings(config):
            training.optimizer.clip_norm = 1.0
    if at_clients or method == "fixmatch":
        config.update_from_flattened_dict(common.AT_CLIENTS.get(method, {}))
    if at_clients and method in ("fixmatch", "uda"):
        config.method.unlabeled_batch_size = 7 * config.client.batch_size  # as published; the paper does not say
    if not released:
        return
    if method in ("fedavg", "fedavg_pp", "fedprox", "fedsem"):
        config.client.optimizer.update(momentum=0.5, weight_decay=0.0)
    if "labeled_repeats" in config.method and method != "fedavg":  # FedAvg goes through labeled data once
        config.method.update(repeats)
    elif method in ("feddure", "fedlabel") and "repeats_below" not in repeats:  # more epochs go through them as often
        config.client.epochs *= repeats["labeled_repeats"]
