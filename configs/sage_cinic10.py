"""SAGE on CINIC-10, 10 % of the labels at the clients: 20 clients, 8 a round.

    python -m launch.run --config=sage_cinic10:sage,alpha=0.1 --config.data.path=CINIC-10

First word and keys as in sage_cifar10. Expected (a listing of results names the paper; in %, not reproduced here): 76.68 with
alpha 1. Run time: for an accelerator.
"""

from .sage import ConfigDict, make


def get_config(argument: str | None = None) -> ConfigDict:
    return make(argument, "cinic10", per_class=900, steps=175, rounds=400)
