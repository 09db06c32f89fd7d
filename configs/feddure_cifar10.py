"""FedDure on CIFAR-10, labels at the clients, labeled and unlabeled data from distributions of their own.

    python -m launch.run --config=feddure_cifar10:feddure,split=dir_dir --config.data.data_dir=DIR
    python -m launch.run --config=feddure_cifar10:fixmatch,clients=10,labels=1000 --config.data.data_dir=DIR

First word: feddure, an ablation (no_c_reg, no_f_reg), or another method in this setting. split: iid_iid, iid_dir or dir_dir.
The paper has labels=1000, 2000, 5000, 7500 or 10000, gamma=.3, .5, .7 or 1, clients=2, 5, 10 or 20 and, for local iterations,
`--config.client.epochs=E`. The released code's learning rate is 6e-4 and its threshold .6 (`--config.method.confidence=0.6`).
batch: what "batch size 10" means for unlabeled examples. released: 90 a step, so that a client sees all of its 450 in a round,
for 2,000 examples forward and 1,900 back; paper: 10 a step, 50 of the 450, for 400 and 300 (Fashion-MNIST on two CPU cores,
estimates of `--dry_run`: 26 and 4 hours).
The paper leaves open whether phi learns through F-reg's input; `--config.method.detach_freg_input=true`: it does not.

Expected (Tables 1 and 2, in %; not reproduced here), (IID, IID) and (DIR, DIR): feddure 67.69 (.23), 57.73 (.31); fedmatch
51.52, 45.56; fixmatch 46.71 (2.49), 39.95 (1.85); fedprox_fixmatch 47.60, 41.85; uda 47.47, 35.52; fedprox_uda 46.49, 37.38;
fedavg 45.68 (1.14), 40.34 (.46); fedavg_sl 75.47, 58.38; fedprox_sl 74.67, 59.55; no_c_reg -, 54.79; no_f_reg -, 56.46.
Run time: for an accelerator.
"""

from .feddure import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cifar10", examples=50_000)
