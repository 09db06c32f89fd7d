"""FedLabel on EMNIST ByClass (62 classes) with ResNet-18, labels at the clients: 100 clients, 10 a round.

    python -m launch.run --config=fedlabel_emnist:paper,labels=0.2 --config.data.data_dir=DIR

Argument as in fedlabel_cifar10. Expected: the paper's numbers are not at hand. Run time: for an accelerator.
"""

from .fedlabel import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "emnist/byclass", 18)
