"""SAGE's setting, which its four config files share."""

from . import common
from .common import ConfigDict


def make(argument: str | None, dataset: str, *, per_class: int, steps: int, rounds: int) -> ConfigDict:
    """SAGE's setting for a dataset: ResNet-8, 8 of 20 clients a round, SGD .1; labels of each class at all clients together.

    The argument is sage or another method, then `split`: dirichlet over all clients, or the released code's `pairs`, with its
    `alpha`; 0 is iid. The code's 5 epochs are as many steps as a client's examples, labeled ones included, have batches of 128.
    """
    keys = {"split": "dirichlet", "alpha": "1"}
    words = ("sage", *(name for name in common.LABELS_AT_CLIENTS if name != "sage"))
    method, given = common.parse(argument, words, has_small=True, **keys)
    config = common.base(method, "resnet", depth=8, initialization="kaiming", norm="running")
    config.rounds, config.cohort_size, config.checkpoint_every = rounds, 8, 50
    alpha, split = (
        common.real("alpha", given["alpha"], zero=True),
        common.one_of("split", given["split"], ("dirichlet", "pairs")),
    )
    data = config.data
    data.update(name=dataset, num_clients=20, labels_at="clients", exclude_labeled=False)
    data.num_labels = per_class * (100 if dataset == "cifar100" else 10)
    if alpha:
        data.update(partition="dirichlet" if split == "dirichlet" else "dirichlet_pairs", alpha=alpha)
    data.update(weak="flip_crop4", strong="randaugment_mc")
    config.client.update(batch_size=128, epochs=0, steps=steps)
    own = {"learning_rate": 0.1, "schedule": "constant", "nesterov": False, "weight_decay": 1e-4, "persistent": False}
    config.client.optimizer.update(clip_norm=0.0, **own)
    config.server.optimizer.momentum = 0.0
    if "unlabeled_batch_size" in config.method:
        config.method.unlabeled_batch_size = 256
    config.update_from_flattened_dict(common.AT_CLIENTS.get(method, {}))
    return common.sized(common.without_unread_views(config), argument)
