"""FedTriNet's setting, which its three config files share."""

from ml_collections import ConfigDict

from configs import common

WORDS = ("fedtrinet", "fedsem")
"""The accepted first words; the first is the default."""


def make(argument: str | None, dataset: str, model: str, *, weak: str = "none") -> ConfigDict:
    """A config of the released code's setting: 10 clients, 5 a round, 40 rounds on labels and 60 on all data, 1 % labeled.

    Five local epochs, batch 50, SGD .01 with momentum .5 that starts afresh each time, no weight decay.

    Args:
        argument: `word,split=iid`, both optional.
        dataset: a name that TFDS has.
        model: a key of MODELS that has the variant `released`.
        weak: how images are augmented in training.
    """
    word, given = common.parse(argument, WORDS, split="iid")
    config = common.base(word, model, variant="released", norm="running")
    config.data.update(name=dataset, num_clients=10, labels_at="clients", labeled_fraction=(0.01,))
    config.data.update(weak=weak, mean=(0.5,), std=(0.5,))
    common.set_split(config, given["split"])
    config.rounds, config.cohort_size, config.method.labeled_rounds = 100, 5, 0.4
    config.client.update(batch_size=50, epochs=5)
    config.client.optimizer.update(
        learning_rate=0.01, schedule="constant", momentum=0.5, nesterov=False, weight_decay=0.0, persistent=False
    )
    config.server.update(momentum=0.0, pretrain=0)
    return config
