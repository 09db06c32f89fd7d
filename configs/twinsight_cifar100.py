"""Twin-sight on CIFAR-100, all labels of four of ten clients, five a round, Dirichlet .1.

    python -m launch.run --config=twinsight_cifar100:twinsight --config.data.data_dir=DIR

First word: twinsight, released (the code's divisor of the neighborhood loss, no pseudo-labels), or another method; fedavg_sl
has all labels, and fedavg those of the labeled clients. fedprox_fixmatch and fedprox_freematch have FedProx's term.

Expected (figures of the authors' repository, in %; not reproduced here): fedavg_sl 64.45, fedavg 48.36, fedprox 44.64,
fixmatch 48.73, fedprox_fixmatch 43.61, freematch 48.67, fedprox_freematch 40.45, rscfed 43.48, twinsight 49.98.
Run time: for an accelerator.
"""

from .some_clients import ConfigDict, twinsight


def get_config(argument: str | None = None) -> ConfigDict:
    return twinsight(argument, "cifar100")
