"""Every method on scikit-learn's bundled digits: 20 clients, 5 a round, 40 rounds. Ours, not a paper's.

    python -m launch.run --config=digits:fl2
    python -m launch.run --config=digits:fixmatch,labels=10,split=dir0.3
    python -m launch.run --config=digits:fixmatch,labels_at=clients
    python -m launch.run --config=digits:fixmatch,labels_at=some_clients

At the server `labels=` is 40 by default. At the clients 10 % of each client's examples are labeled, or `labels=` in all, which
are balanced and split apart; `split=dirdir` splits labeled and unlabeled examples by a Dirichlet draw each. With
`labels_at=some_clients` all examples of four clients are labeled, and those of the others are not. FedAvg, FedAvg++ and
FedProx, whose clients train on labels, know all of them where `labels_at=server`.

Expected test accuracy: benchmarks/digits.md; seeds and processors differ much. Run time: at most four minutes
for three seeds on two CPU cores.
"""

from typing import Any

from fedjax_ssl.methods import METHODS

from . import common
from .common import ConfigDict

CENTRAL: dict[str, Any] = {
    "server.training.epochs": 0, "server.training.steps": 25, "server.training.batch_size": 16,
    "server.training.optimizer.schedule": "cosine_7_16", "server.training.optimizer.decay": "kernels",
    "server.training.optimizer.clip_norm": 0.0, "method.ema_decay": 0.98, "model.norm": "running",
}  # fmt: skip
"""On pooled data: 1,000 steps instead of 2^20, so averages have to follow faster."""

SETTINGS: dict[str, dict[str, Any]] = {
    "fl2": {"method.batches": "accepted", "server.training.pretrain": common.fl2_pretrainings("digits", 40)},
    "fedcon": {
        "server.training.pretrain": 1, "client.optimizer.learning_rate": 0.3, "server.training.optimizer.learning_rate": 0.1,
    },
    "fedmatch": common.FEDMATCH_AT_LARGE_RATES | {"server.training.pretrain": 1},
    "fixmatch": {"method.batches": "accepted"},
    "semifl": {"server.static_norm.data": "all"},
    "fedsiam_d": {"method.pi_rounds": 0.075},
    "supervised": {"server.static_norm.data": "labeled"},
    "feddure": {
        "data.labels_at": "clients", "method.eta_s": 1e-2, "method.eta_w": 1e-2, "client.optimizer.name": "adam",
        "client.optimizer.learning_rate": 3e-3, "client.optimizer.weight_decay": 0.0, "client.optimizer.persistent": False,
    },
    "fedavg": {"data.labels_at": "clients", "data.labeled": "none"},
    "fedavg_pp": {"data.labels_at": "clients"},
    "fedprox": {"data.labels_at": "clients", "data.labeled": "none"},
    # As in their papers, these two train on plain labeled images: networks trained on crops alone label plain images badly.
    "fedsem": {"data.labels_at": "clients", "data.labeled": "none", "method.labeled_rounds": 0.5},
    "fedtrinet": {"data.labels_at": "clients", "data.labeled": "none", "method.labeled_rounds": 0.375, "model.norm": "running"},
    # A client's own network labels its data, so it needs batch-norm statistics of its own.
    "fedlabel": {"data.labels_at": "clients", "client.epochs": 0, "client.steps": 10, "model.norm": "running"},
    "sage": {"data.labels_at": "clients", "data.exclude_labeled": False},
    **{name: {"data.labels_at": "some_clients"} for name in common.LABELS_AT_SOME_CLIENTS},
    "twinsight": {"data.labels_at": "some_clients", "method.smallest_threshold": 0.9, "method.largest_threshold": 0.95},
    "feddb": {"data.labels_at": "clients", "data.exclude_labeled": False, "method.unlabeled_batch_size": 80},
    "freematch_central": CENTRAL | {"method.threshold_decay": 0.98},
    "fixmatch_central": CENTRAL,
}  # fmt: skip
"""What each method has of its own; the first is the default."""

LEARNING_RATES: dict[str, dict[str, float]] = {
    "server": {
        "semifl": 0.1, "fedmatch": 0.1, "fedsiam_pi": 0.1, "supervised": 0.1, "freematch_central": 0.1,
        "fedsiam_mt": 0.3, "fedsiam_d": 0.3, "fixmatch_central": 0.3,
    },
    "clients": {
        "fedavg_pp": 0.1, "fixmatch": 0.1, "fedmatch": 0.1, "fedtrinet": 0.1, "freematch": 0.1, "sage": 0.1, "uda": 0.3,
        "fedsem": 0.3, "fedsiam_mt": 0.3, "fedsiam_d": 0.3, "feddb": 0.3,
    },
    "some_clients": {"fedavg": 0.1, "fixmatch": 0.1, "freematch": 0.1, "uda": 0.1, "fedmatch": 0.1, "twinsight": 0.1},
}  # fmt: skip
"""Where the labels are -> method -> learning rate of clients and server, where it is not .03. Chosen once, at a seed of its own
(`benchmarks/results/digits_rates.json`), (FL)^2's without pretraining; FixMatch with labels at the server has (FL)^2's."""


def get_config(argument: str | None = None) -> ConfigDict:
    methods = (*SETTINGS, *(name for name in METHODS if name not in SETTINGS))  # also those that were registered
    method, given = common.parse(argument, methods, labels="", split="iid", labels_at="")
    labels, apart = given["labels"], given["split"] == "dirdir"
    config = common.base(method, "cnn", width=32)
    own = SETTINGS.get(method, {})
    data = config.data
    data.name = "digits"
    data.labels_at = given["labels_at"] or own.get("data.labels_at", data.labels_at)
    config.rounds, config.eval_every = 40, 2
    if method not in common.WITHOUT_CLIENTS:
        data.num_clients, config.cohort_size = 20, 5
    if data.labels_at == "server" and method not in common.WITHOUT_PRETRAINING:
        config.server.training.pretrain = 0
    for training in common.trainings(config):
        training.optimizer.update(schedule="constant", clip_norm=1.0)
    config.update_from_flattened_dict({key: value for key, value in own.items() if key != "data.labels_at"})

    data.reveal_labels = data.labels_at == "server" and method in common.ON_ALL_LABELS
    if apart:
        data.update(labeled_partition="dirichlet", unlabeled_partition="dirichlet", alpha=0.5)
    else:
        common.set_split(config, given["split"], others="dirdir, ")
    if data.labels_at == "server":
        data.num_labels = common.number("labels", labels or "40")
    elif data.labels_at == "some_clients":
        if labels or apart:
            got = f"labels={labels}" if labels else "split=dirdir"
            raise ValueError(f"the config's argument: got {got} with labels_at=some_clients, accepted: without it")
        data.labeled_clients = (0.2,)
    elif labels or apart:
        data.num_labels, data.min_size = common.number("labels", labels or "140"), 1
    else:
        data.labeled_fraction = (0.1,)

    if rate := LEARNING_RATES[data.labels_at].get(method):
        for training in common.trainings(config):
            training.optimizer.learning_rate = rate
    if data.labels_at != "server":
        config.update_from_flattened_dict(common.AT_CLIENTS.get(method, {}))
    return config
