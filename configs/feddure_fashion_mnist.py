"""FedDure on Fashion-MNIST, padded to 32x32, labels at the clients. Arguments as in configs/feddure_cifar10.py.

    python -m launch.run --config=configs/feddure_fashion_mnist.py:feddure,split=dir_dir --config.data.data_dir=DIR

Expected (the paper's Tables 1 and 2, in %; not yet reproduced here), (IID, IID) and (DIR, DIR): feddure 88.69, 86.96; fedmatch
85.71, 85.13; fixmatch 86.46, 81.07; fedprox_fixmatch 86.31, 83.68; uda 86.20, 81.07; fedprox_uda 84.78, 82.94; fedavg 85.56,
82.24; fedavg_sl 89.87, 86.95; fedprox_sl 89.53, 87.32. (DIR, DIR) alone: no_c_reg 86.18, no_f_reg 86.49.
Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import feddure


def get_config(argument: str | None = None) -> ConfigDict:
    return feddure.make(argument, "fashion_mnist", examples=60_000)
