"""FedCon on MNIST, 1 % of the labels at the server.

    python -m launch.run --config=fedcon_mnist:paper,split=iid --config.data.data_dir=DIR

split: iid or shards. Its code does not augment MNIST: the two views of an image differ by the dropout of the network, which is
its code's (`released`). Expected: no result of its authors is at hand. Run time: for an accelerator, not measured.
"""

from .common import ConfigDict, fedcon


def get_config(argument: str | None = None) -> ConfigDict:
    config = fedcon("mnist", "mnist_cnn", argument)
    config.data.weak, config.model.variant = "none", "released"
    return config
