"""What config files share: the default of every key, the argument after a config's name, and the settings of several papers."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.options import did_you_mean


def base(method: str, model: str, **model_options: Any) -> ConfigDict:
    """A config with the default of every key, also of the method's and the model's own options."""
    return ConfigDict(Settings.from_dict({"method": {"name": method}, "model": {"name": model, **model_options}}).to_dict())


SMALL = "small"
WITHOUT_CLIENTS = ("supervised", "freematch_central", "fixmatch_central")
"""The methods whose server trains alone."""
WITHOUT_PRETRAINING = ("freematch_central", "fixmatch_central")
WITHOUT_BATCH_NORM = ("mnist_cnn", "emnist_cnn", "rsc_cnn", "mlp", "linear")


def trainings(config: ConfigDict) -> list[ConfigDict]:
    """The groups of settings that train: `client`, unless the method has none, and `server.training`, where it has labels."""
    clients = [config.client] if config.method.name not in WITHOUT_CLIENTS else []
    return [*clients, *([config.server.training] if config.data.labels_at == "server" else [])]


TRAIN_ON_STRONG_VIEWS = (
    *("fl2", "semifl", "fedmatch", "fixmatch", "freematch", "uda", "fedlabel", "feddure", "sage", "feddb", "twinsight"),
    *("freematch_central", "fixmatch_central"),
)
TRAIN_ON_WEAK_VIEWS = (
    *(*TRAIN_ON_STRONG_VIEWS, "fedcon", "fedsiam_pi", "fedsiam_mt", "fedsiam_d", "fedavg_pp", "rscfed", "cbafed"),
)
"""Strong views follow the weak one, also where a method trains on no weak view itself, as FedMatch."""


def without_unread_views(config: ConfigDict) -> ConfigDict:
    """The config, in which views that the method does not train on have their defaults again."""
    method, data = config.method.name, config.data
    if method not in TRAIN_ON_STRONG_VIEWS:
        data.strong = "default"
    if method == "fedavg_pp":  # weak views, whatever those of labeled examples are
        data.labeled = "default"
    if method not in TRAIN_ON_WEAK_VIEWS and data.labeled != "default":  # else labeled examples have weak views
        data.weak = "default"
    return config


def running_norm(network: str, momentum: float = 0.1) -> dict[str, Any]:
    """The options of a network with running batch-norm statistics; none of one without batch norm."""
    return {} if network in WITHOUT_BATCH_NORM else {"norm": "running", "norm_momentum": momentum}


def parse(
    argument: str | None, words: Sequence[str], *, has_small: bool = False, **defaults: str
) -> tuple[str, dict[str, str]]:
    """Reads `word,key=value,...` as (word, values): one of `words`, by default the first, and the keys of `defaults`.

    If the config `has_small`, the word `small`, which `sized` reads, may stand beside the first one, or in its place.
    """
    parts = [part.strip() for part in (argument or "").split(",") if part.strip()]
    if has_small and SMALL in parts:
        parts.remove(SMALL)
    word = parts.pop(0) if parts and "=" not in parts[0] else words[0]
    if word not in words:
        own = "; a method of your own: give the config file that registers it" if "fl2" in words else ""
        raise ValueError(f"the config's argument: got {word!r}, accepted: {', '.join(words)}{did_you_mean(word, words)}{own}")
    values, given = dict(defaults), set[str]()
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in defaults:
            accepted = ", ".join([f"{k}=..." for k in defaults] + [SMALL] * has_small) or "nothing after the first word"
            raise ValueError(f"the config's argument: got {part!r}, accepted: {accepted}{did_you_mean(key, defaults)}")
        if key in given:
            raise ValueError(f"the config's argument: got {key} twice, accepted: once")
        given.add(key)
        values[key] = value
    return word, values


def is_small(argument: str | None) -> bool:
    """Whether the word `small` is in a config's argument."""
    return SMALL in (part.strip() for part in (argument or "").split(","))


