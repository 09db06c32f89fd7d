"""FreeMatch and FixMatch on pooled CIFAR-100. Also with labels=2500 or 10000.

    python -m launch.run --config=central_cifar100:freematch,labels=400 --config.data.data_dir=DIR

Expected error (USB's table, in %; not measured here) with 400, 2500 and 10000 labels: freematch 49.24, 32.79, 27.17; fixmatch
53.37, 34.29, 28.28. TorchSSL trains WRN-28-8 (`--config.model.width=8`): fixmatch 46.42, 28.03, 22.20.
Run time: for an accelerator, 2^20 steps on 960 images each; not measured.
"""

from .common import ConfigDict, central


def get_config(argument: str | None = None) -> ConfigDict:
    config = central("cifar100", argument, labels=400)
    config.server.training.optimizer.weight_decay = 1e-3
    config.data.mean, config.data.std = (129.3 / 255, 124.1 / 255, 112.4 / 255), (68.2 / 255, 65.4 / 255, 70.4 / 255)
    return config
