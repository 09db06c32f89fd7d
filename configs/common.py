"""What config files share: the defaults of every key, and the argument after the colon."""

import math
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.local.task import NORM_DEFAULTS
from fedjax_ssl.methods import METHODS, PROX_MU, options_class
from fedjax_ssl.models import default_options


def base(method: str, model: str, **model_options: Any) -> ConfigDict:
    """A config with the defaults of every key, those of a method's and a model's own options among them."""
    config = Settings().to_dict()
    options = options_class(METHODS[method])().model_dump()
    config["method"] = {"name": method, "prox_mu": PROX_MU.get(method, 0.0), **options}
    config["model"] = {"name": model, **NORM_DEFAULTS, **default_options(model), **model_options}
    return ConfigDict(config)


def parse(argument: str | None, positional: Sequence[str], **defaults: str) -> tuple[str, dict[str, str]]:
    """Reads a config file's argument, `word,key=value,...`.

    Args:
        argument: what stands after the colon, or None.
        positional: the accepted first words; the first is the default.
        **defaults: the accepted keys.

    Returns:
        (word, keys and values).

    Raises:
        ValueError: for another word or key.
    """
    parts = [part.strip() for part in (argument or "").split(",") if part.strip()]
    word = parts.pop(0) if parts and "=" not in parts[0] else positional[0]
    if word not in positional:
        raise ValueError(f"the config's argument: got {word!r}, accepted: {', '.join(positional)}")
    values = dict(defaults)
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in defaults:
            accepted = ", ".join(f"{k}=..." for k in defaults) or "nothing after the first word"
            raise ValueError(f"the config's argument: got {part!r}, accepted: {accepted}")
        values[key] = value
    return word, values


def number(key: str, value: str) -> int:
    """The whole number given for `key` in a config file's argument."""
    if not value.isdecimal():
        raise ValueError(f"the config's argument {key}: got {value!r}, accepted: a whole number")
    return int(value)


def real(key: str, value: str, *, most: float = math.inf, zero: bool = False) -> float:
    """The number given for `key` in a config file's argument, greater than 0 and at most `most`; or 0, too."""
    got = _float(value)
    if not (0 < got <= most or (zero and got == 0)):
        accepted = f"in {'[' if zero else '('}0, {most:g}]" if most < math.inf else f">{'=' if zero else ''} 0"
        raise ValueError(f"the config's argument {key}: got {value!r}, accepted: a number {accepted}")
    return got


def _float(value: str) -> float:
    """The number in a string, or NaN."""
    try:
        return float(value)
    except ValueError:
        return math.nan


LABELS_AT_CLIENTS = (
    *("fedavg", "fedavg_pp", "fedprox", "fixmatch", "uda", "fedmatch", "fedsem", "fedtrinet"),
    *("fedsiam_pi", "fedsiam_mt", "fedsiam_d", "fedlabel", "feddure"),
)
"""The methods that read labels at the clients."""
ON_ALL_LABELS = ("fedavg", "fedavg_pp", "fedprox")
"""Of these, those that with labels at the server, who fine-tunes on them, need to know their clients' labels, too."""
LOCAL_FIXMATCH: dict[str, Any] = {
    "method.pseudo_labels": "local", "method.divisor": "batch", "method.strict": False, "method.batches": "all",
}  # fmt: skip
"""FixMatch as it was published, in each step; its default is (FL)^2's, once a round."""
FEDMATCH_AT_CLIENTS: dict[str, Any] = {"method.lambda_l1": 1e-4, "method.l1_thres": 5e-6, "method.delta_thres": 5e-5}
"""FedMatch's constants where the labels are at the clients; its defaults are those for labels at the server."""
FEDMATCH_AT_LARGE_RATES: dict[str, Any] = {"method.lambda_s": 1.0, "method.lambda_a": 1.0, "method.lambda_l2": 0.01}
"""FedMatch's weights for learning rates from .01 up. Its own are for SGD at .001 without momentum: at .03 the labeled loss, ten
times as heavy, would have a rate of .3 before momentum, and the proximity would take psi .6 of the way to sigma in a step.
Digits, 40 labels at the server, IID, both rates .03 and no clipping, seeds 0 to 2: 58, 70 and 43 % with its own weights, 92, 89
and 94 % with these. FedSiam's setting on MNIST at round 12: 11.7 % with its own lambda_l2, 66.7 % with these."""


