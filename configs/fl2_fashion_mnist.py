"""(FL)^2 on Fashion-MNIST, 40 labels at the server.

    python -m launch.run --config=configs/fl2_fashion_mnist.py:paper,labels=40,split=iid --config.data.data_dir=DIR

The paper does not state the input's size (here zero-padded from 28 to 32), its normalization (here Fashion-MNIST's own) or its
optimizer (here CIFAR-10's), and its code has no loader. `method=` runs another method in this setting, as
in `configs/fl2_cifar10.py`.
Expected result: none measured yet.
Run time: made for an accelerator, as `configs/fl2_cifar10.py`.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(argument: str | None = None) -> ConfigDict:
    variant, given = common.parse(argument, ("paper", "released"), labels="40", split="iid", method="fl2")
    labels = common.number("labels", given["labels"])
    config = common.fl2("fashion_mnist", variant, labels, given["split"], method=given["method"])
    config.data.image_size = 32
    return config
