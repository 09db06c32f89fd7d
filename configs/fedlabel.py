"""FedLabel's setting, which its config files share."""

from typing import Any

from . import common
from .common import ConfigDict

FEDLABEL: dict[str, dict[str, Any]] = {
    "paper": {},
    "released": {  # FLUTE's choices
        "expert_view": "weak", "consistency_target": "local", "divisor": "used", "proximity": 10.0, "burn_in": 50,
        "counts": "passing", "aggregation": "halves",
    },
    "local_only": {"experts": "local"},
    "global_only": {"experts": "global"},
}  # fmt: skip
"""First words for FedLabel itself, and what they set under `method`."""


def make(
    argument: str | None, dataset: str, depth: int, *, clients: int = 100, cohort: int = 10, labels: str = "0.2"
) -> ConfigDict:
    """FedLabel's setting with a ResNet: 500 rounds, SGD .003 without momentum, batch 64, tau = 30 and tau' = 10 steps.

    The paper gives none of these numbers: they are FLUTE's for CIFAR-100, but for the rounds. It merges a dataset's own parts
    and splits them anew, 80/5/15 (Appendix A); FLUTE does not. Other methods train for tau steps, too; FixMatch and UDA take as
    many unlabeled images a step as labeled ones, since seven times as many are more than a client of CIFAR has.

    The argument is a key of FEDLABEL or another method, then `labels` (the labeled share of each client's examples), `alpha`
    (Dirichlet's), `tau`, `beta` (the threshold) and `strong`: RandAugment as in the code (`released`: one operation, a third of
    its scale), as in the text (`paper`: ten operations, a thirtieth of it) or `none`: CE sees what the experts see (Figure 7).
    """
    words = (*FEDLABEL, *(name for name in common.LABELS_AT_CLIENTS if name != "fedlabel"))
    word, given = common.parse(
        argument, words, has_small=True, labels=labels, alpha="0.1", tau="30", beta="", strong="released"
    )
    strong = common.one_of("strong", given["strong"], ("released", "paper", "none"))
    if given["beta"] and word not in FEDLABEL:
        raise ValueError(f"the config's argument beta: got {given['beta']!r} with {word}, accepted: FedLabel's words alone")
    config = common.base("fedlabel" if word in FEDLABEL else word, "resnet", depth=depth, norm="running")
    config.rounds, config.cohort_size, config.checkpoint_every = 500, cohort, 50
    config.data.update(name=dataset, num_clients=clients, labels_at="clients", partition="dirichlet_classes")
    config.data.labeled_fraction = (common.real("labels", given["labels"], maximum=1),)
    config.data.alpha = common.real("alpha", given["alpha"])
    if strong != "none" or word not in FEDLABEL:
        config.data.strong = "none" if strong == "none" else f"fedlabel_{strong}"
    if word != "released":
        config.data.resplit = (0.8, 0.05, 0.15)
    config.client.update(batch_size=64, epochs=0, steps=common.number("tau", given["tau"]))
    config.client.optimizer.update(learning_rate=0.003, schedule="constant", momentum=0.0, weight_decay=0.0)
    config.client.optimizer.update(nesterov=False, persistent=False)
    config.server.optimizer.momentum = 0.0
    if word in FEDLABEL:
        config.method.update(FEDLABEL[word], confidence=common.real("beta", given["beta"] or "0.3", maximum=1, zero=True))
        if strong == "none":
            config.method.augment = "none"
    elif word == "fedprox":
        config.method.prox_mu = 0.001
    if dataset.startswith("cifar"):
        config.data.weak = "flip_zero_crop4"  # FLUTE's
        if word == "released":  # it normalizes both as CIFAR-10
            config.rounds = 2000
            config.data.update(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
    config.update_from_flattened_dict(common.AT_CLIENTS.get(word, {}))
    return common.sized(common.without_unread_views(config), argument)
