"""The methods: one file each, and the table of their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_ssl.method import Method
from fedjax_ssl.methods.central import fixmatch_central, freematch_central
from fedjax_ssl.methods.fedavg import fedavg, fedavg_pp, fedprox
from fedjax_ssl.methods.fedcon import fedcon
from fedjax_ssl.methods.feddure import feddure
from fedjax_ssl.methods.fedlabel import fedlabel
from fedjax_ssl.methods.fedmatch import fedmatch
from fedjax_ssl.methods.fedsem import fedsem
from fedjax_ssl.methods.fedsiam import fedsiam_mt, fedsiam_pi
from fedjax_ssl.methods.fedsiam_d import fedsiam_d
from fedjax_ssl.methods.fedtrinet import fedtrinet
from fedjax_ssl.methods.fixmatch import fixmatch
from fedjax_ssl.methods.fl2 import fl2
from fedjax_ssl.methods.semifl import semifl
from fedjax_ssl.methods.supervised import supervised
from fedjax_ssl.methods.uda import uda

METHODS: dict[str, Callable[..., Method]] = {
    "fl2": fl2,
    "fedcon": fedcon,
    "feddure": feddure,
    "fedmatch": fedmatch,
    "fixmatch": fixmatch,
    "semifl": semifl,
    "fedsiam_pi": fedsiam_pi,
    "fedsiam_mt": fedsiam_mt,
    "fedsiam_d": fedsiam_d,
    "supervised": supervised,
    "freematch_central": freematch_central,
    "fixmatch_central": fixmatch_central,
    "uda": uda,
    "fedavg": fedavg,
    "fedavg_pp": fedavg_pp,
    "fedprox": fedprox,
    "fedsem": fedsem,
    "fedlabel": fedlabel,
    "fedtrinet": fedtrinet,
}


PROX_MU: dict[str, float] = {"fedprox": 0.01}
"""The default of `method.prox_mu` where it is not 0."""


def options_class(factory: Callable[..., Method]) -> type[Any]:
    """The dataclass of a method's own settings: the type of the default of its `options` argument."""
    return type(inspect.signature(factory).parameters["options"].default)


__all__ = ["METHODS", "PROX_MU", "options_class"]
