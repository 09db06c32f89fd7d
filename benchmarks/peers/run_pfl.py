"""Federated averaging in pfl-research, as in its CIFAR-10 benchmark; under torchrun its processes share a round's clients."""

import os
import sys

import torch

if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
    # pfl gives each process a GPU of its own, and NCCL refuses two on one: here they share the first.
    os.environ["PFL_PYTORCH_DEVICE"] = "cuda:0"
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, **options: start(backend="gloo", **options)
    torch.cuda.set_device = lambda device: None

from job import EmnistCNN, Job
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional


class Network(EmnistCNN):
    """With the methods that pfl calls: the mean cross-entropy, in training mode, and metrics, once before the first round."""

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: D102
        self.train()
        return functional.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:  # noqa: D102
        self.eval()
        return {"loss": Weighted(functional.cross_entropy(self(images), labels, reduction="sum").item(), len(labels))}


class Clock(TrainingProcessCallback):
    """Notes when training began and when each round ended."""

    def __init__(self, job: Job) -> None:
        self.job, self.at = job, []

    def on_train_begin(self, *, model):  # noqa: D102
        self.at.append(self.job.now())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # noqa: D102
        self.at.append(self.job.now())
        return False, Metrics()


if __name__ == "__main__":
    job = Job(sys.argv[1])
    network = Network(job.dropout)
    network.load_state_dict(job.weights)
    model = PyTorchModel(network, torch.optim.SGD, central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0))
    # Its benchmark draws clients with replacement; one after another they all take part where the job says so.
    sampler = get_user_sampler("minimize_reuse", list(range(job.clients)))
    data = FederatedDataset(lambda client: PyTorchTensorDataset(job.inputs[client], user_id=str(client)), sampler)
    clock, rounds = Clock(job), job.warm_up + job.rounds
    of = {"central_num_iterations": rounds, "evaluation_frequency": rounds + 1}
    FederatedAveraging().run(
        NNAlgorithmParams(**of, train_cohort_size=job.cohort, val_cohort_size=0),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(local_num_epochs=job.epochs, local_learning_rate=job.learning_rate, local_batch_size=job.batch_size),
        NNEvalHyperParams(local_batch_size=None),
        [clock],
        send_metrics_to_platform=False,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        job.report(clock.at, network.state_dict(), "pfl")
    if torch.distributed.is_initialized():  # else a process may abort at its end, as a thread of gloo's is still there
        torch.distributed.destroy_process_group()
