"""FedCon on SVHN (train split), 1 % of the labels at the server; its code mirrors digits, too.

    python -m launch.run --config=fedcon_svhn:paper,split=iid --config.data.data_dir=DIR

split: iid or shards; memory as for fedcon_cifar10. Expected: no result of its authors is at hand; (FL)^2's comparison is
`fl2_svhn:paper,method=fedcon`. Run time: for an accelerator, not measured.
"""

from .common import ConfigDict, fedcon


def get_config(argument: str | None = None) -> ConfigDict:
    return fedcon("svhn_cropped", "cifar_cnn", argument, rounds=150)
