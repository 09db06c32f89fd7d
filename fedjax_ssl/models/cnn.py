"""Plain convolutional networks: for the digits, for EMNIST, RSCFed's, and the two of FedSiam, FedCon and FedTriNet."""

import functools
from typing import Annotated, Literal

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float
from pydantic import Field

from fedjax_ssl.arrays import Array, Features, Inputs, Logits
from fedjax_ssl.models.initializers import INITIALIZATIONS, InitializationName
from fedjax_ssl.models.layers import check_images, dense, dropout, max_pool
from fedjax_ssl.models.network import Network

_Dropout = Annotated[Literal["paper", "released"], Field(description="Dropout as in the paper, or as in its released code.")]


class CNN(Network):
    """Three blocks of 3x3 convolution, batch norm and ReLU, with 1, 2 and 4 times `width` channels and strides 1, 2, 2.

    Ends in a global average pool and a linear layer, so that it takes images of any size.
    """

    shared_layers = ("Conv_0", "BatchNorm_0", "Conv_1", "BatchNorm_1")
    width: Annotated[int, Field(ge=1, le=4096, description="Channels of the first convolution.")] = 16

    def features(self, images: Inputs, train: bool) -> Features:
        """The 4 `width` averages over each image."""
        check_images("cnn", images, least=1)
        x = images
        for factor, stride in ((1, 1), (2, 2), (4, 2)):
            x = nn.relu(nn.BatchNorm(not train)(self.conv(self.width * factor, strides=stride)(x)))
        return jnp.mean(x, axis=(1, 2), dtype=jnp.float32)


class EmnistCNN(Network):
    """Two 3x3 convolutions of 32 and 64 channels without padding, a max pool, two linear layers of 128 and C.

    ReLU follows every layer but the last. Dropout of .25 follows the pool, and of .5 the first linear layer (`plain`: no
    dropout). It is the network for EMNIST in Reddi et al. 2021, Table 4, and with 32x32x3 images (1,626,442 parameters) that of
    pfl-research's CIFAR-10 benchmark.
    """

    shared_layers = ("Conv_0", "Conv_1")
    variant: Annotated[Literal["paper", "plain"], Field(description="With dropout, or without it.")] = "paper"
    initialization: InitializationName = "torch"

    def features(self, images: Inputs, train: bool) -> Features:
        """Features of images of 6x6 or more: 12,544 numbers for 32x32."""
        check_images("emnist_cnn", images, least=6)
        init = INITIALIZATIONS[self.initialization]
        conv = functools.partial(self.conv, padding=0, use_bias=True, kernel_init=init.conv_kernel, bias_init=init.bias)
        x = nn.relu(conv(32)(images))
        x = max_pool(nn.relu(conv(64)(x)))
        return x.reshape(x.shape[0], -1)

    def classifier(self, x: Features) -> Logits:
        """The linear layers, with dropout before both."""
        init = INITIALIZATIONS[self.initialization]
        rates = (0.25, 0.5) if self.variant == "paper" else (0.0, 0.0)
        x = nn.relu(dense(dropout(self, x, rates[0]), 128, init))
        return dense(dropout(self, x, rates[1]).astype(jnp.float32), self.num_classes, init)


class RscCNN(Network):
    """RSCFed's network: two 5x5 convolutions of 6 and 16 channels without padding, and five linear layers.

    A 2x2 max pool follows each convolution. Linear layers: 120, 84, 84, 256, C; ReLU follows every layer but the last two.
    92,626 parameters on 32x32x3 with 10 classes. The released code keeps PyTorch's initialization.
    """

    shared_layers = ("Conv_0", "Conv_1")
    initialization: InitializationName = "torch"

    def features(self, images: Inputs, train: bool) -> Features:
        """The 256 outputs of the last layer but one, of images of 16x16 or more."""
        check_images("rsc_cnn", images, least=16)
        init = INITIALIZATIONS[self.initialization]
        conv = functools.partial(
            self.conv, kernel_size=5, padding=0, use_bias=True, kernel_init=init.conv_kernel, bias_init=init.bias
        )
        x = images
        for channels in (6, 16):
            x = max_pool(nn.relu(conv(channels)(x)))
        x = x.reshape(x.shape[0], -1)
        for units in (120, 84, 84):
            x = nn.relu(dense(x, units, init))
        return dense(x, 256, init)

    def classifier(self, x: Features) -> Logits:
        """A linear layer."""
        return dense(x.astype(jnp.float32), self.num_classes, INITIALIZATIONS[self.initialization])


