"""FedDB's setting, which its three config files share."""

from . import common
from .common import ConfigDict


def make(argument: str | None, dataset: str, *, labels: int, examples: int) -> ConfigDict:
    """FedDB's setting for a dataset of so many training examples: WRN-28-2, 10 of 100 clients a round, SGD .03, cosine.

    The argument is feddb or another method, then `labels` (in all, class-balanced) and `split`: iid, or dir0.3 and dir0.1,
    which draws labeled and unlabeled examples apart. All of a client's labels are one batch, and its accepted examples another.
    """
    words = ("feddb", *(name for name in common.LABELS_AT_CLIENTS if name != "feddb"))
    method, given = common.parse(argument, words, has_small=True, labels=str(labels), split="iid")
    config = common.base(method, "wide_resnet", depth=28, width=2, norm="running")
    config.rounds, config.cohort_size, config.checkpoint_every = 800, 10, 50
    data, number = config.data, common.number("labels", given["labels"])
    data.update(name=dataset, num_clients=100, labels_at="clients", num_labels=number, exclude_labeled=False)
    common.set_split(config, given["split"])
    if data.partition == "dirichlet":
        data.min_size = 1
    data.update(weak="flip_crop4", strong="semifl")
    config.client.update(batch_size=max(64, number // 100), epochs=5)
    own = {"learning_rate": 0.03, "schedule": "cosine", "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    config.client.optimizer.update(clip_norm=1.0, persistent=True, **own)
    config.server.optimizer.momentum = 0.5
    if "unlabeled_batch_size" in config.method:
        config.method.unlabeled_batch_size = examples // 100
    config.update_from_flattened_dict(common.AT_CLIENTS.get(method, {}))
    return common.sized(common.without_unread_views(config), argument)