def sized(config: ConfigDict, argument: str | None) -> ConfigDict:
    """The config; with the word `small` in its argument at a size for two CPU cores, on the paper's own images.

    30 rounds of at most 4 of 20 clients, one local epoch where clients train for epochs, and in place of a network for
    accelerators the small one of the digits. A phase that is a number of rounds keeps its share of all rounds. Where all
    clients take part in each round and some have labels, one of the 4 is of these.
    """
    if not is_small(argument):
        return config
    if config.model.name not in WITHOUT_BATCH_NORM:
        norm = {key: config.model[key] for key in ("norm", "norm_momentum")}
        config.model = base(config.method.name, "cnn", width=16, **norm).model
    shorter, config.rounds, config.eval_every, config.checkpoint_every = 30 / config.rounds, 30, 5, 10
    for options, phase in ((config.client, "unlabeled_wait"), (config.method, "burn_in")):
        if options.get(phase, 0) >= 1:
            options[phase] = type(options[phase])(round(shorter * options[phase]))
    if config.method.name not in WITHOUT_CLIENTS:
        if config.data.labels_at == "some_clients" and config.cohort_size == config.data.num_clients:
            config.labeled_cohort = 1
        config.cohort_size, config.client.epochs = min(4, config.cohort_size), min(1, config.client.epochs)
        if config.data.partition != "class_grid":  # which has a client for each pair of classes
            config.data.num_clients = min(20, config.data.num_clients)
            config.data.labeled_fraction = config.data.labeled_fraction[::5]  # one, or one per client of 100
    return config


def one_of(key: str, value: str, accepted: Iterable[str]) -> str:
    """The value of a key in a config's argument, which has to be one of those accepted."""
    if value not in accepted:
        hint = did_you_mean(value, accepted)
        raise ValueError(f"the config's argument {key}: got {value!r}, accepted: {', '.join(accepted)}{hint}")
    return value


def number(key: str, value: str) -> int:
    """The whole number of a key in a config's argument."""
    if not re.fullmatch("[0-9]{1,18}", value):
        raise ValueError(f"the config's argument {key}: got {value!r}, accepted: a whole number")
    return int(value)


def real(key: str, value: str, *, maximum: float = math.inf, zero: bool = False) -> float:
    """The number of a key in a config's argument: in (0, maximum], or with `zero` in [0, maximum]."""
    got = _float(value)
    if not (0 < got <= maximum or (zero and got == 0)):
        accepted = f"in {'[' if zero else '('}0, {maximum:g}]" if maximum < math.inf else f">{'=' if zero else ''} 0"
        raise ValueError(f"the config's argument {key}: got {value!r}, accepted: a number {accepted}")
    return got


