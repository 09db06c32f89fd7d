"""SAGE on SVHN, 6 % of the labels at the clients: 20 clients, 8 a round.

    python -m launch.run --config=sage_svhn:sage,alpha=0.1 --config.data.data_dir=DIR

First word and keys as in sage_cifar10. Expected (a listing of results names the paper; in %, not reproduced here): 94.65 with
alpha 1. Run time: for an accelerator.
"""

from .sage import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "svhn_cropped", per_class=460, steps=140, rounds=150)
