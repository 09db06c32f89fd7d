"""FedTriNet on CIFAR-10, 1 % of each client's data labeled. Arguments as in configs/fedtrinet_mnist.py.

    python -m launch.run --config=configs/fedtrinet_cifar10.py:fedtrinet,split=iid --config.data.data_dir=DIR

Expected: no result of its authors is at hand to compare with. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import fedtrinet


def get_config(argument: str | None = None) -> ConfigDict:
    return fedtrinet.make(argument, "cifar10", "cifar_cnn")
