"""FedTriNet on MNIST, 1 % of each client's data labeled.

    python -m launch.run --config=configs/fedtrinet_mnist.py:fedtrinet,split=iid --config.data.data_dir=DIR

First word: fedtrinet, or fedsem in the same setting. split: iid, shards, l2 or dir0.1.

Expected: no result of its authors is at hand to compare with. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import fedtrinet


def get_config(argument: str | None = None) -> ConfigDict:
    return fedtrinet.make(argument, "mnist", "mnist_cnn")
