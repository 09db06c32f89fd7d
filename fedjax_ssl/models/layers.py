"""Convolution by five lowerings, and the other layers that networks share: max pooling, dropout, linear.

How a convolution becomes machine work matters more here than elsewhere: clients have kernels of their own, and local steps run
inside a compiled loop. On accelerators XLA's convolution does both. On the CPU its forward pass is fast anywhere, but its
gradients inside a loop, and all of it with a kernel per client, are slow: the other lowerings avoid those two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fedjax_ssl.models.initializers import Initialization, Initializer, kaiming_fan_out, zero_bias

DTYPES = ("float32", "bfloat16")

_CHUNK_POSITIONS = 1024  # of a 32x32 image: its patches, [1024, 9 ch] float32, then fit a core's cache


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
    height, width = ((length - size) // stride + 1 for length, size in zip(images.shape[1:3], (kh, kw), strict=True))
    columns = jnp.concatenate([images[:, :, column] for column in _shifts(kw, width, stride)], axis=-1)
    kernel = kernel.reshape(kh, kw * channels, features)
    return functools.reduce(jnp.add, (columns[:, row] @ kernel[i] for i, row in enumerate(_shifts(kh, height, stride))))


def shifted_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes, as one matrix product for each position of the kernel, of a shifted slice of the images.

        out = sum_ij images[:, i::stride, j::stride] @ kernel[i, j].

    It copies less than `im2col_conv`, and multiplies smaller matrices. Arguments and result as in `grouped_conv`.
    """
    kh, kw, _, _ = kernel.shape
    images = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height, width = ((length - size) // stride + 1 for length, size in zip(images.shape[1:3], (kh, kw), strict=True))
    rows, columns = _shifts(kh, height, stride), _shifts(kw, width, stride)
    return functools.reduce(
        jnp.add, (images[:, row, column] @ kernel[i, j] for i, row in enumerate(rows) for j, column in enumerate(columns))
    )


def _shifts(size: int, count: int, stride: int) -> list[slice]:
    """For each position along a kernel's axis, the `count` places of the padded image that it meets."""
    return [slice(i, i + (count - 1) * stride + 1, stride) for i in range(size)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def hybrid_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes, with gradients in forms that stay fast inside a compiled loop on the CPU.

    The forward pass is XLA's convolution. So is the gradient for the images at stride 1, written out as the convolution of the
    cotangent with the flipped kernel. The gradient for the kernel adds up im2col products over small chunks of the batch, which
    stay in the cache. Reverse mode only: `jax.jvp` through it is an error. Arguments and result as in `grouped_conv`.
    """
    return grouped_conv(images, kernel, stride, padding)


def _hybrid_forward(
    images: jax.Array, kernel: jax.Array, stride: int, padding: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return grouped_conv(images, kernel, stride, padding), (images, kernel)


def _hybrid_backward(
    stride: int, padding: int, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    images, kernel = residuals
    if stride == 1:
        flipped = kernel[::-1, ::-1].swapaxes(2, 3)
        images_gradient = grouped_conv(cotangent, flipped, 1, kernel.shape[0] - 1 - padding)
    else:
        # As a convolution this would multiply the zeros between the cotangent's entries: three of four at stride 2.
        transpose = jax.linear_transpose(lambda x: im2col_conv(x, kernel, stride, padding), images)
        (images_gradient,) = transpose(cotangent)
    return images_gradient, _kernel_gradient(images, cotangent, kernel.shape[0], stride, padding)


def _kernel_gradient(images: jax.Array, cotangent: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
    """sum_b patches(images_b)^T cotangent_b [size, size, ch, F], over chunks of about _CHUNK_POSITIONS output positions."""
    batch, height, width, features = cotangent.shape
    chunk = min(batch, -(-_CHUNK_POSITIONS // (height * width)))
    chunks = -(-batch // chunk)
    extra = (0, chunks * chunk - batch)  # zeros, which add nothing
    images = jnp.pad(images, (extra, (padding, padding), (padding, padding), (0, 0)))
    cotangent = jnp.pad(cotangent, (extra, (0, 0), (0, 0), (0, 0)))
    rows, columns = _shifts(size, height, stride), _shifts(size, width, stride)

    def product(i: int | jax.Array) -> jax.Array:
        x = lax.dynamic_slice_in_dim(images, i * chunk, chunk)
        g = lax.dynamic_slice_in_dim(cotangent, i * chunk, chunk).reshape(-1, features)
        patches = jnp.concatenate([x[:, row, column] for row in rows for column in columns], axis=-1)
        patches = patches.reshape(g.shape[0], -1)
        return lax.dot_general(g, patches, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    total = lax.fori_loop(1, chunks, lambda i, total: total + product(i), product(0))
    return total.T.reshape(size, size, images.shape[-1], features).astype(images.dtype)


hybrid_conv.defvjp(_hybrid_forward, _hybrid_backward)


def banded_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes: of few channels on small images one matrix product, else as in `hybrid_conv`.

    Each output row is cut into tiles of t columns. A tile, all its columns at once, is what it meets of the image, kh rows of
    t + kw - 1 columns side by side, times a banded matrix that all tiles share,

        T[i, x, c, o, f] = kernel[i, x - o, c, f], 0 outside of the kernel.

    That multiplies (t + kw - 1) / kw times as many numbers as are needed, zeros for the rest, but as large matrices even where
    there are so few channels that the other forms are slow. Arguments and result as in `grouped_conv`.
    """
    kh, kw, channels, features = kernel.shape
    # No further than what was measured: the layers of mnist_cnn and cnn (`benchmarks/conv_lowering.py --model ...`).
    if stride > 1 or images.shape[2] + 2 * padding > 6 * kw or channels > 2 * kw:
        return hybrid_conv(images, kernel, stride, padding)
    images = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    batch, height, width, _ = images.shape
    rows, columns = height - kh + 1, width - kw + 1
    tile = max(t for t in range(1, 9) if columns % t == 0 and (t == 1 or t * features <= 128))
    met = tile + kw - 1
    # A kernel row and zeros, met + 1 long, repeated and cut into pieces of length met, moves on by one from piece to piece.
    period = jnp.pad(kernel, ((0, 0), (0, met + 1 - kw), (0, 0), (0, 0)))
    repeated = jnp.broadcast_to(period[:, None], (kh, tile, *period.shape[1:])).reshape(kh, -1, channels, features)
    band = repeated[:, : tile * met].reshape(kh, tile, met, channels, features).transpose(0, 2, 3, 1, 4)
    images = images.reshape(batch, height, width * channels)
    starts = range(0, columns * channels, tile * channels)
    pieces = [[images[:, i : i + rows, x : x + met * channels] for i in range(kh)] for x in starts]
    sides = jnp.stack([jnp.concatenate(piece, axis=-1) for piece in pieces], axis=2)
    return (sides @ band.reshape(kh * met * channels, tile * features)).reshape(batch, rows, columns, features)


LOWERINGS: dict[str, Callable[[jax.Array, jax.Array, int, int], jax.Array]] = {
    "grouped": grouped_conv,
    "im2col": im2col_conv,
    "shifted": shifted_conv,
    "hybrid": hybrid_conv,
    "banded": banded_conv,
}


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
        bias_init: fan_in -> initializer of the bias.
    """

    features: int
    kernel_size: int = 3
    strides: int = 1
    padding: int = 1
    lowering: str = "im2col"
    dtype: str = "float32"
    use_bias: bool = False
    kernel_init: Initializer = kaiming_fan_out
    bias_init: Callable[[int], Initializer] = zero_bias

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Images [B, H, W, ch] -> [B, H', W', F] in `dtype`."""
        shape = (self.kernel_size, self.kernel_size, images.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        conv = LOWERINGS[self.lowering]
        out = conv(images.astype(self.dtype), kernel.astype(self.dtype), self.strides, self.padding)
        if self.use_bias:
            bias_init = self.bias_init(math.prod(shape[:-1]))
            out += self.param("bias", bias_init, (self.features,), jnp.float32).astype(self.dtype)
        return out


def max_pool(images: jax.Array, window: int = 2) -> jax.Array:
    """Maximum over disjoint windows: [B, H, W, ch] -> [B, H // window, W // window, ch]; what is left over is dropped.

    Of two values that are compared and equal each has half of the gradient, so that in a 2x2 window four equal ones have a
    quarter each.
    """
    batch, height, width, channels = images.shape
    rows, columns = height // window, width // window
    windows = images[:, : rows * window, : columns * window].reshape(batch, rows, window, columns, window * channels)
    # Rows first, whole ones, then columns that lie side by side: both are passes over consecutive memory.
    of_rows = functools.reduce(_larger, (windows[:, :, i] for i in range(window)))
    return functools.reduce(_larger, jnp.split(of_rows, window, axis=-1))


@jax.custom_jvp
def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.maximum(a, b)


@_larger.defjvp
def _larger_jvp(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The gradient of `jnp.maximum`, without its divisions.
    a, b = primals
    share = jnp.where(a == b, 0.5, a > b).astype(a.dtype)
    return jnp.maximum(a, b), share * tangents[0] + (1 - share) * tangents[1]


def dense(x: jax.Array, features: int, initialization: Initialization, *, use_bias: bool = True) -> jax.Array:
    """A linear layer in the network that calls it: [B, D] -> [B, features], computed in the dtype of x."""
    bias_init = initialization.bias(x.shape[-1])
    layer = nn.Dense(features, use_bias, dtype=x.dtype, kernel_init=initialization.linear_kernel, bias_init=bias_init)
    return layer(x)


def dropout(network: nn.Module, x: jax.Array, rate: float, *, per_channel: bool = False) -> jax.Array:
    """Zeros with probability `rate` and scales what is left by 1 / (1 - rate), where `network` was given a dropout key.

    A draw takes 16 random bits, half of what flax's takes, as random numbers are a large part of a small network's step: `rate`
    is rounded to a multiple of 2^-16.

    Args:
        network: the network that calls it; without a key (`ModelFns.apply`) x is returned.
        x: [B, ..., F].
        rate: in [0, 1).
        per_channel: whether an example's channel is kept or dropped whole, as PyTorch's Dropout2d does; x is [B, H, W, F] then.
    """
    if rate == 0 or not network.has_rng("dropout"):
        return x
    shape = (x.shape[0], 1, 1, x.shape[-1]) if per_channel else x.shape
    words = jax.random.bits(network.make_rng("dropout"), (-(-shape[0] // 2), *shape[1:]), jnp.uint32)
    least = round(rate * 2**16)
    kept = jnp.concatenate([(words & 0xFFFF) >= least, (words >> 16) >= least])[: shape[0]]
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def check_images(name: str, images: jax.Array, least: int) -> None:
    """Raises ValueError where the inputs of network `name` are not [B, H, W, ch] with H, W >= `least`."""
    if images.ndim != 4 or min(images.shape[1:3]) < least:
        raise ValueError(
            f"{name}: got inputs of shape {images.shape[1:]}, accepted: images (H, W, ch) with "
            f"H, W >= {least}; data.image_size pads smaller ones"
        )


def resolve_conv(conv: str, platform: str, *, kernels_vmapped: bool = False) -> str:
    """The lowering that `conv` stands for on `platform`: a key of LOWERINGS.

    On the CPU, where the gradients of XLA's convolution are some 50 times slower inside a compiled loop than outside (jax
    issue 12868), `auto` is `banded`, or `im2col` where kernels are vmapped; `benchmarks/conv_lowering.py` measures them. On
    every other platform it is `grouped`, until measured otherwise.

    Args:
        conv: "auto" or a key of LOWERINGS.
        platform: as `jax.default_backend()` names it: "cpu", "gpu", "tpu".
        kernels_vmapped: whether clients with parameters of their own are trained under `vmap`.

    Raises:
        ValueError: `conv` is none of these.
    """
    if conv == "auto":
        on_cpu = "im2col" if kernels_vmapped else "banded"
        return on_cpu if platform == "cpu" else "grouped"
    if conv not in LOWERINGS:
        raise ValueError(f"conv must be one of {', '.join(['auto', *LOWERINGS])}; got {conv!r}")
    return conv
