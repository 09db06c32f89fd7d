"""Twin-sight on SVHN, all labels of four of ten clients, five a round, Dirichlet .1.

    python -m launch.run --config=twinsight_svhn:twinsight --config.data.data_dir=DIR

First word: twinsight, released (the code's divisor of the neighborhood loss, no pseudo-labels), or another method; fedavg_sl
has all labels, and fedavg those of the labeled clients. fedprox_fixmatch and fedprox_freematch have FedProx's term.
Both views are SimCLR's, of images without normalization.

Expected (figures of the authors' repository, in %; not reproduced here): fedavg_sl 87.34, fedavg 51.10, fedprox 49.22,
fixmatch 58.68, fedprox_fixmatch 45.58, freematch 59.74, fedprox_freematch 50.91, rscfed 54.50, twinsight 62.94.
Run time: for an accelerator.
"""

from .some_clients import ConfigDict, twinsight


def get_config(argument: str | None = None) -> ConfigDict:
    return twinsight(argument, "svhn_cropped", colors=True)
