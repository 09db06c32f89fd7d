"""FedLabel on BloodMNIST with ResNet-18, labels at the clients: 5 clients, all of them in every round.

    python -m launch.run --config=fedlabel_bloodmnist:paper,labels=0.05 --config.data.path=FOLDER/bloodmnist.npz

Argument as in fedlabel_cifar10. Expected (the paper, in %; not reproduced here), 5 % labels, alpha .1: fedlabel 71.46 (1.89),
FedProx + uda 59.48, fedtrinet 59.38, fedmatch 58.89, fedprox 56.53, fedavg and uda 53.18, FedProx + fixmatch 50.88, fixmatch
47.92; with all labels fedprox 74.53, fedavg 70.53. Run time: for an accelerator.
"""

from .fedlabel import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "bloodmnist", 18, clients=5, cohort=5, labels="0.05")
