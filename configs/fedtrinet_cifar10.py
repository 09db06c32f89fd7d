"""FedTriNet on CIFAR-10, 1 % of each client's data labeled.

    python -m launch.run --config=fedtrinet_cifar10:fedtrinet,split=iid --config.data.data_dir=DIR

Argument as in fedtrinet_mnist. Expected: no result of its authors is at hand. Run time: for an accelerator.
"""

from .common import ConfigDict, fedtrinet


def get_config(argument: str | None = None) -> ConfigDict:
    return fedtrinet("cifar10", "cifar_cnn", argument)
