"""A program: one round of a network with the options that ship, beside the plain reference. `test_shipped` starts it.

    python -m tests.models.shipped NAME

The tests' own process lowers XLA's optimization level and has four devices; this one is as `launch.run` is.
"""

import json
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from configs import common, digits
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.simulation.program import compiler_options
from launch import devices
from tests.data.common import in_memory
from tests.engine import distance


class Case(NamedTuple):
    """A network with its options, and what two clients of FedAvg train it on in a round: the views and image size of a dataset,
    whose images are random. A loss that explodes at a learning rate enlarges rounding likewise."""

    model: str
    options: dict[str, Any]
    dataset: str = "cifar10"
    steps: int = 1  # local ones
    learning_rate: float = 0.03


CASES = {
    "mlp": Case("mlp", {}, dataset="mnist", steps=2),
    "mnist_cnn": Case("mnist_cnn", {}, dataset="mnist", steps=2),
    "emnist_cnn": Case("emnist_cnn", {}, steps=2),
    "rsc_cnn": Case("rsc_cnn", {}, steps=2),
    "cifar_cnn": Case("cifar_cnn", {"norm": "running"}),
    "wrn10_2": Case("wide_resnet", {"depth": 10}, steps=2),
    "wrn28_2": Case("wide_resnet", {}),
    "resnet9": Case("resnet9", {"norm": "running"}, learning_rate=1e-3),
    "resnet9_fedmatch": Case("resnet9", {"variant": "fedmatch"}, learning_rate=1e-3),
    "resnet9_semifl": Case("resnet9", {"variant": "semifl"}),
    "resnet8": Case("resnet", {"depth": 8, "norm": "running"}),
    "resnet18": Case("resnet", {"norm": "running"}),
}
"""Besides, `digits_METHOD` is one epoch of that method on the digits with their own network, `cnn`."""
SHAPES, BATCH_SIZES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}, {"mnist": 16, "cifar10": 4}


def experiment(name: str, **execution: Any) -> Experiment:
    """One round of a case."""
    if name.startswith("digits_"):
        config, dataset = digits.get_config(name.removeprefix("digits_")), None
        config.client.epochs = config.server.training.epochs = 1
    else:
        case = CASES[name]
        size = BATCH_SIZES[case.dataset]
        rng, shape = np.random.default_rng(0), SHAPES[case.dataset]
        train, test = ((rng.integers(0, 256, (n, *shape), np.uint8), np.arange(n) % 10) for n in (20 * size, 20))
        config, dataset = common.base("fedavg", case.model, **case.options), in_memory(train, test, name=case.dataset)
        config.cohort_size = 2
        config.data.update(num_clients=4, labels_at="clients", num_labels=10 * size)
        config.client.update(batch_size=size, epochs=0, steps=case.steps)
        config.client.optimizer.learning_rate = case.learning_rate
    config.rounds = 1
    config.execution.update(execution)
    return build(config.to_dict(), dataset)


def one_round(experiment: Experiment) -> tuple[Any, Any, list[float]]:
    """(the model's parameters, how the round changed them, the losses of clients and evaluation)."""
    state, _ = experiment.start()
    before = jax.device_get(state.server.weights.params)
    ((state, row),) = experiment.rounds(state)
    after = jax.device_get(state.server.weights.params)
    return before, jax.tree.map(np.subtract, after, before), [row["client/loss"], row["eval/loss"]]


def main(name: str) -> None:
    """Prints one JSON object: the layout, XLA's options, how far the two rounds are apart, and their losses."""
    devices.use_all_cores()
    shipped, plain = experiment(name), experiment(name, conv="xla", strategy="scan")
    (before, change, losses), (_, expected, expected_losses) = one_round(shipped), one_round(plain)
    found = {
        "layout": shipped.layout._asdict(),
        "compiler": compiler_options(jax.default_backend()),
        "moved": distance(before, jax.tree.map(np.add, before, change)),
        "apart": distance(expected, change),
        "losses": [losses, expected_losses],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
