"""The layers that networks share: convolution by a lowering, max pooling, dropout, linear."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Float

from fedjax_ssl.arrays import Array, Features, Inputs, Maps, NewMaps
from fedjax_ssl.models.convolution import LOWERINGS, product
from fedjax_ssl.models.initializers import Initialization, Initializer, kaiming_fan_out, zero_bias

DTYPES = ("float32", "bfloat16")

_FEW_EXAMPLES = 16
_LARGE_KERNEL = 2**18  # float32: a megabyte, what a core's cache holds


class Conv(nn.Module):
    """Two-dimensional convolution with one parameter `kernel` float32 [kh, kw, ch, F] and, if asked for, `bias` [F].

    Padding is counted as in PyTorch: 1 keeps the size of a 3x3 kernel's image at stride 1. Inputs and kernel are multiplied in
    `dtype`. `bias_init` is given the fan-in.
    """

    features: int
    kernel_size: int = 3
    strides: int = 1
    padding: int = 1
    lowering: str = "xla"
    dtype: str = "float32"
    use_bias: bool = False
    kernel_init: Initializer = kaiming_fan_out
    bias_init: Callable[[int], Initializer] = zero_bias

    @nn.compact
    def __call__(self, images: Maps) -> NewMaps:
        """Images [B, H, W, ch] -> [B, H', W', F] in `dtype`."""
        shape = (self.kernel_size, self.kernel_size, images.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        conv = LOWERINGS[self.lowering]
        out = conv(images.astype(self.dtype), kernel.astype(self.dtype), self.strides, self.padding)
        if self.use_bias:
            # In float32, and so its gradient's sum over all positions of all images: bfloat16 does not count beyond 256.
            bias_init = self.bias_init(math.prod(shape[:-1]))
            out = out.astype(jnp.float32) + self.param("bias", bias_init, (self.features,), jnp.float32)
        return out.astype(self.dtype)


def max_pool(images: Maps, window: int = 2) -> Float[Array, "B _ _ ch"]:
    """Maximum over disjoint windows: [B, H, W, ch] -> [B, H // window, W // window, ch]; what is left over is dropped.

    Equal values share the gradient: in a 2x2 window, four equal ones have a quarter each.
    """
    batch, height, width, channels = images.shape
    rows, columns = height // window, width // window
    windows = images[:, : rows * window, : columns * window].reshape(batch, rows, window, columns, window * channels)
    # Rows first, whole ones, then columns that lie side by side: both are passes over consecutive memory.
    of_rows = functools.reduce(_larger, (windows[:, :, i] for i in range(window)))
    return functools.reduce(_larger, jnp.split(of_rows, window, axis=-1))


@jax.custom_jvp
def _larger(a: Float[Array, "*shape"], b: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.maximum(a, b)


@_larger.defjvp
def _larger_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # The gradient of `jnp.maximum`, without its divisions.
    a, b = primals
    share = jnp.where(a == b, 0.5, a > b).astype(a.dtype)
    return jnp.maximum(a, b), share * tangents[0] + (1 - share) * tangents[1]


def dense(x: Features, features: int, initialization: Initialization, *, use_bias: bool = True) -> Float[Array, "B _"]:
    """A linear layer in the network that calls it: [B, D] -> [B, features], computed in the dtype of x; reverse mode only.

    For bfloat16 inputs the bias is added, and its gradient summed, in float32.
    """
    linear = nn.Dense(
        features,
        use_bias,
        dtype=x.dtype,
        kernel_init=initialization.linear_kernel,
        bias_init=initialization.bias(x.shape[-1]),
        dot_general=_product,
    )
    return linear(x).astype(x.dtype)


def _product(x: Float[Array, "B D"], kernel: Float[Array, "D F"], *args: Any, **kwargs: Any) -> Float[Array, "B F"]:
    """The product of a linear layer; in float32, few examples and a large kernel have a gradient that is fast on a CPU."""
    if x.dtype != jnp.float32:
        return product(x, kernel, x.dtype)
    few = x.ndim == 2 and x.shape[0] <= _FEW_EXAMPLES and kernel.size >= _LARGE_KERNEL
    return _few_by_large(x, kernel) if few else lax.dot_general(x, kernel, *args, **kwargs)


@jax.custom_vjp
def _few_by_large(x: Float[Array, "B D"], kernel: Float[Array, "D F"]) -> Float[Array, "B F"]:
    """The product of x [B, D] and kernel [D, F], of which the gradient for the kernel is sum_b x_b outer cotangent_b [D, F]."""
    return x @ kernel


def _few_by_large_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = residuals

    # XLA fuses this sum of outer products with the step of plain SGD, so that the gradient [D, F] is never stored.
    def one_pass(x: Float[Array, "B D"], cotangent: Float[Array, "B F"]) -> Float[Array, "D F"]:
        return functools.reduce(jnp.add, (x[b, :, None] * cotangent[b] for b in range(x.shape[0])))

    of_kernel = lax.platform_dependent(x, cotangent, cpu=one_pass, default=lambda x, cotangent: x.T @ cotangent)
    return cotangent @ kernel.T, of_kernel


_few_by_large.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _few_by_large_backward)


def dropout(network: nn.Module, x: Float[Array, "*shape"], rate: float, *, per_channel: bool = False) -> Float[Array, "*shape"]:
    """Zeros with probability `rate` and scales what is left by 1 / (1 - rate), where `network` was given a dropout key.

    A draw takes 16 random bits, half of what flax's takes, as random numbers are a large part of a small network's step: `rate`
    is rounded to a multiple of 2^-16. `per_channel` drops whole channels of an example [H, W, F], as PyTorch's Dropout2d does.
    """
    if rate == 0 or not network.has_rng("dropout"):
        return x
    shape = (x.shape[0], 1, 1, x.shape[-1]) if per_channel else x.shape
    words = jax.random.bits(network.make_rng("dropout"), (-(-shape[0] // 2), *shape[1:]), jnp.uint32)
    least = round(rate * 2**16)
    survives = jnp.concatenate([(words & 0xFFFF) >= least, (words >> 16) >= least])[: shape[0]]
    return jnp.where(survives, x / (1 - rate), 0).astype(x.dtype)


def check_images(name: str, images: Inputs, least: int) -> None:
    """Raises ValueError where the inputs of network `name` are not [B, H, W, ch] with H, W >= `least`."""
    if images.ndim != 4 or min(images.shape[1:3]) < least:
        raise ValueError(
            f"{name}: got inputs of shape {images.shape[1:]}, accepted: images (H, W, ch) with "
            f"H, W >= {least}; data.image_size pads smaller ones"
        )
