"""SemiFL on CIFAR-10, labels at the server.

    python -m launch.run --config=configs/semifl_cifar10.py:paper,labels=4000,split=iid --config.data.data_dir=DIR

Expected (the paper's Table 1, mean and standard deviation of 4 seeds, in %, of the best round on the test set; not yet
reproduced here): 4000 labels 93.1 (.1) IID, 88.9 (.3) Dirichlet .3, 84.5 (.4) Dirichlet .1, 85.3 (.3) with 2 classes a client
(`split=l2`); 250 labels 88.2 (.3), 71.9 (1.2), 63.0 (.6), 60.0 (.9).
Ablation, 4000 labels, 2 classes a client / IID: `fedavg_fixmatch` 41.0 / 40.3, `no_fine_tuning` 48.9 / 47.0, `no_global_labels`
80.4 / 81.7, `paper` 85.3 / 93.1. `supervised`, the server's labels alone (here for as many epochs as SemiFL's server): 4000
labels 76.9, 250 labels 42.4.
Run time: made for an accelerator, not yet measured.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    config = common.semifl("cifar10", argument, labels=4000)
    config.data.mean, config.data.std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # its code's
    return config