class MnistCNN(Network):
    """Two 5x5 convolutions of 10 and 20 channels without padding, two linear layers: 21,840 parameters (FedSiam, Table 1).

    Each convolution is followed by a 2x2 max pool, then ReLU, as in the released code; the paper's table shows no ReLU there.
    `paper` has no dropout; `released` has dropout of .5, of whole channels after the second convolution and of values after the
    first linear layer. The released code keeps PyTorch's initialization.
    """

    shared_layers = ("Conv_0", "Conv_1")
    variant: _Dropout = "paper"
    initialization: InitializationName = "torch"

    def features(self, images: Inputs, train: bool) -> Features:
        """Features of images of 16x16 or more: 320 numbers for MNIST."""
        check_images("mnist_cnn", images, least=16)
        init = INITIALIZATIONS[self.initialization]
        conv = functools.partial(
            self.conv, kernel_size=5, padding=0, use_bias=True, kernel_init=init.conv_kernel, bias_init=init.bias
        )
        x = nn.relu(max_pool(conv(10)(images)))
        x = nn.relu(max_pool(self._drop(conv(20)(x), per_channel=True)))
        return x.reshape(x.shape[0], -1)

    def classifier(self, x: Features) -> Logits:
        """The linear layers."""
        init = INITIALIZATIONS[self.initialization]
        x = self._drop(nn.relu(dense(x, 50, init)))
        return dense(x.astype(jnp.float32), self.num_classes, init)

    @nn.nowrap
    def _drop(self, x: Float[Array, "*shape"], *, per_channel: bool = False) -> Float[Array, "*shape"]:
        return dropout(self, x, 0.5 if self.variant == "released" else 0.0, per_channel=per_channel)


class CifarCNN(Network):
    """Six 3x3 convolutions in three pooled pairs and three linear layers: 5,852,170 parameters on 32x32x3 (FedSiam, Table 1).

    The pairs have 32 and 64, 128 and 128, 256 and 256 channels; the first of each is followed by batch norm. ReLU follows every
    layer but the last. Linear layers: 1024, 512, C.

    Dropout of `paper`: .05 of values after the second pool, .1 after the ReLU of the first two linear layers. Of `released`:
    .05 of whole channels after the second pool, .1 before the first linear layer and after the ReLU of the second. The released
    code keeps PyTorch's initialization.
    """

    shared_layers = ("Conv_0", "BatchNorm_0", "Conv_1")
    variant: _Dropout = "paper"
    initialization: InitializationName = "torch"

    def features(self, images: Inputs, train: bool) -> Features:
        """Features of images of 8x8 or more: 4096 numbers for 32x32."""
        check_images("cifar_cnn", images, least=8)
        init = INITIALIZATIONS[self.initialization]
        conv = functools.partial(self.conv, use_bias=True, kernel_init=init.conv_kernel, bias_init=init.bias)
        x = images
        for pair, (first, second) in enumerate(((32, 64), (128, 128), (256, 256))):
            x = nn.relu(nn.BatchNorm(not train)(conv(first)(x)))
            x = max_pool(nn.relu(conv(second)(x)))
            if pair == 1:
                x = dropout(self, x, 0.05, per_channel=self.variant == "released")
        return x.reshape(x.shape[0], -1)

    def classifier(self, x: Features) -> Logits:
        """The linear layers."""
        init = INITIALIZATIONS[self.initialization]
        before, after = (0.1, 0.0) if self.variant == "released" else (0.0, 0.1)
        x = nn.relu(dense(dropout(self, x, before), 1024, init))
        x = nn.relu(dense(dropout(self, x, after), 512, init))
        return dense(dropout(self, x, 0.1).astype(jnp.float32), self.num_classes, init)
