"""FedDure's setting, which its three config files share."""

from typing import Any

from fedjax_ssl.methods.feddure import client_batch_size

from . import common
from .common import ConfigDict
from .splits import SPLITS

WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "feddure": ("feddure", {}),
    "no_c_reg": ("feddure", {"method.regulators": "no_c"}),
    "no_f_reg": ("feddure", {"method.regulators": "no_f"}),
    "fedavg_sl": ("fedavg", {"data.reveal_labels": True}),
    "fedprox_sl": ("fedprox", {"data.reveal_labels": True}),
    "fedprox_uda": ("uda", {"method.prox_mu": 0.01}),
    "fedprox_fixmatch": ("fixmatch", {"method.prox_mu": 0.01}),
}
WORDS |= {name: (name, {}) for name in common.LABELS_AT_CLIENTS if name not in WORDS}
"""First word -> method and what it sets: FedDure and its ablations (Table 2), then other methods (Table 1 and more)."""


def make(argument: str | None, dataset: str, examples: int) -> ConfigDict:
    """FedDure's setting for a dataset of so many training examples: ResNet-9, 200 rounds of 5 of 100 clients, Adam 5e-4.

    The argument is one of WORDS, then `split` of labeled and of unlabeled examples (`iid_iid`, `iid_dir`, `dir_dir`), `gamma`
    (Dirichlet's alpha), `clients` (a round), `labels` (in all, class-balanced) and `batch`, what "batch size 10" means for
    unlabeled examples: 10 in a step (`paper`), or by the code's rule about as many batches as labeled ones, so that an epoch
    goes through all of them (`released`). Other methods with an unlabeled batch size then get that of a client of mean size.
    """
    keys = {"split": "iid_iid", "gamma": "0.5", "clients": "5", "labels": "5000", "batch": "released"}
    word, given = common.parse(argument, tuple(WORDS), has_small=True, **keys)
    if given["clients"] != keys["clients"] and common.is_small(argument):
        raise ValueError(f"the config's argument clients: got {given['clients']!r} with small, accepted: without it")
    method, own = WORDS[word]
    split = common.one_of("split", given["split"], ("iid_iid", "iid_dir", "dir_dir"))
    labels = common.number("labels", given["labels"])
    config = common.base(method, "resnet9", variant="feddure", norm="running")
    config.rounds, config.cohort_size, config.checkpoint_every = 200, common.number("clients", given["clients"]), 50
    config.data.update(SPLITS[f"feddure_{split}"], name=dataset, num_clients=100, num_labels=labels)
    config.data.update(weak="flip_crop4", strong="randaugment_mc", labeled="feddure")
    gamma = common.real("gamma", given["gamma"])
    if split != "iid_iid":
        config.data.alpha = gamma
    if split == "dir_dir" and labels < 20 * 100:
        config.data.min_size = 1  # of fewer than 20 labels a client, no draw leaves each client the 10 of the released code
    config.client.update(batch_size=10, epochs=1)
    config.client.optimizer.update(name="adam", learning_rate=5e-4, schedule="constant", weight_decay=0.0, persistent=False)
    config.server.optimizer.momentum = 0.0
    is_paper = common.one_of("batch", given["batch"], ("paper", "released")) == "paper"
    has_size = "unlabeled_batch_size" in config.method
    if is_paper and not has_size:
        raise ValueError(f"the config's argument batch: got 'paper' with {word}, which has no such batches, accepted: released")
    if is_paper:
        config.method.unlabeled_batch_size = 10
    elif has_size and method != "feddure":
        own_labels, own_others = (number // config.data.num_clients for number in (labels, examples - labels))
        config.method.unlabeled_batch_size = int(client_batch_size(own_labels, own_others, 10))
    config.update_from_flattened_dict(common.AT_CLIENTS.get(method, {}) | own)
    return common.sized(common.without_unread_views(config), argument)
