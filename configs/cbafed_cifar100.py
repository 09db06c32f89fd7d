"""CBAFed on CIFAR-100, all labels of one of ten clients: the benchmark of RSCFed, CBAFed and SemiAnAgg.

    python -m launch.run --config=cbafed_cifar100:cbafed --config.data.data_dir=DIR

First word and values as in cbafed_svhn, with 91 rounds of warm-up. Expected (SemiAnAgg's README, 500 rounds, in %; not
reproduced here): fedavg_sl 64.75, fedavg 29.51, rscfed 31.98, cbafed 40.20. Run time: for an accelerator.
"""

from .some_clients import ConfigDict, cbafed


def get_config(argument: str | None = None) -> ConfigDict:
    return cbafed(argument, "cifar100", largest=0.95, warm_up=91, rounds=1001)
