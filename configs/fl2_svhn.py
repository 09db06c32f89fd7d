"""(FL)^2 on SVHN, few labels at the server."""

from ml_collections import ConfigDict

from configs import common, fl2_paper


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="40", split="iid")
    labels = common.number("labels", given["labels"])
    config = fl2_paper.config("svhn_cropped", variant, labels, given["split"])
    if variant == "released":
        config.server.pretrain = 2048 // (5 * max(1, labels // 10))
    return config
