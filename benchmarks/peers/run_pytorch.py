"""Federated averaging in a plain PyTorch loop: one client after another, one network."""

import copy

import numpy as np
import torch
from job import now, read, train


def main() -> None:
    """Runs the job of the command line."""
    job = read()
    network, rng = job.network(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(network.parameters(), lr=job.learning_rate)
    at = [now(job)]
    for _ in range(job.warm_up + job.rounds):
        start = copy.deepcopy(network.state_dict())
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in rng.choice(job.clients, job.cohort, replace=False):
            network.load_state_dict(start)
            train(network, optimizer, job, int(client))
            for name, value in network.state_dict().items():
                total[name].add_(value, alpha=1 / job.cohort)
        network.load_state_dict(total)
        at.append(now(job))
    job.report(at, network.state_dict())


if __name__ == "__main__":
    main()
