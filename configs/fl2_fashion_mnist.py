"""(FL)^2 on Fashion-MNIST, 40 labels at the server.

    python -m launch.run --config=fl2_fashion_mnist:paper,labels=40,split=iid --config.data.data_dir=DIR

The paper states neither the input's size (here zero-padded to 32), nor its normalization (here Fashion-MNIST's), nor the
optimizer, nor pretraining (here CIFAR-10's); its code has no loader. `method=` as in fl2_cifar10.
Expected: not measured. Run time: for an accelerator.
"""

from .common import ConfigDict, fl2


def get_config(argument: str | None = None) -> ConfigDict:
    config, _ = fl2("fashion_mnist", argument, labels=40)
    config.data.image_size = 32
    return config
