"""SemiFL on SVHN (train split), labels at the server.

    python -m launch.run --config=semifl_svhn:paper,labels=1000,split=iid --config.data.data_dir=DIR

First word as in semifl_cifar10. Expected (Table 1, 4 seeds, in %, of the best round on the test set; not reproduced here), IID,
Dirichlet .3 and .1, 2 classes a client: 1000 labels 96.9 (.1), 95.2 (.2), 93.0 (.5), 92.2 (.8), supervised 90.4; 250 labels
96.8 (.3), 94.0 (.5), 91.2 (.3), 87.5 (1.1), supervised 77.1. Run time: for an accelerator, not measured.
"""

from .common import ConfigDict, semifl


def get_config(argument: str | None = None) -> ConfigDict:
    return semifl("svhn_cropped", argument, labels=1000)
