"""Federated averaging of a cohort's clients in a plain PyTorch loop, on pfl-research's CNN."""

import sys

import torch
from job import EmnistCNN, Job
from torch.nn import functional

if __name__ == "__main__":
    job = Job(sys.argv[1])
    network = EmnistCNN(job.dropout).to(job.device, memory_format=job.layout).train()
    weights = {name: value.to(job.device, job.stored) for name, value in job.weights.items()}
    at = [job.now()]
    for number in range(job.warm_up + job.rounds):
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        for client in range(number * job.cohort, (number + 1) * job.cohort):
            network.load_state_dict(weights)
            optimizer = torch.optim.SGD(network.parameters(), job.learning_rate)
            images, labels = job.inputs[client % job.clients]
            for _ in range(job.epochs):
                order = torch.randperm(len(images), device=images.device)
                for batch in order.split(job.batch_size):
                    optimizer.zero_grad()
                    functional.cross_entropy(network(images[batch]), labels[batch]).backward()
                    optimizer.step()
            with torch.no_grad():
                for name, value in network.named_parameters():
                    total[name] += value / job.cohort
        weights = total
        at.append(job.now())
    job.report(at, weights)
