"""(FL)^2 on CIFAR-100, few labels at the server.

    python -m launch.run --config=configs/fl2_cifar100.py:paper,labels=400,split=iid --config.data.data_dir=DIR

WRN-28-8, rho 1 (`paper`) or .1 (`released`). The released code does not run on CIFAR-100: its number of pre-trainings is
undefined there, and is CIFAR-10's here. `method=` runs another method in this setting, as in
`configs/fl2_cifar10.py`.
Expected result: no reference accuracy at hand, and none measured yet.
Run time: made for an accelerator; 23.4 million parameters for each of 10 clients a round.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="400", split="iid", method="fl2")
    labels = common.number("labels", given["labels"])
    config = common.fl2("cifar100", variant, labels, given["split"], method=given["method"])
    config.model.width = 8
    if "rho" in config.method:
        config.method.rho = 0.1 if variant == "released" else 1.0
    config.data.mean, config.data.std = (
        (129.3 / 255, 124.1 / 255, 112.4 / 255),
        (68.2 / 255, 65.4 / 255, 70.4 / 255),
    )  # its code's
    return config
