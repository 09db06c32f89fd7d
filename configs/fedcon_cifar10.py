"""FedCon on CIFAR-10, 1 % of the labels at the server.

    python -m launch.run --config=fedcon_cifar10:paper,split=iid --config.data.data_dir=DIR

split: iid or shards. Each client's predictor has 100 million parameters: all clients' states, on the host, take 41 GB, and so
does the one checkpoint, at the end; `--config.method.head_hidden=512` makes both a twentieth. Expected: no result of its
authors is at hand; (FL)^2's comparison is `fl2_cifar10:paper,method=fedcon`. Run time: for an accelerator, not measured.
"""

from .common import ConfigDict, fedcon


def get_config(argument: str | None = None) -> ConfigDict:
    return fedcon("cifar10", "cifar_cnn", argument)
