"""Flower's client, in a module of its own: Ray's actors import it, while what a script defines is not theirs."""

import functools

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from job import Job, train


@functools.cache
def job_of(folder: str) -> Job:
    """An actor's job, read once."""
    return Job(folder)


def client_app(folder: str) -> ClientApp:
    """What the actors run."""
    app = ClientApp()

    @app.train()
    def fit(message: Message, context) -> Message:
        job = job_of(folder)
        network = job.network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(network.parameters(), lr=job.learning_rate)
        train(network, optimizer, job, context.node_config["partition-id"])
        content = {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": len(job.inputs[0][1])}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app
