"""The parameters of torch networks under the names that they have here, for start weights."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_ssl.models.resnet import BLOCKS

Names = Iterator[tuple[str, str]]  # of a layer: torch's, and its path here


def _resnet(options: Mapping[str, Any]) -> Names:
    """As torchvision names ResNet-18, -34 and -50."""
    convolutions = 3 if options["depth"] == 50 else 2
    yield from (("conv1", "Conv_0"), ("bn1", "BatchNorm_0"), ("fc", "Dense_0"))
    number = 0
    for stage, blocks in enumerate(BLOCKS[options["depth"]], start=1):
        for block in range(blocks):
            theirs, ours = f"layer{stage}.{block}", f"ResidualBlock_{number}"
            for i in range(convolutions):
                yield f"{theirs}.conv{i + 1}", f"{ours}/Conv_{i}"
                yield f"{theirs}.bn{i + 1}", f"{ours}/BatchNorm_{i}"
            yield f"{theirs}.downsample.0", f"{ours}/Conv_{convolutions}"
            yield f"{theirs}.downsample.1", f"{ours}/BatchNorm_{convolutions}"
            number += 1


def _wide_resnet(options: Mapping[str, Any]) -> Names:
    """As USB and TorchSSL name wide residual networks."""
    blocks = (options["depth"] - 4) // 6
    yield from (("conv1", "Conv_0"), ("bn1", "BatchNorm_0"), ("fc", "Dense_0"))
    for number in range(3 * blocks):
        theirs, ours = f"block{number // blocks + 1}.layer.{number % blocks}", f"Block_{number}"
        for i in range(2):
            yield f"{theirs}.bn{i + 1}", f"{ours}/BatchNorm_{i}"
            yield f"{theirs}.conv{i + 1}", f"{ours}/Conv_{i}"
        yield f"{theirs}.convShortcut", f"{ours}/Conv_2"


TORCH_NAMES: dict[str, Callable[[Mapping[str, Any]], Names]] = {"resnet": _resnet, "wide_resnet": _wide_resnet}
"""For each network whose torch form is known, from its options to the names of its layers."""

_STATISTICS = {"running_mean": "mean", "running_var": "var"}


def from_torch(arrays: Mapping[str, np.ndarray], network: str, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A torch network's parameters and statistics, by our names, such as `Conv_0/kernel` and `batch_stats/BatchNorm_0/mean`.

    Kernels of convolutions [F, ch, kh, kw] become [kh, kw, ch, F], matrices [F, D] become [D, F]. A name that no layer here has
    stays as it is. ValueError for a network whose torch form is not known.
    """
    if network not in TORCH_NAMES:
        accepted = f"those of {' or '.join(TORCH_NAMES)}, or a file that save_model wrote"
        raise ValueError(f"got torch's names with model.name={network}, accepted: {accepted}")
    known, found = dict(TORCH_NAMES[network](options)), {}
    for name, x in arrays.items():
        layer, _, last = re.sub(r"^module\.", "", name).rpartition(".")
        if last == "num_batches_tracked":
            continue
        path = known.get(layer)
        if path is None:
            found[name] = x
        elif last in _STATISTICS:
            found[f"batch_stats/{path}/{_STATISTICS[last]}"] = x
        elif last == "bias":
            found[f"{path}/bias"] = x
        else:
            kernel = np.transpose(x, (2, 3, 1, 0) if x.ndim == 4 else tuple(reversed(range(x.ndim))))
            found[f"{path}/{'kernel' if x.ndim > 1 else 'scale'}"] = np.ascontiguousarray(kernel)
    return _without_biases(found, options["variant"]) if network == "wide_resnet" else found


def _without_biases(arrays: dict[str, np.ndarray], variant: str) -> dict[str, np.ndarray]:
    """A wide residual network without the biases of its convolutions, which batch norm takes away again.

    A bias moves what the block adds up by as much for every image, so its only trace is in the means of later batch norms.
    """
    blocks = sum(1 for name in arrays if re.fullmatch(r"Block_\d+/Conv_1/kernel", name))
    biases = {name: arrays.pop(name) for name in list(arrays) if re.fullmatch(r"(Block_\d+/)?Conv_\d/bias", name)}
    if not biases:
        return arrays
    if variant != "usb":
        raise ValueError(f"got convolutions with biases, as USB's, with model.variant={variant}, accepted: model.variant=usb")

    def lowered(norm: str, by: Any) -> None:
        arrays[f"batch_stats/{norm}/mean"] = arrays[f"batch_stats/{norm}/mean"] - by

    moved: Any = biases["Conv_0/bias"]
    for number in range(blocks):
        block = f"Block_{number}"
        lowered(f"{block}/BatchNorm_0", moved)
        lowered(f"{block}/BatchNorm_1", biases[f"{block}/Conv_0/bias"])
        shortcut = biases.get(f"{block}/Conv_2/bias")
        moved = biases[f"{block}/Conv_1/bias"] + (moved if shortcut is None else shortcut)
    lowered("BatchNorm_0", moved)
    return arrays
