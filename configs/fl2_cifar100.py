"""(FL)^2 on CIFAR-100, few labels at the server."""

from ml_collections import ConfigDict

from configs import common, fl2_paper


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="400", split="iid")
    config = fl2_paper.config("cifar100", variant, common.number("labels", given["labels"]), given["split"])
    config.model.width = 8
    config.method.rho = 0.1 if variant == "released" else 1.0
    return config
