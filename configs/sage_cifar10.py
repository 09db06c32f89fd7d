"""SAGE on CIFAR-10, 10 % of the labels at the clients: 20 clients, 8 a round.

    python -m launch.run --config=sage_cifar10:sage,alpha=0.1 --config.data.data_dir=DIR

First word: sage, or another method with labels at the clients. alpha: of the Dirichlet split over all clients; 0 is IID.
split=pairs: the released code's, skewed within pairs of clients alone. Values are the released code's.

Expected (a listing of results names the paper; in %, not reproduced here): 89.08, presumably alpha 1. Run time: for an
accelerator.
"""

from .sage import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cifar10", per_class=500, steps=95, rounds=300)
