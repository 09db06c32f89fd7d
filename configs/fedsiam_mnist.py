"""FedSiam on MNIST, labels at the clients or at the server.

    python -m launch.run --config=fedsiam_mnist:d,labels_at=clients,gamma=0.1,split=iid --config.data.data_dir=DIR
    python -m launch.run --config=fedsiam_mnist:pi,labels_at=server,gamma=0.01 --config.data.data_dir=DIR
    python -m launch.sweep fedsiam_mnist --config.data.data_dir=DIR

First word: d, mt, pi, no_siamese, fedavg_repeated (FedAvg with FedSiam's optimizer and as many passes over labels), or another
method. gamma: the share of labels, .1, .15 or .2 of each client's data, or .01 or .1 of all data at the server. split: iid; at
the clients noniid1 (2 classes each), noniid2 (labels of 2 classes, other data of all) or noniid3 (55 % labeled at ten clients,
5 % at the others); at the server noniid (2 classes). curve, of D: linear or rectangle. variant: paper, or released, at the
clients alone: the code's network with dropout, loss, batches and splits (equal numbers of each class, noniid1 and the labels of
noniid2 on a grid of class pairs), unaugmented.

Expected (the paper, in %, IID, gamma .1, labels at the clients; in brackets here, variant=released, 3 seeds): Pi 97.04 (96.98),
MT 97.16 (96.97), D 97.22 (97.08), no siamese 97.03 (96.89), FedAvg 95.13 (94.74), FedAvg++ 96.20 (96.15), FedSem 96.49 (96.02),
FedFixMatch 93.19 (97.40), FedMatch 94.11 (97.12). Labels at the server, gamma .01: Pi and MT 91.3 (90.1 and 94.0; the
labels alone 89.7). The third command runs the first of these tables, with `fedsiam_table6` the second.
Run time on two CPU cores: Pi with labels at the clients 1.5 minutes, 200 rounds with labels at the server 2 to 25 minutes.
"""

from .common import sized
from .fedsiam import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    config = make(argument, "mnist", "mnist_cnn", server_rounds=200, curve="linear")
    if config.model.variant == "released" and config.data.labeled == "default":
        config.data.weak = "none"
    return sized(config, argument)
