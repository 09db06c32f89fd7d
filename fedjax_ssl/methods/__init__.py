"""The federated learning methods: one file each, and METHODS, the table of their names.

A method is made by a factory `(*, task, client, server, options) -> Method`: `task` is the network and its views, `client` how
clients train, `server` the server's optimizer, fine-tuning and batch-norm statistics, `options` the method's own settings.
Where a docstring does not say otherwise, the client state is the state of the local optimizer, if `client` is persistent.
"""

import inspect
from collections.abc import Callable

from fedjax_ssl import origins
from fedjax_ssl.method import Method
from fedjax_ssl.methods.cbafed import cbafed
from fedjax_ssl.methods.central import fixmatch_central, freematch_central
from fedjax_ssl.methods.fedavg import fedavg, fedavg_pp, fedprox
from fedjax_ssl.methods.fedcon import fedcon
from fedjax_ssl.methods.feddb import feddb
from fedjax_ssl.methods.feddure import feddure
from fedjax_ssl.methods.fedlabel import fedlabel
from fedjax_ssl.methods.fedmatch import fedmatch
from fedjax_ssl.methods.fedsem import fedsem
from fedjax_ssl.methods.fedsiam import fedsiam_mt, fedsiam_pi
from fedjax_ssl.methods.fedsiam_d import fedsiam_d
from fedjax_ssl.methods.fedtrinet import fedtrinet
from fedjax_ssl.methods.fixmatch import fixmatch
from fedjax_ssl.methods.fl2 import fl2
from fedjax_ssl.methods.freematch import freematch
from fedjax_ssl.methods.rscfed import rscfed
from fedjax_ssl.methods.sage import sage
from fedjax_ssl.methods.semifl import semifl
from fedjax_ssl.methods.supervised import supervised
from fedjax_ssl.methods.twinsight import twinsight
from fedjax_ssl.methods.uda import uda
from fedjax_ssl.options import Options

_METHODS = (fl2, semifl, fedmatch, fedcon, fedsiam_pi, fedsiam_mt, fedsiam_d, fedsem, fedtrinet, fedlabel, feddure)
_NEWER = (sage, feddb, rscfed, cbafed, twinsight)
_BASELINES = (fixmatch, freematch, uda, supervised, fedavg, fedavg_pp, fedprox, freematch_central, fixmatch_central)
METHODS: dict[str, Callable[..., Method]] = {factory.__name__: factory for factory in (*_METHODS, *_NEWER, *_BASELINES)}
PROX_MU: dict[str, float] = {"fedprox": 0.01}  # the default of `method.prox_mu`, where it is not 0


def options_class(factory: Callable[..., Method]) -> type[Options]:
    """The class of a method's own options: the type of its factory's default `options`."""
    return type(inspect.signature(factory).parameters["options"].default)


def register_method(name: str, factory: Callable[..., Method]) -> None:
    """Registers a method under a name that `method.name` then accepts; it replaces an earlier one of yours of that name.

    The default of the factory's `options` is an instance of a subclass of `fedjax_ssl.Options`. ValueError for a name of the
    package's methods, or a factory without such `options` or without `task`, `client` and `server`.
    """
    if name in BUILT_IN or not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"register_method: got the name {name!r}, accepted: a new name of letters, digits and underscores")
    parameters = inspect.signature(factory).parameters
    if missing := [key for key in ("task", "client", "server", "options") if key not in parameters]:
        raise ValueError(f"register_method: got {name!r}, a factory without the arguments {', '.join(missing)}")
    if not isinstance(parameters["options"].default, Options):
        raise ValueError(f"register_method: got {name!r}, whose `options` have no default that is a fedjax_ssl.Options")
    origins.note("method", name, factory)
    METHODS[name] = factory


def name_of(factory: Callable[..., Method]) -> str:
    """The name of a factory in METHODS; a factory that is not there yet is registered under its own name."""
    for name, known in METHODS.items():
        if known is factory:
            return name
    name = getattr(factory, "__name__", "method")
    register_method(name, factory)
    return name


BUILT_IN = frozenset(METHODS)
__all__ = ["METHODS", "PROX_MU", "name_of", "options_class", "register_method"]