def _float(text: str) -> float:
    """The number in a text, or NaN."""
    try:
        return float(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan


def set_split(config: ConfigDict, split: str, *, others: str = "") -> None:
    """Sets the clients' split: iid, shards (2 a client), l2 (2 classes a client), dir0.1 (alpha); the caller takes `others`."""
    if split in ("iid", "shards"):
        config.data.partition = split
    elif re.fullmatch("l[0-9]{1,9}", split):
        config.data.partition, config.data.classes_per_client = "class_shards", int(split[1:])
    elif split.startswith("dir") and _float(split[3:]) > 0:
        config.data.partition, config.data.alpha = "dirichlet", float(split[3:])
    else:
        raise ValueError(f"the config's argument split: got {split!r}, accepted: {others}iid, shards, l2, dir0.1, dir0.3, ...")


LABELS_AT_CLIENTS = (
    *("fedavg", "fedavg_pp", "fedprox", "fixmatch", "freematch", "uda", "fedmatch", "fedsem", "fedtrinet"),
    *("fedsiam_pi", "fedsiam_mt", "fedsiam_d", "fedlabel", "feddure", "sage", "feddb"),
)
"""The methods that read labels at the clients."""
LABELS_AT_SOME_CLIENTS = ("rscfed", "cbafed", "twinsight")
"""The methods that read labels at some clients alone."""
ON_ALL_LABELS = ("fedavg", "fedavg_pp", "fedprox")
"""Methods whose clients train on labels alone: with labels at the server, too, they have to know their clients' labels."""
AT_CLIENTS: dict[str, dict[str, Any]] = {
    # As it was published, with pseudo-labels in each step; the defaults are (FL)^2's, with pseudo-labels once a round.
    "fixmatch": {
        "method.pseudo_labels": "local", "method.divisor": "batch", "method.strict": False, "method.batches": "all",
    },
    "fedmatch": {"method.lambda_l1": 1e-4, "method.l1_thres": 5e-6, "method.delta_thres": 5e-5},
}  # fmt: skip
"""What methods have where the labels are at the clients; their defaults are for labels at the server."""
FEDMATCH_AT_LARGE_RATES: dict[str, Any] = {"method.lambda_s": 1.0, "method.lambda_a": 1.0, "method.lambda_l2": 0.01}
"""FedMatch's weights for learning rates from .01 up; its own are for SGD at .001 without momentum. (Digits, 40 labels at the
server, learning rates .03: 92 % with these, 57 % with its own, three seeds; Fashion-MNIST, 40 labels: 45 and 57 %.)"""

SEMIFL_NORM: dict[str, Any] = {
    "server.static_norm.data": "all", "server.static_norm.weighting": "batches", "server.static_norm.order": "joined",
    "server.static_norm.labeled_batch_size": 250, "server.static_norm.unlabeled_batch_size": 250,
}  # fmt: skip
"""SemiFL's static batch-norm statistics, as its code has them, in (FL)^2's setting, too."""
FL2_METHODS: dict[str, dict[str, Any]] = {
    "fl2": {},
    "semifl": {
        "client.batch_size": 10, "client.optimizer.clip_norm": 1.0, "server.training.optimizer.clip_norm": 1.0,
        "server.training.pretrain": 0, **SEMIFL_NORM,
    },
    "fedcon": {},
    "fedmatch": FEDMATCH_AT_LARGE_RATES,
    "fixmatch": {},
    "uda": {},
    "fedsiam_mt": {},
    "supervised": {"server.static_norm.data": "labeled", "server.static_norm.unlabeled_batch_size": 250},
}  # fmt: skip
"""What each method has of its own in (FL)^2's setting; UDA, FedSiam-MT and `supervised` are not in its Tables 1 and 2."""


def fl2_pretrainings(dataset: str, labels: int) -> int:
    """How often (FL)^2's server trains on its labels before round 1: the paper does not say, its released code has these.

    For SVHN about 2,048 steps in all, in batches of 10 and trainings of 5 epochs; for CIFAR-10 ten trainings, and so for the
    datasets that the code does not have. `server.training.pretrain=1` is the one of the paper's Algorithm 1, and 0 an ablation.
    """
    return 2048 // (5 * max(1, labels // 10)) if dataset == "svhn_cropped" else 10


def fl2(dataset: str, argument: str | None, *, labels: int, linear: bool = False) -> tuple[ConfigDict, bool]:
    """(FL)^2's setting with WRN-28-2 or a linear model, and whether it is the one of its `released` code.

    800 rounds of 10 of 100 clients, 5 local and 5 server epochs, after `fl2_pretrainings`. The argument is `paper` or
    `released`, then `labels`, `split` and `method`, one of FL2_METHODS; a linear model excludes FedCon, whose clients train the
    layers before the classifier.
    """
    variant, given = parse(argument, ("paper", "released"), has_small=not linear, labels=str(labels), split="iid", method="fl2")
    labels = number("labels", given["labels"])
    method = one_of("method", given["method"], [name for name in FL2_METHODS if not (linear and name == "fedcon")])
    config = base(method, "linear") if linear else base(method, "wide_resnet", depth=28, width=2)
    config.checkpoint_every = 50  # the clients' momenta make a checkpoint 100 times the model
    config.data.name, config.data.num_labels = dataset, labels
    set_split(config, given["split"])
    if not linear:
        config.data.strong = "usb" if variant == "paper" else "fl2_released"
        config.server.static_norm.update(labeled_batch_size=10, unlabeled_batch_size=2048)
    if variant == "released":
        own = {"strict": False, "batches": "accepted", "consistency_on": "confident_accepted"}
        config.method.update({key: value for key, value in own.items() if key in config.method})
        for training in trainings(config):
            training.optimizer.update(schedule="constant", clip_norm=1.0)
        if not linear:
            config.server.static_norm.update(data="all", weighting="batches", order="class")
    config.server.training.pretrain = fl2_pretrainings(dataset, labels)
    own = FL2_METHODS[method]
    config.update_from_flattened_dict(
        {key: value for key, value in own.items() if not (linear and key.startswith("server.static_norm."))}
    )
    return sized(without_unread_views(config), argument), variant == "released"


SEMIFL_VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "no_global_labels": {"method.pseudo_labels": "local", "method.mix": "none"},
    "no_fine_tuning": {"server.training.when": "parallel"},
    "fedavg_fixmatch": {"method.pseudo_labels": "local", "method.mix": "none", "server.training.when": "parallel"},
    "supervised": {"server.static_norm.data": "labeled"},
}
"""SemiFL, the rows of its ablation, and training on the server's labels alone."""


