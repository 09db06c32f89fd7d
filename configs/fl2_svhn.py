"""(FL)^2 on SVHN (train split), few labels at the server.

    python -m launch.run --config=configs/fl2_svhn.py:paper,labels=40,split=iid --config.data.data_dir=DIR

Expected (the paper's Table 1, mean and standard deviation of 3 seeds, in %; not yet reproduced here): 40 labels 75.3 (2.4) IID,
31.0 (4.2) Dirichlet .3, 21.5 (3.3) Dirichlet .1.
`method=` runs the paper's baselines in this setting; 40 labels: `semifl` 53.4 (13.3), 26.3 (2.5), 18.0 (2.6); `fedmatch`
18.4 (4.7), 22.3 (.7), 20.7 (2.7); `fedcon` 20.3 (1.0), 21.6 (1.7), 20.5 (1.4). Its Table 2, 40 labels, IID: `fixmatch`
50.2. Of other methods see `configs/fl2_cifar10.py`.
Run time: made for an accelerator, as `configs/fl2_cifar10.py`.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="40", split="iid", method="fl2")
    labels = common.number("labels", given["labels"])
    pretrain = 2048 // (5 * max(1, labels // 10))
    config = common.fl2("svhn_cropped", variant, labels, given["split"], method=given["method"], released_pretrain=pretrain)
    config.data.weak = "flip_crop4"  # the released code mirrors SVHN's digits too
    config.data.mean, config.data.std = (0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744)  # its code's
    return config
