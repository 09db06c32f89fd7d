"""What the peers' programs share: the job that `benchmarks/compare.py` hands them, the network in PyTorch, and their report.

The programs of this folder run in the peers' own virtual environments, which have neither JAX nor this package: each is a
script, given a folder with `job.json` and `data.npz`, that leaves `report.json` and, in `weights.npz`, the global model at its
end.
"""

import json
import pathlib
import sys
import time
from importlib import metadata

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Job:
    """A job read from the folder that the command line names.

    Attributes:
        settings: of the job: `clients`, `cohort`, `batch_size`, `epochs`, `learning_rate`, `dropout`; `warm_up` and `rounds`,
            to leave out and to time; `threads` in all, over which many `processes`; `device`, PyTorch's name of it;
            `precision` of float32 products; and, of (FL)^2, `confidence`, `rho`, `depth`, `width`, `eval_batch_size`,
            `channels_last`. Each is an attribute, too.
        inputs: of each client, images float32 [n, ch, H, W], normalized, and labels int64 [n], on the device.
        weights: name -> float32 array, the initial model by PyTorch's names and layouts.
    """

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)
        self.settings = json.loads((self.folder / "job.json").read_text())
        vars(self).update(self.settings)
        torch.set_num_threads(self.threads // self.processes)
        torch.set_float32_matmul_precision("high" if self.precision == "tensorfloat32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.precision == "tensorfloat32"
        torch.backends.cudnn.benchmark = True
        with np.load(self.folder / "data.npz") as data:
            mean, std = np.float32(data["mean"]), np.float32(data["std"])
            self.weights = {key.removeprefix("w:"): data[key] for key in data.files if key.startswith("w:")}
            self.inputs = [
                (
                    self._on_device((np.float32(images) / 255 - mean).transpose(0, 3, 1, 2) / std[:, None, None]),
                    self._on_device(y),
                )
                for images, y in zip(data["images"], np.int64(data["labels"]), strict=True)
            ]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def network(self) -> nn.Module:
        """The network with the initial weights."""
        network = EmnistCNN(self.dropout).to(self.device)
        network.load_state_dict({name: torch.from_numpy(value) for name, value in self.weights.items()})
        return network

    def wait(self) -> None:
        """Returns once the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def report(self, at: list[float], state: dict[str, torch.Tensor], *packages: str) -> None:
        """Writes the seconds between the times `at`, without those of the warm-up, and the model."""
        seconds = np.diff(at)[self.warm_up :].tolist()
        versions = {name: metadata.version(name) for name in ("torch", *packages)}
        np.savez(self.folder / "weights.npz", **{name: value.detach().cpu().numpy() for name, value in state.items()})
        (self.folder / "report.json").write_text(json.dumps({"seconds": seconds, "versions": versions}))


def read() -> Job:
    """The job of the folder that the command line names."""
    return Job(sys.argv[1])


def now(job: Job) -> float:
    """The time, once the device is at rest."""
    job.wait()
    return time.perf_counter()


class EmnistCNN(nn.Module):
    """The network `emnist_cnn`: two convolutions, a max pool, two linear layers."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.linear1, self.linear2 = nn.Linear(12544, 128), nn.Linear(128, 10)
        self.rates = (0.25, 0.5) if dropout else (0.0, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, ch, H, W] -> logits [B, C]."""
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = functional.dropout(functional.max_pool2d(x, 2), self.rates[0], self.training)
        x = functional.relu(self.linear1(x.flatten(1)))
        return self.linear2(functional.dropout(x, self.rates[1], self.training))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, job: Job, client: int) -> None:
    """A client's local epochs, in the order in which its examples lie."""
    images, labels = job.inputs[client]
    network.train()
    for _ in range(job.epochs):
        for x, y in zip(images.split(job.batch_size), labels.split(job.batch_size), strict=True):
            optimizer.zero_grad()
            functional.cross_entropy(network(x), y).backward()
            optimizer.step()