def semifl(dataset: str, argument: str | None, *, labels: int) -> ConfigDict:
    """SemiFL's setting with WRN-28-2, 800 rounds of 10 of 100 clients: one of SEMIFL_VARIANTS, then `labels` and `split`."""
    variant, given = parse(argument, tuple(SEMIFL_VARIANTS), has_small=True, labels=str(labels), split="iid")
    config = base("supervised" if variant == "supervised" else "semifl", "wide_resnet", depth=28, width=2)
    config.checkpoint_every = 50
    config.data.name, config.data.num_labels, config.data.strong = dataset, number("labels", given["labels"]), "semifl"
    set_split(config, given["split"])
    for training in trainings(config):
        training.batch_size, training.optimizer.clip_norm = 10, 1.0
    config.server.training.update(batch_size=10 if config.data.num_labels <= 1000 else 250, pretrain=0)
    config.update_from_flattened_dict(SEMIFL_NORM | SEMIFL_VARIANTS[variant])
    return sized(without_unread_views(config), argument)


def fedcon(dataset: str, network: str, argument: str | None, rounds: int = 200) -> ConfigDict:
    """FedCon's setting, as far as its code works (see `fedjax_ssl.methods.fedcon`), with 1 % of the labels at the server."""
    _, given = parse(argument, ("paper",), has_small=True, split="iid")
    # A step normalizes two batches, each with a share of .1: 1 - .9^2 in all.
    config = base("fedcon", network, **running_norm(network, 0.19))
    config.rounds, config.checkpoint_every = rounds, rounds
    config.data.update(name=dataset, labeled_fraction=(0.01,), label_selection="random", labels_first=False)
    set_split(config, given["split"])
    config.client.update(batch_size=50, epochs=1)
    config.client.optimizer.update(name="lars", learning_rate=0.3 * 10 / 256, weight_decay=1.5e-6)
    config.server.optimizer.momentum = 0.0
    config.server.training.epochs = 1
    config.server.training.optimizer.update(learning_rate=0.01, schedule="constant", momentum=0.5, weight_decay=0.0)
    for optimizer in (config.client.optimizer, config.server.training.optimizer):
        optimizer.nesterov = optimizer.persistent = False
    if network == "cifar_cnn":
        config.data.update(weak="flip_crop4", mean=(0.5,), std=(0.5,))
        config.execution.data = "host"  # each client's predictor has 100 million parameters
    return sized(config, argument)


def fedtrinet(dataset: str, network: str, argument: str | None, *, weak: str = "none") -> ConfigDict:
    """FedTriNet's setting, as its code has it: 5 of 10 clients a round, 40 rounds on the 1 % labeled data, then 60 on all."""
    word, given = parse(argument, ("fedtrinet", "fedsem"), has_small=True, split="iid")
    config = base(word, network, variant="released", **running_norm(network))
    config.rounds, config.cohort_size, config.method.labeled_rounds = 100, 5, 0.4
    config.data.update(name=dataset, num_clients=10, labels_at="clients", labeled_fraction=(0.01,))
    config.data.update(weak=weak, mean=(0.5,), std=(0.5,))
    set_split(config, given["split"])
    config.client.update(batch_size=50, epochs=5)
    config.client.optimizer.update(learning_rate=0.01, schedule="constant", momentum=0.5, nesterov=False)
    config.client.optimizer.update(weight_decay=0.0, persistent=False)
    config.server.optimizer.momentum = 0.0
    return sized(config, argument)


def central(dataset: str, argument: str | None, labels: int) -> ConfigDict:
    """FreeMatch or FixMatch, then `labels`, on pooled data as USB trains them: 1,024 rounds of 1,024 steps, WRN-28-2."""
    method, given = parse(argument, ("freematch", "fixmatch"), labels=str(labels))
    config = base(f"{method}_central", "wide_resnet", depth=28, width=2, variant="fixmatch", norm="running")
    config.model.norm_momentum = 0.001
    config.rounds, config.eval_every = 1024, 5
    config.data.update(name=dataset, num_labels=number("labels", given["labels"]), strong="usb")
    config.data.exclude_labeled = False  # labeled images are unlabeled ones, too
    config.server.training.update(batch_size=64, epochs=0, steps=1024)
    config.server.training.optimizer.update(schedule="cosine_7_16", decay="kernels")
    return config
