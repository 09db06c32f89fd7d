"""Twin-sight on CIFAR-10, all labels of four of ten clients, five a round, Dirichlet .1.

    python -m launch.run --config=twinsight_cifar10:twinsight --config.data.data_dir=DIR

First word: twinsight, released (the code's divisor of the neighborhood loss, no pseudo-labels), or another method; fedavg_sl
has all labels, and fedavg those of the labeled clients. fedprox_fixmatch and fedprox_freematch have FedProx's term.

Expected (figures of the authors' repository, in %; not reproduced here): fedavg_sl 82.78, fedavg 61.58, fedprox 63.66,
fixmatch 63.58, fedprox_fixmatch 62.44, freematch 58.47, fedprox_freematch 59.28, rscfed 60.78, twinsight 70.06.
Run time: for an accelerator.
"""

from .some_clients import ConfigDict, twinsight


def get_config(argument: str | None = None) -> ConfigDict:
    return twinsight(argument, "cifar10")