def set_split(config: ConfigDict, split: str, besides: str = "") -> None:
    """Sets the clients' split: `iid`, `shards` (2 a client), `l2` (2 classes a client), or `dir0.1` (the concentration).

    `besides` is what the caller takes itself, for the message.
    """
    if split in ("iid", "shards"):
        config.data.partition = split
        return
    if split.startswith("l") and split[1:].isdecimal():
        config.data.partition, config.data.classes_per_client = "class_shards", int(split[1:])
        return
    alpha = _float(split.removeprefix("dir")) if split.startswith("dir") else 0.0
    if not alpha > 0:
        raise ValueError(f"the config's argument split: got {split!r}, accepted: {besides}iid, shards, l2, dir0.1, dir0.3, ...")
    config.data.partition, config.data.alpha = "dirichlet", alpha


# What each method keeps of its own in (FL)^2's setting, which gives all of them the same data, network, optimizers, epochs,
# rounds, server batches and momentum: those of its Table 1, where SemiFL has batches of 10 on the clients; FixMatch + FedAvg,
# the first line of its Table 2; and, not in the paper, UDA and the labels alone.
FL2_METHODS: dict[str, dict[str, Any]] = {
    "fl2": {},
    "semifl": {
        "client.batch_size": 10, "client.optimizer.clip_norm": 1.0, "server.optimizer.clip_norm": 1.0,
        "server.pretrain": 0, "server.sbn_data": "all",
    },
    "fedcon": {},
    "fedmatch": FEDMATCH_AT_LARGE_RATES,
    "fixmatch": {},
    "uda": {},
    "supervised": {"server.sbn_data": "labeled"},
}  # fmt: skip


def fl2(
    dataset: str, variant: str, labels: int, split: str, *, method: str, linear: bool = False, released_pretrain: int = 10
) -> ConfigDict:
    """(FL)^2's setting, `paper` or `released` (where its code differs), with WRN-28-2 or a linear model.

    100 clients, 10 a round, 800 rounds, 5 local and 5 server epochs. The clients' momenta make a checkpoint 100 times the
    model: it is saved every 50 rounds. `method` is one of FL2_METHODS, but with a linear model not FedCon, whose clients train
    the layers before the classifier.
    """
    accepted = [name for name in FL2_METHODS if not (linear and name == "fedcon")]
    if method not in accepted:
        raise ValueError(f"the config's argument method: got {method!r}, accepted: {', '.join(accepted)}")
    config = base(method, "linear") if linear else base(method, "wide_resnet", depth=28, width=2)
    config.data.name, config.data.num_labels = dataset, labels
    config.checkpoint_every = 50
    config.server.sbn_labeled_batch_size, config.server.sbn_unlabeled_batch_size = 10, 2048
    set_split(config, split)
    if not linear:
        config.data.strong = "usb"  # its code's RandAugment, whatever the dataset
    if variant == "released":
        own = {"strict": False, "batches": "accepted", "consistency_on": "confident_accepted"}
        config.method.update({key: value for key, value in own.items() if key in config.method})
        for holder in (config.client, config.server):
            holder.optimizer.schedule, holder.optimizer.clip_norm = "constant", 1.0
        config.server.sbn_data, config.server.sbn_weighting = "all", "batches"
        config.server.pretrain = released_pretrain
    config.update_from_flattened_dict(FL2_METHODS[method])
    return config


