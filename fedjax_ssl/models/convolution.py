"""Convolution by seven lowerings.

How a convolution becomes machine work matters more here than elsewhere: clients have kernels of their own, and local steps run
inside a compiled loop. On a CPU XLA's own convolution has a fast forward pass anywhere, but its gradients inside a loop, and
all of it with a kernel per client, are slow; on a GPU its gradients with a kernel per client are. The others avoid those.

Of bfloat16 every result, and every gradient, is a float32 sum that is rounded once, whatever the lowering.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    return _convolution(images, kernel, stride, (padding, padding))


def _convolution(images: jax.Array, kernel: jax.Array, stride: int, padding: tuple[int, int]) -> jax.Array:
    pads = [(zeros, zeros) for zeros in padding]
    return lax.conv_general_dilated(images, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def product(x: jax.Array, kernel: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The float32 product of x and kernel, both rounded to `dtype`; its gradients are such products too. Reverse mode only.

    What is made from several products is to be added up before it is rounded, and so are the gradients of what goes into
    several: they come as float32 where the arguments are float32, which may hold numbers of `dtype`.

    Args:
        x: [..., D].
        kernel: [D, F].
        dtype: in which numbers are multiplied. Of float32 it is `x @ kernel`.

    Returns:
        float32 [..., F].
    """
    return x @ kernel if dtype == jnp.float32 else _product(x.astype(jnp.float32), kernel.astype(jnp.float32), dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)


def _product_forward(
    x: jax.Array, kernel: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel, dtype), (x.astype(dtype), kernel.astype(dtype))


