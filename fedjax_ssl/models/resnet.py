"""Residual networks for small images, as FedLabel and SAGE train them (He et al. 2016, with a stem for 32x32)."""

import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax.numpy as jnp
from flax import linen as nn
from pydantic import Field

from fedjax_ssl.arrays import Features, Inputs, Logits, Maps, NewMaps
from fedjax_ssl.models.initializers import INITIALIZATIONS, InitializationName
from fedjax_ssl.models.layers import check_images, dense
from fedjax_ssl.models.network import Network

BLOCKS = {8: (1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}  # depth -> blocks in each stage


class ResidualBlock(nn.Module):
    """ReLU(shortcut(x) + convolutions(x)), batch norm after each convolution, ReLU between them.

    The convolutions are two 3x3 ones, or in the bottleneck form 1x1, 3x3 and 1x1, the last with four times the channels
    (`features`). The stride is that of the first 3x3 convolution and of the shortcut: a 1x1 convolution with batch norm where
    the number of channels changes, as it does at stride 2, else x itself.
    """

    features: int
    stride: int
    bottleneck: bool
    conv: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Maps, train: bool) -> NewMaps:
        """[B, H, W, ch] -> [B, H / stride, W / stride, features, or 4 features]."""

        def normed(x: Maps, features: int, size: int, stride: int = 1) -> NewMaps:
            x = self.conv(features, kernel_size=size, strides=stride, padding=size // 2)(x)
            return nn.BatchNorm(not train)(x)

        out = 4 * self.features if self.bottleneck else self.features
        if self.bottleneck:
            y = nn.relu(normed(x, self.features, 1))
            y = nn.relu(normed(y, self.features, 3, self.stride))
            y = normed(y, out, 1)
        else:
            y = nn.relu(normed(x, self.features, 3, self.stride))
            y = normed(y, out, 3)
        if x.shape[-1] != out:
            x = normed(x, out, 1, self.stride)
        return nn.relu(x + y)


class ResNet(Network):
    """ResNet-8, -18, -34 or -50 with a 3x3 stem of 64 at stride 1 and no pool after it.

    Four stages of 64, 128, 256 and 512 channels (ResNet-8: three) at strides 1, 2, 2, 2, global average pool (4x4 at 28x28 and
    32x32), linear. Convolutions have no bias; 50 has bottleneck blocks. FedLabel's code keeps PyTorch's initialization; SAGE's,
    which trains ResNet-8, has `kaiming`. Parameters with 10 classes: 1,227,594 (ResNet-8), 11,173,962 (-18)
    and 21,282,122 (-34); with 100 classes: 23,705,252 (-50).
    """

    depth: Annotated[Literal[8, 18, 34, 50], Field(description="Number of layers; 50 has bottleneck blocks.")] = 18
    initialization: InitializationName = "torch"

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset({"Conv_0", "BatchNorm_0", *(f"ResidualBlock_{i}" for i in range(BLOCKS[self.depth][0]))})

    def features(self, images: Inputs, train: bool) -> Features:
        """The 512 averages over each image (ResNet-8: 256, ResNet-50: 2048)."""
        check_images("resnet", images, least=1)
        init = INITIALIZATIONS[self.initialization]
        conv = functools.partial(self.conv, kernel_init=init.conv_kernel)
        x = nn.relu(nn.BatchNorm(not train)(conv(64)(images)))
        for stage, blocks in enumerate(BLOCKS[self.depth]):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = ResidualBlock(64 * 2**stage, stride, self.depth == 50, conv)(x, train)
        return jnp.mean(x, axis=(1, 2), dtype=jnp.float32)

    def classifier(self, x: Features) -> Logits:
        """A linear layer."""
        return dense(x, self.num_classes, INITIALIZATIONS[self.initialization])