# SemiFL, the rows of its ablation, without one of its two parts and without both, and the server's labels alone.
SEMIFL_VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "no_global_labels": {"method.pseudo_labels": "batch", "method.mix": "none"},
    "no_fine_tuning": {"server.training": "parallel"},
    "fedavg_fixmatch": {"method.pseudo_labels": "batch", "method.mix": "none", "server.training": "parallel"},
    "supervised": {"server.sbn_data": "labeled"},
}


def semifl(dataset: str, argument: str | None, *, labels: int) -> ConfigDict:
    """SemiFL's setting: one of SEMIFL_VARIANTS, `labels` and `split` from a config file's argument; with WRN-28-2.

    100 clients, 10 a round, 800 rounds, 5 local and 5 server epochs; checkpoints as in `fl2`.
    """
    variant, given = parse(argument, tuple(SEMIFL_VARIANTS), labels=str(labels), split="iid")
    config = base("supervised" if variant == "supervised" else "semifl", "wide_resnet", depth=28, width=2)
    config.data.name, config.data.num_labels, config.data.strong = dataset, number("labels", given["labels"]), "semifl"
    config.checkpoint_every = 50
    set_split(config, given["split"])
    config.client.batch_size, config.server.batch_size = 10, 10 if config.data.num_labels <= 1000 else 250
    for holder in (config.client, config.server):
        holder.optimizer.clip_norm = 1.0
    config.server.pretrain, config.server.sbn_data = 0, "all"
    config.update_from_flattened_dict(SEMIFL_VARIANTS[variant])
    return config


def fedcon(dataset: str, network: str, split: str, rounds: int) -> ConfigDict:
    """FedCon's setting in its released code's working form (`fedjax_ssl.methods.fedcon` says what does not work there).

    100 clients, 10 a round, one local and one server epoch; 1 % of the labels, chosen at random whatever their class, after the
    clients have shared all images. Clients train by LARS at .3 * 10/256, the server by SGD that starts afresh each round.
    """
    config = base("fedcon", network, norm="running")
    # A step passes two batches through batch norm, each with PyTorch's share .1: 1 - .9^2 in all.
    config.model.norm_momentum = 0.19
    config.rounds, config.checkpoint_every = rounds, rounds
    config.data.name, config.data.labeled_fraction = dataset, (0.01,)
    config.data.label_selection, config.data.labels_first = "random", False
    set_split(config, split)
    config.client.batch_size = 50
    config.client.optimizer.update(name="lars", learning_rate=0.3 * 10 / 256, weight_decay=1.5e-6, nesterov=False)
    config.server.optimizer.update(learning_rate=0.01, schedule="constant", momentum=0.5, weight_decay=0.0, nesterov=False)
    config.server.momentum = 0.0
    for holder in (config.client, config.server):
        holder.epochs, holder.optimizer.persistent = 1, False
    return config


def central(dataset: str, argument: str | None, labels: int) -> ConfigDict:
    """FreeMatch or FixMatch on pooled data, as USB trains them: 1,024 rounds of 1,024 steps, WRN-28-2.

    Args:
        dataset: its name.
        argument: the config file's: the method, then `labels=`.
        labels: how many, unless the argument says.
    """
    method, given = parse(argument, ("freematch", "fixmatch"), labels=str(labels))
    config = base(f"{method}_central", "wide_resnet", depth=28, width=2, variant="fixmatch")
    config.model.norm, config.model.norm_momentum = "running", 0.001
    data = config.data
    data.name, data.num_labels, data.strong = dataset, number("labels", given["labels"]), "usb"
    data.exclude_labeled = False  # labeled images are unlabeled ones, too
    data.num_clients = config.cohort_size = 1
    config.rounds, config.eval_every = 1024, 5
    server = config.server
    server.batch_size, server.epochs, server.steps, server.pretrain = 64, 0, 1024, 0
    server.optimizer.schedule, server.optimizer.decay = "cosine_7_16", "kernels"
    return config
