"""A small convolutional network with batch norm, for the 8x8 digits and for quick runs on larger images."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_ssl.models.layers import Conv, torch_linear
from fedjax_ssl.models.norm import BatchNorm


class CNN(nn.Module):
    """Three times 3x3 convolution, batch norm, ReLU, with 1, 2, 4 times `width` channels and strides 1, 2, 2.

    Ends in a global average pool and a linear layer, so that it takes images of any size.

    Attributes:
        num_classes: C.
        conv: the convolution, `Conv` with its lowering and dtype bound.
        width: channels of the first layer.
    """

    num_classes: int
    conv: Callable[..., nn.Module] = Conv
    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Images float32 [B, H, W, ch] -> logits float32 [B, C]."""
        for factor, stride in ((1, 1), (2, 2), (4, 2)):
            x = nn.relu(BatchNorm()(self.conv(self.width * factor, strides=stride)(x), mask, train))
        pooled = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        return nn.Dense(self.num_classes, kernel_init=torch_linear)(pooled)
