"""FedTriNet's setting, which its three config files share."""

from configs import common
from configs.common import ConfigDict


def make(argument: str | None, dataset: str, model: str, *, weak: str = "none") -> ConfigDict:
    """FedTriNet's setting, as its code has it: 5 of 10 clients a round, 40 rounds on the 1 % labeled data and 60 on all data.

    The argument is `fedtrinet` or `fedsem`, then `split`; `weak` is how images are augmented in training.
    """
    word, given = common.parse(argument, ("fedtrinet", "fedsem"), split="iid")
    config = common.base(word, model, variant="released", norm="running")
    config.rounds, config.cohort_size, config.method.labeled_rounds = 100, 5, 0.4
    config.data.update(name=dataset, num_clients=10, labels_at="clients", labeled_fraction=(0.01,))
    config.data.update(weak=weak, mean=(0.5,), std=(0.5,))
    common.set_split(config, given["split"])
    config.client.update(batch_size=50, epochs=5)
    config.client.optimizer.update(
        learning_rate=0.01, schedule="constant", momentum=0.5, nesterov=False, weight_decay=0.0, persistent=False
    )
    config.server.update(momentum=0.0, pretrain=0)
    return config
