"""SemiFL on CIFAR-10, labels at the server.

    python -m launch.run --config=semifl_cifar10:paper,labels=4000,split=iid --config.data.data_dir=DIR

First word: paper, an ablation, or supervised (the server's labels alone, here for as many epochs as SemiFL's server).
Expected (Table 1, 4 seeds, in %, of the best round on the test set; not reproduced here), IID, Dirichlet .3 and .1, 2 classes a
client (`split=l2`): 4000 labels 93.1 (.1), 88.9 (.3), 84.5 (.4), 85.3 (.3), supervised 76.9; 250 labels 88.2 (.3), 71.9 (1.2),
63.0 (.6), 60.0 (.9), supervised 42.4. Ablation, 4000 labels, `l2` and IID: fedavg_fixmatch 41.0, 40.3; no_fine_tuning 48.9,
47.0; no_global_labels 80.4, 81.7. Run time: for an accelerator, not measured.
"""

from .common import ConfigDict, semifl


def get_config(argument: str | None = None) -> ConfigDict:
    config = semifl("cifar10", argument, labels=4000)
    config.data.mean, config.data.std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # its code's
    return config
