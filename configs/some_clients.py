"""The settings of CBAFed and of Twin-sight, labels at some clients, which their config files share."""

from typing import Any

from . import common
from .common import ConfigDict

OTHERS = ("fedavg", "fedprox", "fixmatch", "freematch", "uda")
"""Other methods that run there; FedAvg and FedProx train on the labeled clients alone, or as `_sl` on all labels of all."""
WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*common.LABELS_AT_SOME_CLIENTS, *OTHERS)},
    **{f"{name}_sl": (name, {"data.reveal_labels": True}) for name in ("fedavg", "fedprox")},
    **{f"fedprox_{name}": (name, {"method.prox_mu": 0.01}) for name in ("fixmatch", "freematch")},
}


def cbafed(argument: str | None, dataset: str, *, largest: float, warm_up: int, rounds: int) -> ConfigDict:
    """The benchmark of 1 labeled and 9 unlabeled clients, which all take part in each round: ResNet-18, Dirichlet .8.

    The argument is a method. `warm_up` rounds of the labeled client alone come before as many `rounds` as there are.
    CBAFed's labeled client trains for 11 epochs, others' for one.
    """
    config, method = _base(argument, dataset, ("cbafed", "rscfed"), labeled=1, alpha=0.8)
    config.rounds, config.cohort_size = warm_up + rounds, 10
    config.data.update(weak="enlarged_crop")
    training: dict[str, Any] = {"learning_rate": 0.03, "weight_decay": 5e-4, "clip_norm": 5.0}
    config.client.optimizer.update(**training)
    config.client.unlabeled_rate = 2 / 3 if method != "rscfed" else 0.7
    if method == "cbafed":
        config.client.update(epochs=11, unlabeled_epochs=1)
        config.method.largest_threshold = largest
    if method not in common.ON_ALL_LABELS:
        config.client.unlabeled_wait = warm_up
    return common.sized(common.without_unread_views(config), argument)


def twinsight(argument: str | None, dataset: str, *, colors: bool = False, same_views: bool = False) -> ConfigDict:
    """4 labeled and 6 unlabeled clients, 5 of them a round: ResNet-18, Dirichlet .1, 500 rounds of one epoch.

    The argument is twinsight, `released`, or another method. Both views are SimCLR's with `colors`, or the weak one with
    `same_views`; such images are not normalized.
    """
    config, method = _base(argument, dataset, ("twinsight", "released"), labeled=4, alpha=0.1)
    config.rounds, config.cohort_size = 500, 5
    config.data.update(weak="simclr" if colors else "flip_zero_crop4", strong="none" if colors or same_views else "usb")
    if colors or same_views:
        config.data.update(mean=(0.0,), std=(1.0,))
    if dataset == "fashion_mnist":
        config.data.image_size = 32  # padded; the code resizes
    config.client.optimizer.update(learning_rate=0.01, weight_decay=1e-4, clip_norm=0.0)
    if method == "twinsight" and dataset == "svhn_cropped":
        config.method.update(smallest_threshold=0.9, largest_threshold=0.95)
    return common.sized(common.without_unread_views(config), argument)


def _base(argument: str | None, dataset: str, first: tuple[str, ...], *, labeled: int, alpha: float) -> tuple[ConfigDict, str]:
    """What both settings have, and the method's name."""
    released = {"method.pseudo_weight": 0.0, "method.neighborhood_divisor": "released"}
    words = {"released": ("twinsight", released)} | WORDS
    word, _ = common.parse(argument, tuple(dict.fromkeys((*first, *WORDS))), has_small=True)
    method, own = words[word]
    config = common.base(method, "resnet", depth=18, norm="running")
    config.checkpoint_every = 50
    config.data.update(name=dataset, num_clients=10, labels_at="some_clients", labeled_clients=(float(labeled),))
    config.data.update(partition="dirichlet", alpha=alpha)
    config.client.update(batch_size=64, epochs=1)
    config.client.optimizer.update(schedule="constant", momentum=0.9, nesterov=False)
    config.server.optimizer.momentum = 0.0
    config.update_from_flattened_dict(common.AT_CLIENTS.get(method, {}) | own)
    return config, method
