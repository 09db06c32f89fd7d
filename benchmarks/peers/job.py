"""What the peers' programs share: the job that `benchmarks/compare.py` hands them, the network in PyTorch, and their report.

The programs of this folder run in the peers' own virtual environments, which have neither JAX nor this package: each is a
script, given a folder with `job.json` and `data.npz`, that leaves `report.json` and, in `weights.npz`, the global model at its
end.
"""

import json
import pathlib
import platform
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
        settings: as `benchmarks/compare.py` has them; each is an attribute, too.
        dtype: of images and weights, float32 or float64.
        layout: their memory format.
        inputs: of each client, images [n, ch, H, W], normalized, and labels int64 [n], on the device.
        weights: name -> float32 array, the initial model by PyTorch's names and layouts.
    """

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)
        self.settings = json.loads((self.folder / "job.json").read_text())
        vars(self).update(self.settings)
        self.dtype = torch.float64 if self.float64 else torch.float32
        self.layout = torch.channels_last if self.channels_last else torch.contiguous_format
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(max(1, self.threads // self.processes))
        torch.set_float32_matmul_precision("high" if self.precision == "tensorfloat32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.precision == "tensorfloat32"
        torch.backends.cudnn.benchmark = True
        with np.load(self.folder / "data.npz") as data:
            self._mean, self._std = np.float32(data["mean"]), np.float32(data["std"])
            self.weights = {key.removeprefix("w:"): data[key] for key in data.files if key.startswith("w:")}
            self.inputs = [self._on_device(*one) for one in zip(data["images"], data["labels"], strict=True)]

    def _on_device(self, images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        normalized = (np.float32(images) / 255 - self._mean).transpose(0, 3, 1, 2) / self._std[:, None, None]
        x, y = torch.from_numpy(np.ascontiguousarray(normalized)), torch.from_numpy(np.int64(labels))
        return x.to(self.device, self.dtype).contiguous(memory_format=self.layout), y.to(self.device)

    def network(self) -> nn.Module:
        """The network with the initial weights."""
        network = EmnistCNN(self.dropout).to(self.device, memory_format=self.layout)
        network.load_state_dict({name: torch.from_numpy(value) for name, value in self.weights.items()})
        return network

    def wait(self) -> None:
        """Returns once the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def report(self, at: list[float], state: dict[str, torch.Tensor], *packages: str) -> None:
        """Writes the seconds between the times `at`, without those of the warm-up, and the model."""
        found = {
            "seconds": np.diff(at)[self.warm_up :].tolist(),
            "device": f"1 x {torch.cuda.get_device_name()}" if self.device == "cuda" else self.device,
            "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in ("torch", *packages)},
        }
        np.savez(self.folder / "weights.npz", **{name: value.detach().cpu().numpy() for name, value in state.items()})
        (self.folder / "report.json").write_text(json.dumps(found))


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
