"""FedDure on CIFAR-10, labels at the clients, labeled and unlabeled data from distributions of their own.

    python -m launch.run --config=configs/feddure_cifar10.py:feddure,split=dir_dir --config.data.data_dir=DIR
    python -m launch.run --config=configs/feddure_cifar10.py:no_c_reg,split=iid_dir,gamma=0.3 --config.data.data_dir=DIR
    python -m launch.run --config=configs/feddure_cifar10.py:fixmatch,clients=10,labels=1000 --config.data.data_dir=DIR

The first word is `feddure`, an ablation (`no_c_reg`, `no_f_reg`), or another method in the same setting (`configs.feddure`).
The paper's shares of labels, 2, 4, 10, 15 and 20 %, are 1000, 2000, 5000, 7500 and 10000; its gammas .3, .5, .7 and 1, its
clients a round 2, 5, 10 and 20. With `dir_dir`, 1000 labels leave every client one at least, more leave it ten. The released
code's learning rate is 6e-4. UDA and FixMatch have the thresholds of their own papers; of FedDure's, nothing is known but its
code's .6 (`--config.method.confidence=0.6`). Its ablation of local iterations is `--config.client.epochs=E`, at fixed rounds
or, with `--config.rounds=N`, at a fixed total; that phi does not learn through F-reg's input, which the paper leaves open, is
`--config.method.detach_freg_input=true`.

Expected (the paper's Tables 1 and 2, in %; not yet reproduced here), (IID, IID) and (DIR, DIR): feddure 67.69 (.23), 57.73
(.31); fedmatch 51.52, 45.56; fixmatch 46.71 (2.49), 39.95 (1.85); fedprox_fixmatch 47.60, 41.85; uda 47.47, 35.52; fedprox_uda
46.49, 37.38; fedavg 45.68 (1.14), 40.34 (.46); fedavg_sl 75.47, 58.38; fedprox_sl 74.67, 59.55. (DIR, DIR) alone: no_c_reg
54.79, no_f_reg 56.46. Run time: made for an accelerator.
"""

from ml_collections import ConfigDict

from configs import feddure


def get_config(argument: str | None = None) -> ConfigDict:
    return feddure.make(argument, "cifar10", examples=50_000)
