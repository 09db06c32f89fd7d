"""(FL)^2 on CIFAR-10, few labels at the server."""

from ml_collections import ConfigDict

from configs import common, fl2_paper


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="40", split="iid")
    config = fl2_paper.config("cifar10", variant, common.number("labels", given["labels"]), given["split"])
    if variant == "released":
        config.data.normalization = "imagenet"
    return config
