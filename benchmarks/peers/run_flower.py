"""Federated averaging in Flower's simulation, its clients in as many Ray actors as the job has processes."""

import functools
import os
import pathlib
import sys
from collections import OrderedDict

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import EmnistCNN, Job
from torch.nn import functional


@functools.cache
def job_of(folder: str) -> Job:
    """An actor's job, read once."""
    return Job(folder)


def client_app(folder: str) -> ClientApp:
    """What the actors run: a client's local epochs, in the order in which its examples lie."""
    app = ClientApp()

    @app.train()
    def fit(message: Message, context) -> Message:
        job = job_of(folder)
        network = EmnistCNN(job.dropout).to(job.device, memory_format=job.layout)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(network.parameters(), lr=job.learning_rate)
        images, labels = job.inputs[context.node_config["partition-id"]]
        network.train()
        for _ in range(job.epochs):
            for x, y in zip(images.split(job.batch_size), labels.split(job.batch_size), strict=True):
                optimizer.zero_grad()
                functional.cross_entropy(network(x), y).backward()
                optimizer.step()
        metrics = MetricRecord({"num-examples": len(labels)})
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def main(folder: str) -> None:
    """Runs the job of a folder."""
    job, app, at = Job(folder), ServerApp(), []

    @app.main()
    def serve(grid, context) -> None:
        part = {"fraction_train": job.cohort / job.clients, "fraction_evaluate": 0.0}
        strategy = FedAvg(**part, min_train_nodes=job.cohort, min_available_nodes=job.clients)
        of = {"initial_arrays": ArrayRecord(OrderedDict(job.weights)), "num_rounds": job.warm_up + job.rounds}
        result = strategy.start(grid=grid, **of, evaluate_fn=lambda number, arrays: at.append(job.now()))
        job.report(at, result.arrays.to_torch_state_dict(), "flwr", "ray")

    os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parent)  # where the actors find this module
    on_gpu = 1 / job.processes if job.device == "cuda" else 0.0
    resources = {"init_args": {"num_cpus": job.processes}, "client_resources": {"num_cpus": 1, "num_gpus": on_gpu}}
    run_simulation(app, client_app(folder), num_supernodes=job.clients, backend_config=resources)


if __name__ == "__main__":
    import run_flower  # what a module defines the actors can import, what a script defines they cannot

    run_flower.main(sys.argv[1])
