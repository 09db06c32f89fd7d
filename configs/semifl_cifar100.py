"""SemiFL on CIFAR-100, labels at the server.

    python -m launch.run --config=configs/semifl_cifar100.py:paper,labels=10000,split=iid --config.data.data_dir=DIR

WRN-28-8. Expected (the paper's Table 1, mean and standard deviation of 4 seeds, in %, of the best round on the test set; not
yet reproduced here): 10000 labels 72.1 (.2) IID, 70.0 (.3) Dirichlet .3, 68.0 (.2) Dirichlet .1, 62.1 (.4) with 2 classes a
client (`split=l2`); 2500 labels 61.3 (1.2), 54.9 (1.4), 49.0 (1.0), 35.2 (.3). The server's labels alone (`supervised`):
59.3, 27.2.
Run time: made for an accelerator, not yet measured; 23.4 million parameters for each of 10 clients a round.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    config = common.semifl("cifar100", argument, labels=10000)
    config.model.width = 8
    return config
