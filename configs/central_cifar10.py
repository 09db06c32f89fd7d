"""FreeMatch and FixMatch on pooled CIFAR-10: the upper reference of (FL)^2's Figure 1. Also with labels=10, 250 or 4000.

    python -m launch.run --config=central_cifar10:freematch,labels=40 --config.data.data_dir=DIR

Expected error (USB's table, in %; not measured here) with 40, 250 and 4000 labels: freematch 4.97, 4.85, 4.14; fixmatch 8.33,
4.97, 4.29. Run time: for an accelerator, 2^20 steps on 960 images each; not measured.
"""

from .common import ConfigDict, central


def get_config(argument: str | None = None) -> ConfigDict:
    return central("cifar10", argument, labels=40)
