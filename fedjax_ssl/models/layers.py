"""Convolution by two lowerings, and the initializers of PyTorch's layers.

How a convolution becomes machine work matters more here than anywhere: clients have kernels of their own, and local steps run
inside a compiled loop. XLA's convolution is the best choice on accelerators, and outside loops; on the CPU its gradients inside
a loop run on one slow path, which slices and matrix products avoid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

DTYPES = ("float32", "bfloat16")

# PyTorch's `kaiming_normal_(mode="fan_out", nonlinearity="relu")`: N(0, 2 / (kh kw features)).
kaiming_fan_out = nn.initializers.variance_scaling(2.0, "fan_out", "normal")

# PyTorch's default for a linear layer's weight: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
torch_linear = nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform")


def grouped_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Cross-correlation of `images` and `kernel`, as XLA's own convolution (one grouped convolution once kernels are vmapped).

    Args:
        images: [B, H, W, ch].
        kernel: [kh, kw, ch, F], same dtype.
        stride: step in both directions, >= 1.
        padding: zeros added on each of the four sides, as PyTorch counts it.

    Returns:
        [B, H', W', F] of the same dtype, H' = (H + 2 padding - kh) // stride + 1.
    """
    pads = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(images, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def im2col_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes, as slices and matrix products: a batched product once kernels are vmapped.

    Row-wise: the kw column shifts are laid side by side once, and each kernel row multiplies a slice of them,

        out = sum_i columns[:, i::stride] @ kernel[i],

    which moves a third of the bytes of the full im2col of a 3x3 kernel. Arguments and result as in `grouped_conv`.
    """
    kh, kw, channels, features = kernel.shape
    images = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height, width = ((size - k) // stride + 1 for size, k in zip(images.shape[1:3], (kh, kw), strict=True))
    rows = [slice(i, i + (height - 1) * stride + 1, stride) for i in range(kh)]
    columns = [slice(j, j + (width - 1) * stride + 1, stride) for j in range(kw)]
    shifted = jnp.concatenate([images[:, :, column] for column in columns], axis=-1)
    kernel = kernel.reshape(kh, kw * channels, features)
    return sum(shifted[:, row] @ kernel[i] for i, row in enumerate(rows))


LOWERINGS = {"grouped": grouped_conv, "im2col": im2col_conv}


class Conv(nn.Module):
    """Two-dimensional convolution with one parameter `kernel` float32 [kh, kw, ch, F] and, if asked for, `bias` [F].

    Attributes:
        features: F, output channels.
        kernel_size: kh = kw.
        strides: step in both directions.
        padding: zeros on each side, as PyTorch counts it: 1 keeps the size of a 3x3 kernel's image at stride 1.
        lowering: key of LOWERINGS.
        dtype: "float32" or "bfloat16", in which inputs and kernel are multiplied and the result is returned.
        use_bias: whether a bias is added.
        kernel_init: initializer of the kernel.
    """

    features: int
    kernel_size: int = 3
    strides: int = 1
    padding: int = 1
    lowering: str = "im2col"
    dtype: str = "float32"
    use_bias: bool = False
    kernel_init: Callable[..., Any] = kaiming_fan_out

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Images [B, H, W, ch] -> [B, H', W', F] in `dtype`."""
        shape = (self.kernel_size, self.kernel_size, images.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        conv = LOWERINGS[self.lowering]
        out = conv(images.astype(self.dtype), kernel.astype(self.dtype), self.strides, self.padding)
        if self.use_bias:
            out += self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(self.dtype)
        return out


def resolve_conv(conv: str, platform: str) -> str:
    """The lowering that `conv` stands for on `platform`: a key of LOWERINGS.

    `auto` is `im2col` on the CPU, where XLA's convolution computes its gradients some 50 times slower inside a compiled loop
    than outside (jax issue 12868), and `grouped` on every other platform.

    Args:
        conv: "auto", "grouped" or "im2col".
        platform: as `jax.default_backend()` names it: "cpu", "gpu", "tpu".

    Raises:
        ValueError: `conv` is none of these.
    """
    if conv == "auto":
        return "im2col" if platform == "cpu" else "grouped"
    if conv not in LOWERINGS:
        raise ValueError(f"conv must be one of {['auto', *LOWERINGS]}, got {conv!r}")
    return conv
