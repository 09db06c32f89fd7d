"""FedLabel on CIFAR-100 with ResNet-50, labels at the clients: 100 clients, 10 a round.

    python -m launch.run --config=configs/fedlabel_cifar100.py:released,labels=0.5 --config.data.data_dir=DIR

Arguments as in fedlabel_cifar10.py, and as there its 60,000 images are split anew, 80/5/15, unless `released`.

Expected: the paper's numbers are not at hand. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import fedlabel


def get_config(argument: str | None = None) -> ConfigDict:
    return fedlabel.cifar(fedlabel.make(argument, "cifar100", 50))
