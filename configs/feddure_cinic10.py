"""FedDure on CINIC-10, labels at the clients. Arguments as in configs/feddure_cifar10.py.

    python -m launch.run --config=configs/feddure_cinic10.py:feddure,split=dir_dir --config.data.path=CINIC-10

Expected: no numbers of the paper are at hand. Its training images go to the clients and its test images are tested on; the
validation images are not used. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import feddure


def get_config(argument: str | None = None) -> ConfigDict:
    return feddure.make(argument, "cinic10", examples=90_000)
