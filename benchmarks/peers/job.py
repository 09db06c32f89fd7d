"""What the peers' programs share: the job that `benchmarks/compare.py` hands them, the network in PyTorch, and their report.

The programs of this folder run in the peers' own virtual environments, which have neither JAX nor this package: each is a
script, given a folder with `job.json` and `data.npz`, that leaves `report.json` and, in `weights.npz`, the final global model.
"""

import json
import pathlib
import platform
import time
from collections import OrderedDict
from importlib import metadata

import numpy as np
import torch
from torch import nn


class Job:
    """A job read from a folder; each setting that `benchmarks/compare.py` gives it is an attribute, too.

    `inputs` are each client's normalized images [n, ch, H, W] and labels [n], on the device, `weights` the initial model.
    FedDure also has the clients' `unlabeled` images, and their F-regs as `regulators`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)
        vars(self).update(json.loads((self.folder / "job.json").read_text()))
        self.stored = torch.float64 if self.float64 else torch.float32  # `dtype` may be less within a network
        self.layout = torch.channels_last if self.channels_last else torch.contiguous_format
        torch.set_default_dtype(self.stored)
        torch.set_num_threads(max(1, self.threads // self.processes))
        torch.set_float32_matmul_precision("high" if self.precision == "tensorfloat32" else "highest")
        torch.backends.cudnn.allow_tf32 = self.precision == "tensorfloat32"
        torch.backends.cudnn.benchmark = True
        with np.load(self.folder / "data.npz") as data:
            mean, std = np.float32(data["mean"]), np.float32(data["std"])[:, None, None]
            self.weights = {key.removeprefix("w:"): torch.from_numpy(data[key]) for key in data.files if key.startswith("w:")}
            self.regulators = {
                key.removeprefix("f:"): torch.from_numpy(data[key]) for key in data.files if key.startswith("f:")
            }

            def normalized(images: np.ndarray) -> torch.Tensor:
                x = torch.from_numpy(np.ascontiguousarray((np.float32(images) / 255 - mean).transpose(0, 3, 1, 2) / std))
                return x.to(self.device, self.stored).contiguous(memory_format=self.layout)

            pairs = zip(data["images"], data["labels"], strict=True)
            self.inputs = [(normalized(x), torch.from_numpy(np.int64(y)).to(self.device)) for x, y in pairs]
            self.unlabeled = [normalized(x) for x in data["unlabeled"]] if "unlabeled" in data.files else []

    def now(self) -> float:
        """The time, once the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def report(self, at: list[float], state: dict[str, torch.Tensor], *packages: str) -> None:
        """Writes the seconds between the times `at`, without those of the warm-up, and the model."""
        found = {
            "seconds": np.diff(at)[self.warm_up :].tolist(),
            "device": f"1 x {torch.cuda.get_device_name()}" if self.device == "cuda" else self.device,
            "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in ("torch", *packages)},
        }
        np.savez(self.folder / "weights.npz", **{name: value.detach().cpu().numpy() for name, value in state.items()})
        (self.folder / "report.json").write_text(json.dumps(found))


class EmnistCNN(nn.Sequential):
    """The network `emnist_cnn`: two convolutions, a max pool, two linear layers; images [B, ch, H, W] -> logits [B, C]."""

    def __init__(self, dropout: bool) -> None:
        first, second = (0.25, 0.5) if dropout else (0.0, 0.0)
        convs = {"conv1": nn.Conv2d(3, 32, 3), "relu1": nn.ReLU(), "conv2": nn.Conv2d(32, 64, 3), "relu2": nn.ReLU()}
        between = {"pool": nn.MaxPool2d(2), "dropout1": nn.Dropout(first), "flatten": nn.Flatten()}
        linears = {"linear1": nn.Linear(12544, 128), "relu3": nn.ReLU(), "dropout2": nn.Dropout(second)}
        super().__init__(OrderedDict(convs | between | linears | {"linear2": nn.Linear(128, 10)}))
