"""FedLabel's setting, which its config files share."""

from typing import Any

from ml_collections import ConfigDict

from configs import common

RELEASED: dict[str, Any] = {
    "expert_view": "weak", "consistency_target": "local", "normalize": "passing", "proximity": 10.0, "burn_in": 50,
    "counts": "passing", "aggregation": "halves",
}  # fmt: skip
"""FLUTE's choices that differ from the paper's."""
OURS: dict[str, dict[str, Any]] = {
    "paper": {},
    "released": RELEASED,
    "local_only": {"experts": "local"},
    "global_only": {"experts": "global"},
}
"""First words for FedLabel itself, and what they set under `method`."""
OTHERS: dict[str, dict[str, Any]] = {
    "fixmatch": common.LOCAL_FIXMATCH,
    "fedmatch": common.FEDMATCH_AT_CLIENTS,
    "fedprox": {"method.prox_mu": 0.001},
}
"""What other methods have in this setting besides their defaults."""
WORDS = (*OURS, *(name for name in common.LABELS_AT_CLIENTS if name != "fedlabel"))
"""The accepted first words; the first is the default. Every other method that can runs in the same setting (Table 3)."""
STRONG = ("released", "paper", "none")


def make(
    argument: str | None,
    dataset: str,
    depth: int,
    *,
    clients: int = 100,
    cohort: int = 10,
    labels: str = "0.2",
) -> ConfigDict:
    """A config of FedLabel's setting: SGD .003 without momentum, batch 64, tau = 30 and tau' = 10 steps, 500 rounds.

    The paper gives none of these numbers: they are FLUTE's for CIFAR-100, but for the rounds (2,000 there). It merges a
    dataset's own parts and splits them anew, 80/5/15 (Appendix A); `released` keeps them, as FLUTE does.

    Other methods train for tau steps, too, in place of epochs; FedSem has a first phase of 300 rounds, FedTriNet of 200.
    FixMatch and UDA take as many unlabeled images a step as labeled ones, on all datasets: seven times as many, as they were
    published, are more than a client has of CIFAR.

    Args:
        argument: `word,labels=.2,alpha=.1,tau=30,beta=.3,strong=released`, all optional. `labels` is the labeled share of each
            client's examples; `strong` is RandAugment as the code has it, one operation at a third of its scale, as the
            paper's text has it, ten operations at a thirtieth (harsh: on that scale low is dark, flat and inverted), or none:
            CE sees what the experts see (Figure 7).
        dataset: its name.
        depth: of the ResNet.
        clients: K.
        cohort: M.
        labels: the share, unless the argument says.
    """
    word, given = common.parse(argument, WORDS, labels=labels, alpha="0.1", tau="30", beta="", strong="released")
    if given["strong"] not in STRONG:
        raise ValueError(f"the config's argument strong: got {given['strong']!r}, accepted: {', '.join(STRONG)}")
    if given["beta"] and word not in OURS:
        raise ValueError(f"the config's argument beta: got {given['beta']!r} with {word}, accepted: FedLabel's words alone")
    name = "fedlabel" if word in OURS else word
    config = common.base(name, "resnet", depth=depth, norm="running")
    config.rounds, config.cohort_size, config.checkpoint_every = 500, cohort, 50
    config.data.update(name=dataset, num_clients=clients, labels_at="clients", partition="dirichlet_classes")
    config.data.labeled_fraction = (common.real("labels", given["labels"], most=1),)
    config.data.alpha = common.real("alpha", given["alpha"])
    config.data.strong = "none" if given["strong"] == "none" else f"fedlabel_{given['strong']}"
    if word != "released":
        config.data.resplit = (0.8, 0.05, 0.15)
    config.client.update(batch_size=64, epochs=0, steps=common.number("tau", given["tau"]))
    config.client.optimizer.update(
        learning_rate=0.003, schedule="constant", momentum=0.0, nesterov=False, weight_decay=0.0, persistent=False
    )
    config.server.update(momentum=0.0, pretrain=0)
    config.method.update(OURS.get(word, {}))
    config.update_from_flattened_dict(OTHERS.get(word, {}))
    if word in OURS:
        config.method.confidence = common.real("beta", given["beta"] or "0.3", most=1, zero=True)
        if given["strong"] == "none":
            config.method.augment = "none"
    return config


def cifar(config: ConfigDict) -> ConfigDict:
    """FLUTE's views of CIFAR; with its choices, `released`, also its deviations, CIFAR-10's for both, and its 2,000 rounds."""
    config.data.weak = "flip_zero_crop4"
    if config.method.get("aggregation") == "halves":
        config.data.update(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
        config.rounds = 2000
    return config
