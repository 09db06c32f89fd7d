"""SemiFL on SVHN (train split), labels at the server.

    python -m launch.run --config=configs/semifl_svhn.py:paper,labels=1000,split=iid --config.data.data_dir=DIR

Expected (the paper's Table 1, mean and standard deviation of 4 seeds, in %, of the best round on the test set; not yet
reproduced here): 1000 labels 96.9 (.1) IID, 95.2 (.2) Dirichlet .3, 93.0 (.5) Dirichlet .1, 92.2 (.8) with 2 classes a client
(`split=l2`); 250 labels 96.8 (.3), 94.0 (.5), 91.2 (.3), 87.5 (1.1). The server's labels alone (`supervised`): 90.4, 77.1.
Run time: made for an accelerator, not yet measured.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    return common.semifl("svhn_cropped", argument, labels=1000)  # cropped, not mirrored: the dataset's own weak view