def _product_backward(
    dtype: jax.typing.DTypeLike, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    rows, cotangents = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
    return product(cotangent, kernel.T, dtype), product(rows.T, cotangents, dtype)


_product.defvjp(_product_forward, _product_backward)


def im2col_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes, as slices and matrix products: a batched product once kernels are vmapped.

    Row-wise: the kw column shifts are laid side by side once, and each kernel row multiplies a slice of them,

        out = sum_i columns[:, i::stride] @ kernel[i],

    which moves a third of the bytes of the full im2col of a 3x3 kernel. Arguments and result as in `grouped_conv`.
    """
    kh, kw, channels, features = kernel.shape
    dtype, images = images.dtype, _padded(images, padding)
    height, width = ((length - size) // stride + 1 for length, size in zip(images.shape[1:3], (kh, kw), strict=True))
    columns = jnp.concatenate([images[:, :, column] for column in _shifts(kw, width, stride)], axis=-1)
    kernel = kernel.reshape(kh, kw * channels, features)
    rows = _shifts(kh, height, stride)
    return functools.reduce(jnp.add, (product(columns[:, row], kernel[i], dtype) for i, row in enumerate(rows))).astype(dtype)


def shifted_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes, as one matrix product for each position of the kernel, of a shifted slice of the images.

        out = sum_ij images[:, i::stride, j::stride] @ kernel[i, j].

    It copies less than `im2col_conv`, and multiplies smaller matrices. Arguments and result as in `grouped_conv`.
    """
    kh, kw, _, _ = kernel.shape
    dtype, images = images.dtype, _padded(images, padding)
    height, width = ((length - size) // stride + 1 for length, size in zip(images.shape[1:3], (kh, kw), strict=True))
    rows, columns = _shifts(kh, height, stride), _shifts(kw, width, stride)
    slices = [(images[:, row, column], kernel[i, j]) for i, row in enumerate(rows) for j, column in enumerate(columns)]
    return functools.reduce(jnp.add, (product(x, weights, dtype) for x, weights in slices)).astype(dtype)


def _padded(images: jax.Array, padding: int) -> jax.Array:
    """The images with zeros around them, as float32, in which the gradients of their parts are then added up."""
    return jnp.pad(images.astype(jnp.float32), ((0, 0), (padding, padding), (padding, padding), (0, 0)))


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
    kh, kw, _, _ = kernel.shape
    if stride == 1:
        flipped = kernel[::-1, ::-1].swapaxes(2, 3)
        images_gradient = _convolution(cotangent, flipped, 1, (kh - 1 - padding, kw - 1 - padding))
    else:
        # As a convolution this would multiply the zeros between the cotangent's entries: three of four at stride 2.
        _, transpose = jax.vjp(lambda x: im2col_conv(x, kernel, stride, padding), images)
        (images_gradient,) = transpose(cotangent)
    return images_gradient, _kernel_gradient(images, cotangent, (kh, kw), stride, padding)


def _kernel_gradient(images: jax.Array, cotangent: jax.Array, size: tuple[int, int], stride: int, padding: int) -> jax.Array:
    """sum_b patches(images_b)^T cotangent_b [kh, kw, ch, F], over chunks of about _CHUNK_POSITIONS output positions."""
    batch, height, width, features = cotangent.shape
    chunks = -(-batch // -(-_CHUNK_POSITIONS // (height * width)))
    chunk = -(-batch // chunks)  # all as large, or nearly
    extra = (0, chunks * chunk - batch)  # zeros, which add nothing
    images = jnp.pad(images, (extra, (padding, padding), (padding, padding), (0, 0)))
    cotangent = jnp.pad(cotangent, (extra, (0, 0), (0, 0), (0, 0)))
    rows, columns = _shifts(size[0], height, stride), _shifts(size[1], width, stride)

    def of_chunk(i: int | jax.Array) -> jax.Array:
        x = lax.dynamic_slice_in_dim(images, i * chunk, chunk)
        g = lax.dynamic_slice_in_dim(cotangent, i * chunk, chunk).reshape(-1, features)
        patches = jnp.concatenate([x[:, row, column] for row in rows for column in columns], axis=-1)
        return product(g.T, patches.reshape(g.shape[0], -1), cotangent.dtype)

    total = lax.fori_loop(1, chunks, lambda i, total: total + of_chunk(i), of_chunk(0))
    return total.T.reshape(*size, images.shape[-1], features).astype(images.dtype)


hybrid_conv.defvjp(_hybrid_forward, _hybrid_backward)


def banded_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes: of few channels and features on small images one matrix product, else as in `hybrid_conv`.

    Each output row is cut into tiles of t columns. A tile, all its columns at once, is what it meets of the image, kh rows of
    t + kw - 1 columns side by side, times a banded matrix that all tiles share,

        T[i, x, c, o, f] = kernel[i, x - o, c, f], 0 outside of the kernel.

    That multiplies (t + kw - 1) / kw times as many numbers as are needed, zeros for the rest, but as large matrices even where
    there are so few channels that the other forms are slow. Arguments and result as in `grouped_conv`.
    """
    kh, kw, channels, features = kernel.shape
    # No further than what was measured: the layers of mnist_cnn and cnn (`benchmarks/conv_lowering.py --model ...`).
    if stride > 1 or images.shape[2] + 2 * padding > 6 * kw or channels > 2 * kw or features >= 32:
        return hybrid_conv(images, kernel, stride, padding)
    dtype, images = images.dtype, _padded(images, padding)
    batch, height, width, _ = images.shape
    rows, columns = height - kh + 1, width - kw + 1
    tile = _tile(columns, features)
    met = tile + kw - 1
    images = images.reshape(batch, height, width * channels)
    starts = range(0, columns * channels, tile * channels)
    pieces = [[images[:, i : i + rows, x : x + met * channels] for i in range(kh)] for x in starts]
    sides = jnp.stack([jnp.concatenate(piece, axis=-1) for piece in pieces], axis=2)
    out = product(sides, _band(kernel.astype(jnp.float32), tile), dtype)
    return out.reshape(batch, rows, columns, features).astype(dtype)


def _tile(columns: int, features: int) -> int:
    """How many columns a tile has, t: of a row's whole tiles the widest whose t F numbers are not more than 128."""
    return max(t for t in range(1, 9) if columns % t == 0 and (t == 1 or t * features <= 128))


def _band(kernel: jax.Array, tile: int) -> jax.Array:
    """The matrix T of `banded_conv`, [kh (t + kw - 1) ch, t F], for a kernel [kh, kw, ch, F]."""
    kh, kw, channels, features = kernel.shape
    met = tile + kw - 1
    # A kernel row and zeros, met + 1 long, repeated and cut into pieces of length met, moves on by one from piece to piece.
    period = jnp.pad(kernel, ((0, 0), (0, met + 1 - kw), (0, 0), (0, 0)))
    repeated = jnp.broadcast_to(period[:, None], (kh, tile, *period.shape[1:])).reshape(kh, -1, channels, features)
    band = repeated[:, : tile * met].reshape(kh, tile, met, channels, features).transpose(0, 2, 3, 1, 4)
    return band.reshape(kh * met * channels, tile * features)


def tiled_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes, as one large matrix product, and two for its gradients: for GPUs.

    The tiles and the banded matrix are those of `banded_conv`, of every convolution of stride 1: matrices of 128 columns are
    what matrix units are made for, and the tiles of a 3x3 kernel with t = 4 hold each number of the image 4.5 times, not 9
    as its full im2col. That is what t = 1 is, for other strides. The tiles are kept for the kernel's gradient; the images' at
    stride 1, with less padding than the kernel is long, is the convolution of the cotangent with the flipped kernel. Reverse
    mode only. Arguments and result as in `grouped_conv`.
    """
    return _tiled(images, kernel, stride, (padding, padding))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _tiled(images: jax.Array, kernel: jax.Array, stride: int, padding: tuple[int, int]) -> jax.Array:
    return _tiled_forward(images, kernel, stride, padding)[0]


def _tiled_forward(
    images: jax.Array, kernel: jax.Array, stride: int, padding: tuple[int, int]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    sides = _sides(images, kernel.shape, stride, padding)
    batch, rows, tiles, _ = sides.shape
    tile = _tile_of(images.shape, kernel.shape, stride, padding)
    out = product(sides, _band(kernel.astype(jnp.float32), tile), images.dtype)
    return out.reshape(batch, rows, tiles * tile, -1).astype(images.dtype), (images, kernel, sides)


def _tiled_backward(
    stride: int, padding: tuple[int, int], residuals: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    images, kernel, sides = residuals
    kh, kw, _, _ = kernel.shape
    tile = _tile_of(images.shape, kernel.shape, stride, padding)
    cotangents = cotangent.reshape(-1, tile * cotangent.shape[-1])
    if stride == 1 and padding[0] < kh and padding[1] < kw:
        flipped = kernel[::-1, ::-1].swapaxes(2, 3)
        images_gradient = _tiled(cotangent, flipped, 1, (kh - 1 - padding[0], kw - 1 - padding[1]))
    else:
        _, transpose = jax.vjp(lambda x: _sides(x, kernel.shape, stride, padding), images.astype(jnp.float32))
        of_sides = product(cotangents, _band(kernel.astype(jnp.float32), tile).T, images.dtype)
        (images_gradient,) = transpose(of_sides.reshape(sides.shape))
    _, transpose = jax.vjp(lambda k: _band(k, tile), kernel.astype(jnp.float32))
    (kernel_gradient,) = transpose(product(sides.reshape(-1, sides.shape[-1]).T, cotangents, images.dtype))
    return images_gradient.astype(images.dtype), kernel_gradient.astype(kernel.dtype)


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _tile_of(images: tuple[int, ...], kernel: tuple[int, ...], stride: int, padding: tuple[int, int]) -> int:
    """How many columns a tile of `tiled_conv` has, for images and a kernel of these shapes."""
    columns = images[2] + 2 * padding[1] - kernel[1] + 1
    return _tile(columns, kernel[3]) if stride == 1 < kernel[1] else 1


def _sides(images: jax.Array, kernel: tuple[int, ...], stride: int, padding: tuple[int, int]) -> jax.Array:
    """What each tile of the output meets of the images: [B, H', W' / t, kh (t + kw - 1) ch], for a kernel of this shape."""
    kh, kw, channels, _ = kernel
    tile = _tile_of(images.shape, kernel, stride, padding)
    batch, height, width, _ = images.shape
    rows, columns = ((n + 2 * p - k) // stride + 1 for n, p, k in zip((height, width), padding, (kh, kw), strict=True))
    met = tile + kw - 1
    # Tile by tile, what neighbors share is in two pieces: of each tile's own columns, and of the first ones of the next.
    firsts = range(0, met, tile)
    right = max(firsts[-1] + (columns - 1) * stride + 1 - width - padding[1], 0)
    images = jnp.pad(images, ((0, 0), (padding[0], padding[0]), (padding[1], right), (0, 0)))
    wide = jnp.concatenate(
        [
            images[:, :, first : first + (columns - 1) * stride + 1 : stride].reshape(
                batch, -1, columns // tile, tile * channels
            )[..., : (met - first) * channels]
            for first in firsts
        ],
        axis=-1,
    )
    return jnp.concatenate([wide[:, row] for row in _shifts(kh, rows, stride)], axis=-1)


_OF_IMAGES = np.array(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
_OF_KERNEL = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24
_OF_PRODUCTS = np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])
"""B^T, G and A^T of F(4, 3) (Lavin & Gray, Fast algorithms for convolutional neural networks, 2016, section 4.3)."""


def winograd_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """What `grouped_conv` computes, with up to half as many multiplications: Winograd's minimal filtering F(4, 3) along rows.

    Four neighboring entries of an output row need six of the image's, d, and a row g of the kernel; with the matrices above

        out = A^T [(G g) * (B^T d)],

    6 products in place of 12. Each of the six is a convolution of the columns alone, [kh, 1], by `hybrid_conv`. Sums of few
    small multiples come before and after, in which rounding grows: to about 1e-6 of the norm of the result, and of each
    gradient, from 4e-7. They cost as much as is saved where channels and features are few. That, a convolution of another
    form, or of bfloat16, is `banded_conv`'s. Reverse mode only. Arguments and result as in `grouped_conv`.
    """
    batch, _, _, channels = images.shape
    width = images.shape[2] + 2 * padding - 2
    tiles = -(-width // 4)
    fits = stride == 1 and kernel.shape[1] == 3 and 2 * tiles < width and images.dtype == jnp.float32
    if not fits or channels + kernel.shape[3] < 96:  # with 32 and 32, as in WRN-28-2, it gains nothing
        return banded_conv(images, kernel, stride, padding)
    right = 4 * (tiles + 1) - images.shape[2] - padding
    images = jnp.pad(images, ((0, 0), (padding, padding), (padding, right), (0, 0)))
    # Slices of whole columns and their gradients move whole channels, where strided ones would be done number by number.
    fours = jnp.split(images.reshape(batch, -1, tiles + 1, 4 * channels), 4, axis=-1)
    columns = [x[:, :, :-1] for x in fours] + [x[:, :, 1:] for x in fours[:2]]
    of_kernel = [kernel[:, j : j + 1] for j in range(3)]
    products = [
        hybrid_conv(_combined(b, columns), _combined(g, of_kernel), 1, 0) for b, g in zip(_OF_IMAGES, _OF_KERNEL, strict=True)
    ]
    out = jnp.concatenate([_combined(a, products) for a in _OF_PRODUCTS], axis=-1)
    return out.reshape(batch, -1, 4 * tiles, kernel.shape[-1])[:, :, :width]


def _combined(coefficients: np.ndarray, arrays: Sequence[jax.Array]) -> jax.Array:
    """The sum of coefficients times arrays, without those that are 0."""
    terms = [x if c == 1 else float(c) * x for c, x in zip(coefficients, arrays, strict=True) if c]
    return functools.reduce(jnp.add, terms)


LOWERINGS: dict[str, Callable[[jax.Array, jax.Array, int, int], jax.Array]] = {
    "grouped": grouped_conv,
    "im2col": im2col_conv,
    "shifted": shifted_conv,
    "hybrid": hybrid_conv,
    "banded": banded_conv,
    "winograd": winograd_conv,
    "tiled": tiled_conv,
    "xla": grouped_conv,
    "cpu": winograd_conv,
    "gpu": tiled_conv,
}


def resolve_conv(conv: str, platform: str, *, kernels_vmapped: bool = False) -> str:
    """The lowering that `conv` stands for on `platform`: a key of LOWERINGS.

    On the CPU, where the gradients of XLA's convolution are slow inside a compiled loop (jax issue 12868; a step of the network
    `cnn` takes seven times as long as `winograd`'s, see `benchmarks/results/conv_lowering_cnn_cpu.json`), `auto` is
    `winograd`. On a GPU it is `tiled` where kernels are vmapped, as matrix units are fast and gradients of grouped convolutions
    take slow forms there, though no result in this repository has both. Else, and on a TPU until measured, it is `grouped`.

    Args:
        conv: "auto" or a key of LOWERINGS.
        platform: as `jax.default_backend()` names it: "cpu", "gpu", "tpu".
        kernels_vmapped: whether clients with parameters of their own are trained under `vmap`.

    Raises:
        ValueError: `conv` is none of these, or `winograd` elsewhere than on a CPU: its sums are for products of full precision.
    """
    if conv == "auto":
        return {"cpu": "cpu", "gpu": "gpu" if kernels_vmapped else "xla"}.get(platform, "xla")
    if conv not in LOWERINGS:
        raise ValueError(f"conv must be one of {', '.join(['auto', *LOWERINGS])}; got {conv!r}")
    if conv == "winograd" and platform != "cpu":
        raise ValueError(f"execution.conv: got winograd on {platform}, accepted: auto, or another lowering")
    return conv
