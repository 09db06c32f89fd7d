"""fedjax_ssl: federated semi-supervised learning, simulated in one JAX program with the clients as an axis.

from configs import digits
import fedjax_ssl

experiment = fedjax_ssl.build(digits.get_config("fl2").to_dict())
for state, metrics in experiment.rounds():
    print(metrics)
logits = experiment.predict(state, images)
"""

from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.method import ClientOutput, Cohort, DataSpec, Method, ServerData, Shard
from fedjax_ssl.methods import METHODS
from fedjax_ssl.simulation.simulator import copied

__all__ = [
    "METHODS",
    "ClientOutput",
    "Cohort",
    "DataSpec",
    "Experiment",
    "Method",
    "ServerData",
    "Shard",
    "build",
    "copied",
]
