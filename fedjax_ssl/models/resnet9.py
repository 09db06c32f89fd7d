"""The three nine-layer residual networks of FedDure, FedMatch and SemiFL."""

import functools
from collections.abc import Callable
from typing import Annotated, Literal

import jax.numpy as jnp
from flax import linen as nn
from pydantic import Field

from fedjax_ssl.arrays import Features, Inputs, Logits, Maps, NewMaps
from fedjax_ssl.models.initializers import INITIALIZATIONS, Initialization
from fedjax_ssl.models.layers import check_images, dense, max_pool
from fedjax_ssl.models.network import Network
from fedjax_ssl.models.wide_resnet import Block

# What each paper's code does: PyTorch's defaults, Keras's VarianceScaling(), Kaiming normal set by hand.
_PAPER_INITIALIZATION = {"feddure": "torch", "fedmatch": "flax", "semifl": "kaiming"}


class ResNet9(Network):
    """ResNet-9 in the variants of three papers.

    `feddure` (6,575,370 parameters for 3 channels and 10 classes) is the network below. Each number is a layer with so many
    channels: 3x3 convolution with bias, batch norm, ReLU. `pool` is a 2x2 max pool, and x + (128, 128)(x) is the sum of x and
    the output of two such layers, without a ReLU after it.

        64; 128, pool; x + (128, 128)(x); 256, pool; 512, pool; x + (512, 512)(x); 4x4 max pool; linear

    `fedmatch` (6,568,640): the same without batch norm and without any bias, the linear layer's included. `semifl` (4,901,450):
    a stem of 64, then one pre-activation block each of 64, 128, 256 and 512 channels at strides 1, 2, 2, 2 as in WideResNet,
    batch norm, ReLU, global average pool, linear. Initialization `paper` is that of the variant's own code.
    """

    variant: Annotated[Literal["feddure", "fedmatch", "semifl"], Field(description="Paper whose network it is.")] = "feddure"
    initialization: Annotated[
        Literal["paper", "torch", "flax", "kaiming"],
        Field(description="How parameters start: as in the variant's own code, as in PyTorch, as in Flax, or by He's rule."),
    ] = "paper"

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns. The first stage of `feddure` and `fedmatch` is that of 128 channels, with its residual."""
        if self.variant == "semifl":
            return frozenset({"Conv_0", "Block_0"})
        layers = ("Conv", "BatchNorm") if self.variant == "feddure" else ("Conv",)
        return frozenset(f"{layer}_{i}" for layer in layers for i in range(4))

    def features(self, images: Inputs, train: bool) -> Features:
        """512 features of images of 8x8 or more; the papers' are of 32x32."""
        check_images("resnet9", images, least=8)
        init = self._initialization()
        conv = functools.partial(self.conv, kernel_init=init.conv_kernel, bias_init=init.bias)
        features = self._preactivation if self.variant == "semifl" else self._postactivation
        return features(conv, images, train)

    def classifier(self, x: Features) -> Logits:
        """A linear layer."""
        return dense(x.astype(jnp.float32), self.num_classes, self._initialization(), use_bias=self.variant != "fedmatch")

    @nn.nowrap
    def _initialization(self) -> Initialization:
        return INITIALIZATIONS[_PAPER_INITIALIZATION[self.variant] if self.initialization == "paper" else self.initialization]

    def _postactivation(self, conv: Callable[..., nn.Module], x: Maps, train: bool) -> Features:
        normed = self.variant == "feddure"

        def layer(x: Maps, features: int) -> NewMaps:
            x = conv(features, use_bias=normed)(x)
            return nn.relu(nn.BatchNorm(not train)(x) if normed else x)

        x = layer(x, 64)
        x = max_pool(layer(x, 128))
        x = x + layer(layer(x, 128), 128)
        x = max_pool(layer(x, 256))
        x = max_pool(layer(x, 512))
        x = x + layer(layer(x, 512), 512)
        # The 4x4 pool: at 32x32 it covers the whole image, and so it does here at every size.
        return jnp.max(x, axis=(1, 2))

    def _preactivation(self, conv: Callable[..., nn.Module], x: Maps, train: bool) -> Features:
        x = conv(64)(x)
        for features, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            x = Block(features, stride, conv)(x, train)
        x = nn.relu(nn.BatchNorm(not train)(x))
        return jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
