"""fedjax_ssl: federated semi-supervised learning, simulated in one JAX program with the clients as an axis.

>>> import fedjax_ssl
>>> from fedjax_ssl.configs import digits
>>> experiment = fedjax_ssl.build(digits.get_config("supervised"))
>>> experiment
<Experiment: supervised on digits, 40 rounds>
>>> state, metrics = next(experiment.rounds())
>>> metrics["round"]
1
>>> experiment.predict(state, experiment.problem.test.images).shape
(360, 10)

`fedjax_ssl.load("runs/digits-fl2/0")` gives the experiment and the state of a run that has a folder.
"""

import importlib
import pathlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_ssl.experiment.build import build
    from fedjax_ssl.experiment.experiment import Experiment
    from fedjax_ssl.experiment.history import Comparison, History, compare, run
    from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, Cohort, DataSpec, Method, Requires, ServerData
    from fedjax_ssl.methods import METHODS, register_method
    from fedjax_ssl.models import MODELS, register_model
    from fedjax_ssl.options import Options
    from fedjax_ssl.runs.loading import load
    from fedjax_ssl.simulation.simulator import copied

_folder = pathlib.Path(__file__).parent
if not (_folder / "configs").exists():  # in a checkout `configs` and `launch` stand beside the package, not in it
    from fedjax_ssl import checkout

    sys.meta_path.insert(0, checkout.Finder())

_HOMES = {
    "build": "experiment.build", "Experiment": "experiment.experiment", "load": "runs.loading",
    **dict.fromkeys(("Comparison", "History", "compare", "run"), "experiment.history"),
    **dict.fromkeys(("Aggregate", "ClientData", "ClientOutput", "Cohort", "DataSpec", "Method"), "method"),
    **dict.fromkeys(("Requires", "ServerData"), "method"),
    **dict.fromkeys(("METHODS", "register_method"), "methods"), **dict.fromkeys(("MODELS", "register_model"), "models"),
    "Options": "options", "copied": "simulation.simulator",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name or a module, imported when it is first used: `fedjax-ssl --help` need not wait for JAX."""
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
    is_ours = name in ("configs", "launch") or any((_folder / one).exists() for one in (name, f"{name}.py"))
    if not name.startswith("_") and is_ours:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "METHODS", "MODELS", "Aggregate", "ClientData", "ClientOutput", "Cohort", "Comparison", "DataSpec", "Experiment", "History",
    "Method", "Options", "Requires", "ServerData", "build", "compare", "copied", "load", "register_method", "register_model",
    "run",
]  # fmt: skip
