"""FedDure on Fashion-MNIST, padded to 32x32, labels at the clients.

    python -m launch.run --config=feddure_fashion_mnist:feddure,split=dir_dir --config.data.data_dir=DIR

Argument as in feddure_cifar10. Expected (Tables 1 and 2, in %; run here was fedavg, seed 0: 83.2 and 77.9), (IID, IID) and
(DIR, DIR): feddure 88.69, 86.96; fedmatch 85.71, 85.13; fixmatch 86.46, 81.07; fedprox_fixmatch 86.31, 83.68; uda 86.20,
81.07; fedprox_uda 84.78, 82.94; fedavg 85.56, 82.24; fedavg_sl 89.87, 86.95; fedprox_sl 89.53, 87.32; no_c_reg -, 86.18;
no_f_reg -, 86.49.
Run time: for an accelerator.
"""

from .feddure import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "fashion_mnist", examples=60_000)
