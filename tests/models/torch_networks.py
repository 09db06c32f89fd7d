"""Networks as torch's codes define and name them, computed from a dict of their arrays by NumPy or by torch."""

import numpy as np

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


class InNumPy:
    """Images [B, ch, H, W] float64."""

    def __init__(self, arrays):
        self.arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}

    def conv(self, name, x, stride=1):
        kernel = self.arrays[f"{name}.weight"]
        size = kernel.shape[2]
        padding = size // 2
        x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))[:, :, ::stride, ::stride]
        out = np.einsum("bchwij,fcij->bfhw", windows, kernel, optimize=True)
        return out + self.arrays.get(f"{name}.bias", np.zeros(len(kernel)))[:, None, None]

    def norm(self, name, x, eps=1e-5):
        scale, bias, mean, var = (
            self.arrays[f"{name}.{part}"][:, None, None] for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / np.sqrt(var + eps) * scale + bias

    def relu(self, x, slope=0.0):
        return np.where(x > 0, x, slope * x)

    def linear(self, name, x):
        return x.mean((2, 3)) @ self.arrays[f"{name}.weight"].T + self.arrays[f"{name}.bias"]


class InTorch(InNumPy):
    """The same by torch's functions, float32."""

    def __init__(self, arrays):
        import torch

        self.arrays = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}

    def conv(self, name, x, stride=1):
        from torch.nn.functional import conv2d

        kernel = self.arrays[f"{name}.weight"]
        return conv2d(x, kernel, self.arrays.get(f"{name}.bias"), stride, kernel.shape[2] // 2)

    def norm(self, name, x, eps=1e-5):
        from torch.nn.functional import batch_norm

        parts = (self.arrays[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return batch_norm(x, *parts, eps=eps)

    def relu(self, x, slope=0.0):
        from torch.nn.functional import leaky_relu

        return leaky_relu(x, slope)


def resnet(net, x, depth):
    """torchvision's, with a stem for small images."""
    x = net.relu(net.norm("bn1", net.conv("conv1", x)))
    for stage, blocks in enumerate(BLOCKS[depth], start=1):
        for block in range(blocks):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            strides = (1, stride, 1) if depth == 50 else (stride, 1)
            y = x
            for i, own in enumerate(strides, start=1):
                y = net.norm(f"{name}.bn{i}", net.conv(f"{name}.conv{i}", y, own))
                y = net.relu(y) if i < len(strides) else y
            if f"{name}.downsample.0.weight" in net.arrays:
                x = net.norm(f"{name}.downsample.1", net.conv(f"{name}.downsample.0", x, stride))
            x = net.relu(x + y)
    return net.linear("fc", x)


def wide_resnet(net, x, depth):
    """USB's."""
    x = net.conv("conv1", x)
    for stage in range(1, 4):
        for block in range((depth - 4) // 6):
            name, stride = f"block{stage}.layer.{block}", 2 if stage > 1 and block == 0 else 1
            activated = net.relu(net.norm(f"{name}.bn1", x, 1e-3), 0.1)
            y = net.relu(net.norm(f"{name}.bn2", net.conv(f"{name}.conv1", activated, stride), 1e-3), 0.1)
            y = net.conv(f"{name}.conv2", y)
            x = y + (net.conv(f"{name}.convShortcut", activated, stride) if f"{name}.convShortcut.weight" in net.arrays else x)
    return net.linear("fc", net.relu(net.norm("bn1", x, 1e-3), 0.1))


def arrays_of(shapes, seed=0):
    """Random arrays of the layers (name, kind, shape of the kernel), such that activations keep their size."""
    random, found = np.random.default_rng(seed), {}
    for name, kind, shape in shapes:
        if kind == "norm":
            found[f"{name}.weight"], found[f"{name}.running_var"] = random.uniform(0.5, 1.5, (2, *shape))
            found[f"{name}.bias"], found[f"{name}.running_mean"] = random.normal(0, 0.3, (2, *shape))
            found[f"{name}.num_batches_tracked"] = np.int64(3)
            continue
        found[f"{name}.weight"] = random.normal(0, (1 / np.prod(shape[1:])) ** 0.5, shape)
        if kind in ("linear", "biased"):
            found[f"{name}.bias"] = random.normal(0, 0.3, shape[:1])
    return {name: np.asarray(x, np.float32 if np.ndim(x) else x.dtype) for name, x in found.items()}


def resnet_shapes(depth, classes=10, stem=3):
    """The layers of torchvision's residual networks."""
    yield from (("conv1", "conv", (64, 3, stem, stem)), ("bn1", "norm", (64,)))
    before = 64
    for stage, blocks in enumerate(BLOCKS[depth], start=1):
        width = 32 * 2**stage
        out = 4 * width if depth == 50 else width
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            kernels = [(width, before, 3), (out, width, 3)]
            if depth == 50:
                kernels = [(width, before, 1), (width, width, 3), (out, width, 1)]
            for i, (features, channels, size) in enumerate(kernels, start=1):
                yield f"{name}.conv{i}", "conv", (features, channels, size, size)
                yield f"{name}.bn{i}", "norm", (features,)
            if before != out:
                yield f"{name}.downsample.0", "conv", (out, before, 1, 1)
                yield f"{name}.downsample.1", "norm", (out,)
            before = out
    yield "fc", "linear", (classes, before)


def wide_resnet_shapes(depth, width, classes=10):
    """The layers of USB's wide residual networks, whose convolutions have biases."""
    yield "conv1", "biased", (16, 3, 3, 3)
    before = 16
    for stage in range(1, 4):
        out = 8 * width * 2**stage
        for block in range((depth - 4) // 6):
            name = f"block{stage}.layer.{block}"
            yield f"{name}.bn1", "norm", (before,)
            yield f"{name}.conv1", "biased", (out, before, 3, 3)
            yield f"{name}.bn2", "norm", (out,)
            yield f"{name}.conv2", "biased", (out, out, 3, 3)
            if before != out:
                yield f"{name}.convShortcut", "biased", (out, before, 1, 1)
            before = out
    yield from (("bn1", "norm", (before,)), ("fc", "linear", (classes, before)))
