"""SemiFL on CIFAR-100 with WRN-28-8, labels at the server.

    python -m launch.run --config=semifl_cifar100:paper,labels=10000,split=iid --config.data.data_dir=DIR

First word as in semifl_cifar10. Expected (Table 1, 4 seeds, in %, of the best round on the test set; not reproduced here), IID,
Dirichlet .3 and .1, 2 classes a client: 10000 labels 72.1 (.2), 70.0 (.3), 68.0 (.2), 62.1 (.4), supervised 59.3; 2500 labels
61.3 (1.2), 54.9 (1.4), 49.0 (1.0), 35.2 (.3), supervised 27.2.
Run time: for an accelerator, not measured; 10 clients of 23.4 million parameters a round.
"""

from .common import ConfigDict, semifl


def get_config(argument: str | None = None) -> ConfigDict:
    config = semifl("cifar100", argument, labels=10000)
    config.model.width = 8
    return config
