"""Twin-sight on Fashion-MNIST, all labels of four of ten clients, five a round, Dirichlet .1.

    python -m launch.run --config=twinsight_fashion_mnist:twinsight --config.data.data_dir=DIR

First word: twinsight, released (the code's divisor of the neighborhood loss, no pseudo-labels), or another method; fedavg_sl
has all labels, and fedavg those of the labeled clients. fedprox_fixmatch and fedprox_freematch have FedProx's term.
Both views are flips and crops of images that are padded to 32 pixels (the code resizes them), without normalization.

Expected (figures of the authors' repository, in %; not reproduced here): fedavg_sl 88.98, fedavg 72.46, fedprox 70.71,
fixmatch 67.52, fedprox_fixmatch 63.20, freematch 63.10, fedprox_freematch 69.62, rscfed 76.58, twinsight 79.95.
Run time: for an accelerator.
"""

from .some_clients import ConfigDict, twinsight


def get_config(argument: str | None = None) -> ConfigDict:
    return twinsight(argument, "fashion_mnist", same_views=True)
