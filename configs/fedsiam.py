"""FedSiam's setting, which its three config files share."""

from typing import Any

from ml_collections import ConfigDict

from configs import common
from configs.splits import SPLITS
from fedjax_ssl.methods import METHODS

OURS = {"d": "fedsiam_d", "mt": "fedsiam_mt", "pi": "fedsiam_pi", "no_siamese": "fedsiam_pi"}
METHOD_WORDS = (*OURS, *(name for name in METHODS if name not in OURS.values()))
"""The accepted first words; the first is the default. Every other method runs in the same setting (Table 2)."""
DATA: dict[str, dict[str, dict[str, Any]]] = {
    "clients": {name: SPLITS[f"fedsiam_{name}"] for name in ("iid", "noniid1", "noniid2", "noniid3")},
    "server": {"iid": {"partition": "iid"}, "noniid": SPLITS["fedsiam_server_noniid"]},
}
"""Where the labels are -> split -> what it sets under `data`."""
# Settings of D's curve (Table 4), and how often the released code goes through labeled data per epoch, by gamma. The rectangle
# is rounds 10 to 40 of 50, as shares of all: in more rounds so narrow a one could not hold the share of layers to be uploaded.
CURVES = {"linear": {"curve": "linear"}, "rectangle": {"curve": "rectangle", "pi_rounds": 0.2, "end_round": 0.8}}
LINEAR_PI_ROUNDS = 3
REPEATS = {0.1: 3, 0.15: 2, 0.2: 2}
BASELINES: dict[str, dict[str, Any]] = {
    "fedavg": {"data.labeled": "none"},
    "fixmatch": common.LOCAL_FIXMATCH,
    "fedmatch": common.FEDMATCH_AT_LARGE_RATES
    | {"method.confidence": 0.95, "client.optimizer.clip_norm": 1.0, "server.optimizer.clip_norm": 1.0},
}  # fmt: skip
"""What the methods compared there have of their own: FedAvg no views, FixMatch its own loss, FedMatch FixMatch's threshold.

FedMatch's own weights are for a tenth of the learning rate and no momentum. Its clipping is ours: without, on MNIST with
gamma .1, one of three seeds diverged and two ended at 91 and 92 %; with it all have 97."""
UNLABELED_RATIO = 7
"""FixMatch's and UDA's mu: a step's unlabeled images for each labeled one, as they were published; the paper does not say."""
PLAIN_SGD = ("fedavg", "fedavg_pp", "fedprox", "fedsem")
"""The baselines that the released code trains on hard labels alone, with momentum .5 and no weight decay."""


def make(argument: str | None, dataset: str, model: str, *, server_rounds: int, curve: str, kl: bool = False) -> ConfigDict:
    """A config of FedSiam's setting: 100 clients, 10 a round, SGD .01 with momentum .9 and weight decay 1e-4 (Tables 2 and 4).

    Labels at the clients: 50 rounds of 5 local epochs, batch 10. At the server: `server_rounds` rounds of one local epoch,
    batch 100, and one epoch of the server, batch 10; the paper has D at the clients alone, and its rectangle is scaled here
    from 50 rounds to these.

    Args:
        argument: `word,labels_at=clients,gamma=.1,split=iid,variant=paper,curve=linear`, all optional.
        dataset: a name that TFDS has.
        model: a key of MODELS.
        server_rounds: rounds with labels at the server.
        curve: of D, a key of CURVES, unless the argument says.
        kl: whether J is KL in the splits that are not IID; in the released code it is in all but Non-IID-I.
    """
    words = {"labels_at": "clients", "gamma": "0.1", "split": "iid", "variant": "paper", "curve": curve}
    word, given = common.parse(argument, METHOD_WORDS, **words)
    at, released = _one_of("labels_at", given, DATA), _one_of("variant", given, ("paper", "released")) == "released"
    split, of_curve = _one_of("split", given, DATA[at]), _one_of("curve", given, CURVES)
    if of_curve != curve and word != "d":
        raise ValueError(f"the config's argument curve: got {of_curve!r} with {word}, accepted: d's alone")
    if at == "clients":
        at_clients = [other for other in METHOD_WORDS if OURS.get(other, other) in common.LABELS_AT_CLIENTS]
        if word not in at_clients:
            raise ValueError(f"the config's argument: got {word!r} with labels_at=clients, accepted: {', '.join(at_clients)}")
    # At the server its clients do not use their data; in Non-IID-III they go through labels six times where there are few.
    if released and (other := "labels_at=server" if at == "server" else "split=noniid3" if split == "noniid3" else ""):
        raise ValueError(f"the config's argument variant: got 'released' with {other}, accepted: paper")
    config = common.base(OURS.get(word, word), model, variant="released" if released else "paper", norm="running")
    config.data.update(DATA[at][split], name=dataset, weak="fedsiam", strong="fedsiam")
    gamma = common.real("gamma", given["gamma"], most=1)
    if split != "noniid3":
        config.data.labeled_fraction = (gamma,)
    elif gamma != 0.1:
        raise ValueError(f"the config's argument gamma: got {given['gamma']!r} with split=noniid3, accepted: 0.1")
    if split == "noniid1" and released:
        config.data.partition = "class_grid"
    for holder in (config.client, config.server):
        holder.optimizer.update(learning_rate=0.01, schedule="constant", nesterov=False, weight_decay=1e-4, persistent=False)
    config.server.update(momentum=0.0, pretrain=0, epochs=1)
    config.rounds, config.client.epochs, config.client.batch_size, config.eval_every = 50, 5, 10, 1
    if at == "server":
        config.rounds, config.client.epochs, config.client.batch_size, config.eval_every = server_rounds, 1, 100, 5
    own = {"consistency_weight": 0.0 if word == "no_siamese" else 1.0, **CURVES[of_curve]}
    if of_curve == "linear":
        own["pi_rounds"] = LINEAR_PI_ROUNDS / config.rounds
    own["consistency"] = "kl" if kl and split != ("noniid1" if released else "iid") else "mse"
    repeats = REPEATS.get(gamma, 1)
    if released:
        own |= {"normalization": "released", "alpha_counts": "epochs", "labeled_repeats": repeats}
    config.method.update({key: value for key, value in own.items() if word in OURS and key in config.method})
    config.update_from_flattened_dict(BASELINES.get(word, {}))
    if word == "fedmatch" and at == "clients":
        config.update_from_flattened_dict(common.FEDMATCH_AT_CLIENTS)
    if word in ("fixmatch", "uda") and at == "clients":
        config.method.unlabeled_batch_size = UNLABELED_RATIO * config.client.batch_size
    if released and word not in OURS:
        _released_baseline(config, word, repeats)
    return config


def _released_baseline(config: ConfigDict, word: str, repeats: int) -> None:
    """Sets another method as the released code has it: labeled data `repeats` times an epoch, FedAvg's once.

    Labeled examples count the epochs of most: they make `repeats` times as many. FedSem's do in its first phase alone.
    """
    if word in PLAIN_SGD:
        config.client.optimizer.update(momentum=0.5, weight_decay=0.0)
    if "labeled_repeats" in config.method:
        config.method.labeled_repeats = repeats
    elif word not in ("fedavg", "fedtrinet"):
        config.client.epochs *= repeats


def _one_of(key: str, given: dict[str, str], accepted: Any) -> str:
    if given[key] not in accepted:
        raise ValueError(f"the config's argument {key}: got {given[key]!r}, accepted: {', '.join(accepted)}")
    return given[key]
