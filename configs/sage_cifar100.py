"""SAGE on CIFAR-100, 10 % of the labels at the clients: 20 clients, 8 a round.

    python -m launch.run --config=sage_cifar100:sage,alpha=0.1 --config.data.data_dir=DIR

First word and keys as in sage_cifar10. Expected (a listing of results names the paper; in %, not reproduced here): 56.06 with
alpha 1. Run time: for an accelerator.
"""

from .sage import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cifar100", per_class=50, steps=95, rounds=500)
