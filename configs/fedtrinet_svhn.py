"""FedTriNet on SVHN (train split), 1 % of each client's data labeled.

    python -m launch.run --config=fedtrinet_svhn:fedtrinet,split=iid --config.data.data_dir=DIR

Argument as in fedtrinet_mnist. Expected: no result of its authors is at hand. Run time: for an accelerator.
"""

from .common import ConfigDict, fedtrinet


def get_config(argument: str | None = None) -> ConfigDict:
    return fedtrinet("svhn_cropped", "cifar_cnn", argument, weak="flip_crop4")
