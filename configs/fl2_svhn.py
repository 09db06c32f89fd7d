"""(FL)^2 on SVHN (train split), few labels at the server.

    python -m launch.run --config=fl2_svhn:paper,labels=40,split=iid --config.data.data_dir=DIR

The server trains 102 times on 40 labels before round 1, 16 times on 250: about 2,048 steps, as in the released code.
`method=` as in fl2_cifar10. Expected (Table 1, 3 seeds, in %; not reproduced here), 40 labels, IID, Dirichlet .3 and .1: fl2
75.3 (2.4), 31.0 (4.2), 21.5 (3.3); semifl 53.4 (13.3), 26.3 (2.5), 18.0 (2.6); fedmatch 18.4 (4.7), 22.3 (.7), 20.7 (2.7);
fedcon 20.3 (1.0), 21.6 (1.7), 20.5 (1.4); fixmatch, IID, 50.2 (Table 2). Run time: for an accelerator.
"""

from .common import ConfigDict, fl2


def get_config(argument: str | None = None) -> ConfigDict:
    config, _ = fl2("svhn_cropped", argument, labels=40)
    config.data.weak = "flip_crop4"  # the released code mirrors digits, too
    config.data.mean, config.data.std = (0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744)  # its code's
    return config
