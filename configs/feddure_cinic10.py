"""FedDure on CINIC-10, labels at the clients.

    python -m launch.run --config=feddure_cinic10:feddure,split=dir_dir --config.data.path=CINIC-10

Argument as in feddure_cifar10. Expected: no numbers of the paper are at hand. Run time: for an accelerator.
"""

from .feddure import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cinic10", examples=90_000)
