"""FedLabel on OrganAMNIST with ResNet-18, labels at the clients: 10 clients, 3 a round.

    python -m launch.run --config=configs/fedlabel_organamnist.py:paper,labels=0.05 --config.data.path=FOLDER/organamnist.npz

Arguments as in fedlabel_cifar10.py, and as there the file's parts are merged and split anew, 80/5/15, unless `released`; the
same scan is then on both sides, which the official split avoids.

Expected: the paper's numbers are not at hand. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import fedlabel


def get_config(argument: str | None = None) -> ConfigDict:
    return fedlabel.make(argument, "organamnist", 18, clients=10, cohort=3, labels="0.05")
