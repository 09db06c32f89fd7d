"""FedDB on CIFAR-10, labels at the clients: 100 clients, 10 a round.

    python -m launch.run --config=feddb_cifar10:feddb,split=dir0.3 --config.data.data_dir=DIR

First word: feddb, or another method with labels at the clients. labels=4000; split: iid, dir0.3 or dir0.1. Values are the
released code's, whose batch norm has no statistics of its own: here they are running averages.

Expected: no numbers of the paper are at hand. Run time: for an accelerator.
"""

from .feddb import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cifar10", labels=4000, examples=50000)
