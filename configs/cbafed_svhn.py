"""CBAFed on SVHN, all labels of one of ten clients: the benchmark of RSCFed, CBAFed and SemiAnAgg.

    python -m launch.run --config=cbafed_svhn:cbafed --config.data.data_dir=DIR

First word: cbafed, rscfed, or another method; fedavg_sl has all labels, and fedavg those of the labeled client. Values are the
released code's, but for the network's stem, which is that of small images; the labeled client trains alone for 46 rounds of 11
epochs first (others' labeled clients: of one epoch).

Expected (SemiAnAgg's README, 500 rounds, in %; not reproduced here): fedavg_sl 94.77, fedavg 75.86, rscfed 81.84, cbafed 91.57.
Run time: for an accelerator.
"""

from .some_clients import ConfigDict, cbafed


def get_config(argument: str | None = None) -> ConfigDict:
    return cbafed(argument, "svhn_cropped", largest=0.9, warm_up=46, rounds=501)
