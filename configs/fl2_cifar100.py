"""(FL)^2 on CIFAR-100 with WRN-28-8, few labels at the server.

    python -m launch.run --config=fl2_cifar100:paper,labels=400,split=iid --config.data.data_dir=DIR

rho is 1 (`paper`) or .1 (`released`). The released code does not run on CIFAR-100, as its number of pretrainings is undefined
there: here it is CIFAR-10's, ten. `method=` as in fl2_cifar10.
Expected: no reference at hand, not measured. Run time: for an accelerator; 10 clients of 23.4 million parameters a round.
"""

from .common import ConfigDict, fl2


def get_config(argument: str | None = None) -> ConfigDict:
    config, released = fl2("cifar100", argument, labels=400)
    config.model.width = 8
    if "rho" in config.method:
        config.method.rho = 0.1 if released else 1.0
    config.data.mean, config.data.std = (129.3 / 255, 124.1 / 255, 112.4 / 255), (68.2 / 255, 65.4 / 255, 70.4 / 255)
    return config
