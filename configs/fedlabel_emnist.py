"""FedLabel on EMNIST ByClass (62 classes) with ResNet-18, labels at the clients: 100 clients, 10 a round.

    python -m launch.run --config=configs/fedlabel_emnist.py:paper,labels=0.2 --config.data.data_dir=DIR

Arguments as in fedlabel_cifar10.py, and as there its 814,255 images are split anew, 80/5/15, unless `released`.

Expected: the paper's numbers are not at hand. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import fedlabel


def get_config(argument: str | None = None) -> ConfigDict:
    return fedlabel.make(argument, "emnist/byclass", 18)
