"""fedjax_ssl: federated semi-supervised learning, simulated in one JAX program with the clients as an axis.

>>> import fedjax_ssl
>>> from fedjax_ssl.configs import digits
>>> experiment = fedjax_ssl.build(digits.get_config("supervised"))
>>> experiment
<Experiment: supervised on digits, 20 clients, 40 rounds>
>>> state, metrics = next(experiment.rounds())
>>> metrics["round"]
1
>>> experiment.predict(state, experiment.problem.test.images).shape
(360, 10)

`fedjax_ssl.load("runs/digits-fl2/0")` gives the experiment and the state of a run that has a folder.
"""

import pathlib

from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.loading import load
from fedjax_ssl.method import Aggregate, ClientOutput, Cohort, DataSpec, Method, Requires, ServerData, Shard
from fedjax_ssl.methods import METHODS, register_method
from fedjax_ssl.models import MODELS, register_model
from fedjax_ssl.options import Options
from fedjax_ssl.simulation.simulator import copied

_folder = pathlib.Path(__file__).parent
if not (_folder / "configs").exists():  # in a checkout `configs` and `launch` stand beside the package, not in it
    __path__.append(str(_folder.parent))

__all__ = [
    "METHODS",
    "MODELS",
    "Aggregate",
    "ClientOutput",
    "Cohort",
    "DataSpec",
    "Experiment",
    "Method",
    "Options",
    "Requires",
    "ServerData",
    "Shard",
    "build",
    "copied",
    "load",
    "register_method",
    "register_model",
]
