"""FedLabel on OrganAMNIST with ResNet-18, labels at the clients: 10 clients, 3 a round.

    python -m launch.run --config=fedlabel_organamnist:paper,labels=0.05 --config.data.path=FOLDER/organamnist.npz

Argument as in fedlabel_cifar10; but for `released`, slices of one scan are trained and tested on, which the official split
avoids. Expected: the paper's numbers are not at hand. Run time: for an accelerator.
"""

from .fedlabel import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "organamnist", 18, clients=10, cohort=3, labels="0.05")
