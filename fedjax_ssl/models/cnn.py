"""Plain convolutional networks: for the digits, for EMNIST, and the two of FedSiam, FedCon and FedTriNet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from flax import linen as nn

from fedjax_ssl.arrays import Inputs, Mask, Outputs
from fedjax_ssl.models.initializers import INITIALIZATIONS, InitializationName, torch_uniform
from fedjax_ssl.models.layers import Conv, check_images, dense, dropout, max_pool
from fedjax_ssl.models.norm import BatchNorm


class CNN(nn.Module):
    """Three times 3x3 convolution, batch norm, ReLU, with 1, 2, 4 times `width` channels and strides 1, 2, 2.

    Ends in a global average pool and a linear layer, so that it takes images of any size.

    Attributes:
        width: channels of the first layer.
    """

    num_classes: int
    conv: Callable[..., nn.Module] = Conv
    width: int = 16

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset({"Conv_0", "BatchNorm_0", "Conv_1", "BatchNorm_1"})

    @nn.compact
    def __call__(self, x: Inputs, mask: Mask | None = None, train: bool = False, features_only: bool = False) -> Outputs:
        """Images float32 [B, H, W, ch] -> logits float32 [B, C], or the 4 `width` features before the linear layer."""
        check_images("cnn", x, least=1)
        for factor, stride in ((1, 1), (2, 2), (4, 2)):
            x = nn.relu(BatchNorm()(self.conv(self.width * factor, strides=stride)(x), mask, train))
        pooled = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        if features_only:
            return pooled
        return nn.Dense(self.num_classes, kernel_init=torch_uniform)(pooled)


class EmnistCNN(nn.Module):
    """Two 3x3 convolutions of 32 and 64 channels without padding, a max pool, two linear layers of 128 and C.

    ReLU follows every layer but the last, dropout of .25 the pool, and of .5 the first linear layer. For EMNIST in adaptive
    federated optimization (Reddi et al. 2021, Table 4); with 32x32x3 images, 1,626,442 parameters, the network of
    pfl-research's CIFAR-10 benchmark.

    Attributes:
        variant: `paper`, or `plain`: without dropout.
        initialization: a key of INITIALIZATIONS.
    """

    num_classes: int
    conv: Callable[..., nn.Module] = Conv
    variant: Literal["paper", "plain"] = "paper"
    initialization: InitializationName = "torch"

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset({"Conv_0", "Conv_1"})

    @nn.compact
    def __call__(self, images: Inputs, mask: Mask | None = None, train: bool = False, features_only: bool = False) -> Outputs:
        """Images [B, H, W, ch], H and W at least 6 -> logits float32 [B, C], or features (of 32x32: 12,544)."""
        check_images("emnist_cnn", images, least=6)
        init = INITIALIZATIONS[self.initialization]
        rates = (0.25, 0.5) if self.variant == "paper" else (0.0, 0.0)
        conv = functools.partial(self.conv, padding=0, use_bias=True, kernel_init=init.conv_kernel, bias_init=init.bias)
        x = nn.relu(conv(32)(images))
        x = max_pool(nn.relu(conv(64)(x)))
        x = x.reshape(x.shape[0], -1)
        if features_only:
            return x.astype(jnp.float32)
        x = dropout(self, x, rates[0])
        x = dropout(self, nn.relu(dense(x, 128, init)), rates[1])
        return dense(x.astype(jnp.float32), self.num_classes, init)


class MnistCNN(nn.Module):
    """Two 5x5 convolutions of 10 and 20 channels without padding, two linear layers: 21,840 parameters (FedSiam, Table 1).

    Each convolution is followed by a 2x2 max pool, then ReLU, as in the released code; the paper's table shows no ReLU there.

    Attributes:
        variant: `paper`: no dropout; `released`: .5, whole channels after the second convolution and values after the first
            linear layer.
        initialization: a key of INITIALIZATIONS; the released code keeps PyTorch's defaults.
    """

    num_classes: int
    conv: Callable[..., nn.Module] = Conv
    variant: Literal["paper", "released"] = "paper"
    initialization: InitializationName = "torch"

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset({"Conv_0", "Conv_1"})

    @nn.compact
    def __call__(self, images: Inputs, mask: Mask | None = None, train: bool = False, features_only: bool = False) -> Outputs:
        """Images [B, H, W, ch], H and W at least 16 (MNIST: 28) -> logits float32 [B, C], or features (MNIST: 320)."""
        check_images("mnist_cnn", images, least=16)
        init = INITIALIZATIONS[self.initialization]
        conv = functools.partial(
            self.conv, kernel_size=5, padding=0, use_bias=True, kernel_init=init.conv_kernel, bias_init=init.bias
        )
        drop = functools.partial(dropout, self, rate=0.5 if self.variant == "released" else 0.0)
        x = nn.relu(max_pool(conv(10)(images)))
        x = nn.relu(max_pool(drop(conv(20)(x), per_channel=True)))
        x = x.reshape(x.shape[0], -1)
        if features_only:
            return x.astype(jnp.float32)
        x = drop(nn.relu(dense(x, 50, init)))
        return dense(x.astype(jnp.float32), self.num_classes, init)


class CifarCNN(nn.Module):
    """Six 3x3 convolutions in three pooled pairs and three linear layers: 5,852,170 parameters on 32x32x3 (FedSiam, Table 1).

    The pairs have 32 and 64, 128 and 128, 256 and 256 channels; the first of each is followed by batch norm. ReLU follows every
    layer but the last. Linear layers: 1024, 512, C.

    Attributes:
        variant: where dropout is. `paper`: .05 on values after the second pool, .1 after the ReLU of the first two linear
            layers. `released`: .05 on whole channels after the second pool, .1 before the first linear layer and after the
            ReLU of the second.
        initialization: a key of INITIALIZATIONS; the released code keeps PyTorch's defaults.
    """

    num_classes: int
    conv: Callable[..., nn.Module] = Conv
    variant: Literal["paper", "released"] = "paper"
    initialization: InitializationName = "torch"

    @nn.nowrap
    def first_blocks(self) -> frozenset[str]:
        """See ModelFns."""
        return frozenset({"Conv_0", "BatchNorm_0", "Conv_1"})

    @nn.compact
    def __call__(self, images: Inputs, mask: Mask | None = None, train: bool = False, features_only: bool = False) -> Outputs:
        """Images [B, H, W, ch], H and W at least 8 -> logits float32 [B, C], or features (of 32x32: 4096)."""
        check_images("cifar_cnn", images, least=8)
        released = self.variant == "released"
        init = INITIALIZATIONS[self.initialization]
        conv = functools.partial(self.conv, use_bias=True, kernel_init=init.conv_kernel, bias_init=init.bias)
        x = images
        for pair, (first, second) in enumerate(((32, 64), (128, 128), (256, 256))):
            x = nn.relu(BatchNorm()(conv(first)(x), mask, train))
            x = max_pool(nn.relu(conv(second)(x)))
            if pair == 1:
                x = dropout(self, x, 0.05, per_channel=released)
        x = x.reshape(x.shape[0], -1)
        if features_only:
            return x.astype(jnp.float32)
        x = dropout(self, x, 0.1 if released else 0.0)
        x = nn.relu(dense(x, 1024, init))
        x = dropout(self, x, 0.0 if released else 0.1)
        x = dropout(self, nn.relu(dense(x, 512, init)), 0.1)
        return dense(x.astype(jnp.float32), self.num_classes, init)
