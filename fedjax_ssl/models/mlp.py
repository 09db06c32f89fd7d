"""Networks without convolution or batch norm: quick to compile, and small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn

from fedjax_ssl.arrays import Inputs, Mask, Outputs
from fedjax_ssl.models.initializers import INITIALIZATIONS, torch_uniform
from fedjax_ssl.models.layers import Conv, dense


class Linear(nn.Module):
    """Multinomial logistic regression on the flattened input."""

    num_classes: int
    conv: Callable[..., nn.Module] = Conv

    @nn.compact
    def __call__(self, images: Inputs, mask: Mask | None = None, train: bool = False, features_only: bool = False) -> Outputs:
        """Inputs float32 [B, ...] -> logits float32 [B, C], or the inputs [B, D] as they are: its features."""
        x = images.reshape(images.shape[0], -1)
        if features_only:
            return x.astype(jnp.float32)
        return nn.Dense(self.num_classes, kernel_init=torch_uniform)(x)


class MLP(nn.Module):
    """One hidden layer of ReLU units on the flattened input.

    Attributes:
        hidden: units of the hidden layer.
    """

    num_classes: int
    conv: Callable[..., nn.Module] = Conv
    hidden: int = 64

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset({"Dense_0"})

    @nn.compact
    def __call__(self, images: Inputs, mask: Mask | None = None, train: bool = False, features_only: bool = False) -> Outputs:
        """Inputs float32 [B, ...] -> logits float32 [B, C], or the hidden units [B, hidden]."""
        x = images.reshape(images.shape[0], -1)
        x = nn.relu(dense(x, self.hidden, INITIALIZATIONS["kaiming"]))
        x = x.astype(jnp.float32)
        return x if features_only else nn.Dense(self.num_classes, kernel_init=torch_uniform)(x)
