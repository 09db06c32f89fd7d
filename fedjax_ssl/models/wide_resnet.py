"""Wide residual networks for small images, in the form that (FL)^2 and SemiFL train (Zagoruyko & Komodakis, 2016)."""

import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax.numpy as jnp
from flax import linen as nn
from pydantic import Field

from fedjax_ssl.arrays import Features, Inputs, Maps, NewMaps
from fedjax_ssl.models.layers import check_images
from fedjax_ssl.models.network import Network


class Block(nn.Module):
    """Pre-activation residual block of two 3x3 convolutions, the first with the stride, and leaky ReLU of `negative_slope`.

    Where the number of channels changes, a 1x1 shortcut of the same stride sees the activated input, as the first convolution
    does, or the raw one (`raw_shortcut`); otherwise the raw input is added.
    """

    features: int
    stride: int
    conv: Callable[..., nn.Module]
    negative_slope: float = 0.0
    raw_shortcut: bool = False
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Maps, train: bool) -> NewMaps:
        """[B, H, W, ch] -> [B, H / stride, W / stride, features]."""
        norm = functools.partial(nn.BatchNorm, not train, epsilon=self.epsilon)
        activated = nn.leaky_relu(norm()(x), self.negative_slope)
        y = self.conv(self.features, strides=self.stride)(activated)
        y = self.conv(self.features)(nn.leaky_relu(norm()(y), self.negative_slope))
        if x.shape[-1] != self.features:
            x = self.conv(self.features, kernel_size=1, strides=self.stride, padding=0)(x if self.raw_shortcut else activated)
        return x + y


class WideResNet(Network):
    """WRN-depth-width: a 3x3 stem of 16, three stages of 16, 32, 64 times `width` channels, strides 1, 2, 2.

    Ends in batch norm, ReLU, global average pool and a linear layer; no dropout. Initialization: Kaiming normal (fan out) for
    convolutions, U(-1/sqrt(fan_in), 1/sqrt(fan_in)) and bias 0 for the linear layer. A depth of 6 n + 4 makes n blocks a stage;
    (FL)^2's is 28. The width is 2 for CIFAR-10 and SVHN (1,467,610 parameters), 8 for CIFAR-100 (23,401,012).

    `fl2` ((FL)^2, SemiFL): ReLU, and every 1x1 shortcut sees the activated input. `fixmatch` (also FreeMatch): leaky ReLU of
    slope .1. Only the first stage's shortcut sees the activated input; the others see the raw one. `usb` (USB's code): leaky
    ReLU of slope .1, every shortcut sees the activated input, and batch norm adds 1e-3 to variances. The parameters are the
    same.
    """

    depth: Annotated[int, Field(ge=10, le=100, description="Layers, 6 n + 4 for n blocks in each of three stages.")] = 28
    width: Annotated[int, Field(ge=1, le=64, description="Factor of the channels 16, 32 and 64 of the stages.")] = 2
    variant: Annotated[
        Literal["fl2", "fixmatch", "usb"],
        Field(
            description="Form of the blocks: that of (FL)^2 and SemiFL; FixMatch's, with leaky ReLU and other shortcuts; or "
            "that of the SSL benchmark USB, with leaky ReLU alone."
        ),
    ] = "fl2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth % 6 != 4:
            raise ValueError(f"depth={self.depth} for wide_resnet: accepted: 6 n + 4 (10, 16, 22, 28, ...)")

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset({"Conv_0", *(f"Block_{i}" for i in range((self.depth - 4) // 6))})

    def features(self, images: Inputs, train: bool) -> Features:
        """The 64 `width` averages over each image."""
        check_images("wide_resnet", images, least=1)
        slope = 0.0 if self.variant == "fl2" else 0.1
        epsilon = 1e-3 if self.variant == "usb" else 1e-5
        x = self.conv(16)(images)
        for stage in range(3):
            for block in range((self.depth - 4) // 6):
                stride = 2 if stage > 0 and block == 0 else 1
                raw_shortcut = self.variant == "fixmatch" and stage > 0
                x = Block(16 * self.width * 2**stage, stride, self.conv, slope, raw_shortcut, epsilon)(x, train)
        x = nn.leaky_relu(nn.BatchNorm(not train, epsilon=epsilon)(x), slope)
        return jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
