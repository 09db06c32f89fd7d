"""Flower's client, in a module of its own: Ray's actors import it, while what a script defines is not theirs."""

import functools

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
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
