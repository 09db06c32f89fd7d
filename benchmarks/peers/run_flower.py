"""Federated averaging in Flower's simulation, its clients in as many Ray actors as the job has processes."""

import os
import pathlib
import sys
from collections import OrderedDict

from flower_client import client_app
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Job


def main() -> None:
    """Runs the job of the command line."""
    job, app, at = Job(sys.argv[1]), ServerApp(), []

    def ended(number: int, arrays: ArrayRecord) -> None:
        at.append(job.now())

    @app.main()
    def serve(grid, context) -> None:
        part = {"fraction_train": job.cohort / job.clients, "fraction_evaluate": 0.0}
        strategy = FedAvg(**part, min_train_nodes=job.cohort, min_available_nodes=job.clients)
        rounds, start = job.warm_up + job.rounds, ArrayRecord(OrderedDict(job.weights))
        result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds, evaluate_fn=ended)
        job.report(at, result.arrays.to_torch_state_dict(), "flwr", "ray")

    os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parent)  # where the actors find the client
    on_gpu = 1 / job.processes if job.device == "cuda" else 0.0
    resources = {"init_args": {"num_cpus": job.processes}, "client_resources": {"num_cpus": 1, "num_gpus": on_gpu}}
    run_simulation(app, client_app(sys.argv[1]), num_supernodes=job.clients, backend_config=resources)


if __name__ == "__main__":
    main()
