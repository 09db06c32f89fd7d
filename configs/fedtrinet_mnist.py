"""FedTriNet on MNIST, 1 % of each client's data labeled.

    python -m launch.run --config=fedtrinet_mnist:fedtrinet,split=iid --config.data.data_dir=DIR

First word: fedtrinet, or fedsem in the same setting. split: iid, shards, l2 or dir0.1.
Expected: no result of its authors is at hand. Run time: for an accelerator.
"""

from .common import ConfigDict, fedtrinet


def get_config(argument: str | None = None) -> ConfigDict:
    return fedtrinet("mnist", "mnist_cnn", argument)
