"""FedLabel on CIFAR-100 with ResNet-50, labels at the clients: 100 clients, 10 a round.

    python -m launch.run --config=fedlabel_cifar100:released,labels=0.5 --config.data.data_dir=DIR

Argument as in fedlabel_cifar10. Expected: the paper's numbers are not at hand. Run time: for an accelerator.
"""

from .fedlabel import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cifar100", 50)
