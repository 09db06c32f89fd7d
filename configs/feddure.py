"""FedDure's setting, which its three config files share."""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from configs.splits import SPLITS
from fedjax_ssl.methods.feddure import own_batch_size

CLIENTS = 100
# Word -> method, and what it sets: FedDure with its two ablations (Table 2), and what Table 1 compares it with. `_sl` trains on
# all labels.
WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "feddure": ("feddure", {}),
    "no_c_reg": ("feddure", {"method.regulators": "no_c"}),
    "no_f_reg": ("feddure", {"method.regulators": "no_f"}),
    "fedavg": ("fedavg", {}),
    "fedavg_sl": ("fedavg", {"data.reveal_labels": True}),
    "fedprox": ("fedprox", {}),
    "fedprox_sl": ("fedprox", {"data.reveal_labels": True}),
    "uda": ("uda", {}),
    "fedprox_uda": ("uda", {"method.prox_mu": 0.01}),
    "fixmatch": ("fixmatch", common.LOCAL_FIXMATCH),
    "fedprox_fixmatch": ("fixmatch", common.LOCAL_FIXMATCH | {"method.prox_mu": 0.01}),
    "fedmatch": ("fedmatch", common.FEDMATCH_AT_CLIENTS),
}
WORDS |= {name: (name, {}) for name in common.LABELS_AT_CLIENTS if name not in WORDS}


def make(argument: str | None, dataset: str, examples: int) -> ConfigDict:
    """A config of FedDure's setting: ResNet-9, 100 clients, 5 a round, 200 rounds of one local epoch, batch 10, Adam 5e-4.

    Batch-norm statistics are averaged with the weights. Methods with an unlabeled batch size of their own get that which
    FedDure's rule gives where all clients have as many examples. FedSem and FedTriNet have a first phase of 120 and 80 rounds.

    `dir_dir` leaves every client 10 examples or more, labeled and unlabeled apart, as the released code does. A mean of less
    than 20 labels, such as the 10 of 2 % of CIFAR-10, cannot be drawn so, or hardly: every client then has at least one.

    Args:
        argument: `word,split=iid_iid,gamma=0.5,clients=5,labels=5000`, all optional: one of WORDS; the split of labeled and of
            unlabeled examples, `iid_iid`, `iid_dir` or `dir_dir`; Dirichlet's concentration; clients a round; labeled examples
            in all, class-balanced.
        dataset: a name that `fedjax_ssl.data.sources.load` takes.
        examples: its training examples.
    """
    word, given = common.parse(argument, tuple(WORDS), split="iid_iid", gamma="0.5", clients="5", labels="5000")
    name, own = WORDS[word]
    if (split := f"feddure_{given['split']}") not in SPLITS:
        raise ValueError(f"the config's argument split: got {given['split']!r}, accepted: iid_iid, iid_dir, dir_dir")
    config = common.base(name, "resnet9", variant="feddure", norm="running")
    config.data.update(SPLITS[split], name=dataset, num_clients=CLIENTS, num_labels=common.number("labels", given["labels"]))
    config.data.update(
        weak="flip_crop4", strong="randaugment_mc", labeled="feddure", alpha=common.real("gamma", given["gamma"])
    )
    if given["split"] == "dir_dir" and config.data.num_labels < 2 * config.data.min_size * CLIENTS:
        config.data.min_size = 1
    config.client.update(batch_size=10, epochs=1)
    config.client.optimizer.update(name="adam", learning_rate=5e-4, schedule="constant", weight_decay=0.0, persistent=False)
    config.server.update(momentum=0.0, pretrain=0)
    config.rounds, config.cohort_size, config.checkpoint_every = 200, common.number("clients", given["clients"]), 50
    if name != "feddure" and "unlabeled_batch_size" in config.method:
        labels = config.data.num_labels
        each = own_batch_size(labels // CLIENTS, (examples - labels) // CLIENTS, config.client.batch_size)
        config.method.unlabeled_batch_size = int(each)
    config.update_from_flattened_dict(own)
    return config
