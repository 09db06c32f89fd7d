"""Convolution by XLA's own operation (`xla`), and in forms that are fast in a training loop on a CPU or on a GPU.

Clients have kernels of their own, and local steps run in a compiled loop. XLA's convolution has slow gradients there: on a CPU
in any loop (jax issue 12868), on a GPU with a kernel per client. In bfloat16 every result and gradient is a float32 sum that is
rounded once, whatever the form.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32

from fedjax_ssl.arrays import Array, Maps

Convolved = Float[Array, "B _ _ F"]
Kernel = Float[Array, "kh kw ch F"]

_CHUNK_POSITIONS = 1024  # of a 32x32 image: its patches, [1024, 9 ch] float32, then fit a core's cache
_FEW_POSITIONS, _MANY_CHANNELS = 16, 512  # of 4x4 images, and as in the last stage of ResNets: products alone are the fastest


def xla_conv(images: Maps, kernel: Kernel, stride: int, padding: int) -> Convolved:
    """Cross-correlation of images and kernel by XLA's own convolution: a grouped one where kernels are vmapped.

    All are of one dtype. Zeros are added on all four sides: outputs have height (H + 2 padding - kh) // stride + 1.
    """
    return _convolution(images, kernel, stride, (padding, padding))


def _convolution(images: Array, kernel: Array, stride: int, padding: tuple[int, int]) -> Array:
    pads = [(zeros, zeros) for zeros in padding]
    return lax.conv_general_dilated(images, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _xla_with(
    of_images: Callable[..., Array], of_kernel: Callable[..., Array]
) -> Callable[[Array, Array, int, tuple[int, int]], Array]:
    """XLA's convolution with gradients in other forms, also in second derivatives, where XLA would have loops.

    They are `of_images(conv, images, kernel, cotangent, stride, padding)`, where `conv` is the convolution that this makes, and
    `of_kernel(images, cotangent, (kh, kw), stride, padding)`.
    """
    conv = jax.custom_vjp(_convolution, nondiff_argnums=(2, 3))
    kernel_gradient = jax.custom_vjp(of_kernel, nondiff_argnums=(2, 3, 4))

    def backward(
        stride: int, padding: tuple[int, int], residuals: tuple[Array, Array], cotangent: Array
    ) -> tuple[Array, Array]:
        images, kernel = residuals
        gradient = kernel_gradient(images, cotangent, kernel.shape[:2], stride, padding)
        return of_images(conv, images, kernel, cotangent, stride, padding), gradient

    def kernel_backward(
        _: tuple[int, int], stride: int, padding: tuple[int, int], residuals: tuple[Array, Array], kernel: Array
    ) -> tuple[Array, Array]:
        images, cotangent = residuals
        return of_images(conv, images, kernel, cotangent, stride, padding), conv(images, kernel, stride, padding)

    conv.defvjp(lambda *given: (_convolution(*given), given[:2]), backward)
    kernel_gradient.defvjp(lambda *given: (of_kernel(*given), given[:2]), kernel_backward)
    return conv


def _flipped(kernel: Array, padding: tuple[int, int]) -> tuple[Array, int, tuple[int, int]]:
    """Kernel, stride and padding of the convolution of the cotangent that is the images' gradient at stride 1."""
    kh, kw, _, _ = kernel.shape
    return kernel[::-1, ::-1].swapaxes(2, 3), 1, (kh - 1 - padding[0], kw - 1 - padding[1])


def product(x: Float[Array, "... D"], kernel: Float[Array, "D F"], dtype: DTypeLike) -> Float32[Array, "... F"]:
    """The float32 product of x and kernel, both rounded to `dtype`; its gradients are such products too. Reverse mode only.

    With float32 arguments results and gradients are float32, so that sums of several products are rounded once.
    """
    return x @ kernel if dtype == jnp.float32 else _product(x.astype(jnp.float32), kernel.astype(jnp.float32), dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, kernel: Array, dtype: DTypeLike) -> Array:
    return jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=jnp.float32)


def _product_backward(dtype: DTypeLike, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    rows, cotangents = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
    return product(cotangent, kernel.T, dtype), product(rows.T, cotangents, dtype)


_product.defvjp(
    lambda x, kernel, dtype: (_product(x, kernel, dtype), (x.astype(dtype), kernel.astype(dtype))), _product_backward
)


def _im2col(images: Array, kernel: Array, stride: int, padding: tuple[int, int]) -> Array:
    """The convolution as a matrix product for each kernel row: sum_i columns[:, i::stride] @ kernel[i].

    `columns` has the kw column shifts side by side, a third of the bytes of all shifts of a 3x3 kernel.
    """
    kh, kw, channels, features = kernel.shape
    dtype, pads = images.dtype, [(0, 0, 0), *((zeros, zeros, 0) for zeros in padding), (0, 0, 0)]
    images = lax.pad(images.astype(jnp.float32), jnp.zeros(()), pads)  # float32: the gradients of its parts are added up
    height, width = ((length - size) // stride + 1 for length, size in zip(images.shape[1:3], (kh, kw), strict=True))
    columns = jnp.concatenate([images[:, :, column] for column in _shifts(kw, width, stride)], axis=-1)
    kernel = kernel.reshape(kh, kw * channels, features)
    rows = _shifts(kh, height, stride)
    return functools.reduce(jnp.add, (product(columns[:, row], kernel[i], dtype) for i, row in enumerate(rows))).astype(dtype)


def _shifts(size: int, count: int, stride: int) -> list[slice]:
    """For each position along a kernel's axis, the `count` places of the padded image under it."""
    return [slice(i, i + (count - 1) * stride + 1, stride) for i in range(size)]


def _images_gradient(
    conv: Callable[..., Array], images: Array, kernel: Array, cotangent: Array, stride: int, padding: tuple[int, int]
) -> Array:
    """The images' gradient: at stride 1 the convolution of the cotangent with the flipped kernel."""
    if stride == 1:
        return conv(cotangent, *_flipped(kernel, padding))
    # As a convolution this would multiply the zeros between the cotangent's entries: three of four at stride 2.
    _, transpose = jax.vjp(lambda x: _im2col(x, kernel, stride, padding), images)
    return transpose(cotangent)[0]


def _kernel_gradient(images: Array, cotangent: Array, size: tuple[int, int], stride: int, padding: tuple[int, int]) -> Array:
    """sum_b patches(images_b)^T cotangent_b [kh, kw, ch, F], over chunks of about _CHUNK_POSITIONS output positions.

    A chunk's patches stay in the cache.
    """
    batch, height, width, features = cotangent.shape
    chunks = -(-batch // -(-_CHUNK_POSITIONS // (height * width)))
    chunk = -(-batch // chunks)  # all as large, or nearly
    extra, none = (0, chunks * chunk - batch, 0), (0, 0, 0)  # zeros, which add nothing
    zero = jnp.zeros((), images.dtype)
    images = lax.pad(images, zero, (extra, *((zeros, zeros, 0) for zeros in padding), none))  # or less, where padding is < 0
    cotangent = lax.pad(cotangent, zero, (extra, none, none, none))
    rows, columns = _shifts(size[0], height, stride), _shifts(size[1], width, stride)

    def of_chunk(i: int | Array) -> Array:
        x = lax.dynamic_slice_in_dim(images, i * chunk, chunk)
        g = lax.dynamic_slice_in_dim(cotangent, i * chunk, chunk).reshape(-1, features)
        patches = jnp.concatenate([x[:, row, column] for row in rows for column in columns], axis=-1)
        return product(g.T, patches.reshape(g.shape[0], -1), cotangent.dtype)

    total = lax.fori_loop(1, chunks, lambda i, total: total + of_chunk(i), of_chunk(0))
    return total.T.reshape(*size, images.shape[-1], features).astype(images.dtype)


_hybrid = _xla_with(_images_gradient, _kernel_gradient)
"""XLA's convolution with gradients in forms that stay fast inside a compiled loop on a CPU."""


def onednn_conv(images: Maps, kernel: Kernel, stride: int, padding: int) -> Convolved:
    """What `xla_conv` computes in bfloat16, with gradients as convolutions of stride 1, which XLA can all leave to oneDNN.

    oneDNN uses a processor's matrix units (AMX), if the program is compiled with `program.ONEDNN`. float32 is left to
    `cpu_conv`. Reverse mode only.
    """
    if images.dtype != jnp.bfloat16:
        return cpu_conv(images, kernel, stride, padding)
    if kernel.shape[:2] == (1, 1) and padding == 0:
        return product(images[:, ::stride, ::stride], kernel[0, 0], images.dtype).astype(images.dtype)
    return _of_stride_1(images, kernel, stride, (padding, padding))


def _dilated(images: Array, size: Sequence[int], cotangent: Array, stride: int, padding: tuple[int, int]) -> Array:
    """The cotangent of a convolution of stride 1, of which every `stride`-th result was kept: zeros in all other places."""
    left = [(length + 2 * pad - k) % stride for length, pad, k in zip(images.shape[1:3], padding, size, strict=True)]
    zeros = [(0, 0, 0), *((0, end, stride - 1) for end in left), (0, 0, 0)]
    return lax.pad(cotangent, jnp.zeros((), cotangent.dtype), zeros)


def _images_gradient_of_stride_1(
    conv: Callable[..., Array], images: Array, kernel: Array, cotangent: Array, stride: int, padding: tuple[int, int]
) -> Array:
    """The images' gradient: the convolution of the cotangent with the flipped kernel."""
    return conv(_dilated(images, kernel.shape[:2], cotangent, stride, padding), *_flipped(kernel, padding))


def _kernel_gradient_of_stride_1(
    images: Array, cotangent: Array, size: tuple[int, int], stride: int, padding: tuple[int, int]
) -> Array:
    """The kernel's gradient as a convolution of the images, with channels as the batch axis, [ch, H, W, B].

    Its kernel is the cotangent [H', W', B, F].
    """
    cotangent = _dilated(images, size, cotangent, stride, padding)
    of_kernel = _convolution(images.transpose(3, 1, 2, 0), cotangent.transpose(1, 2, 0, 3), 1, padding)
    return of_kernel.transpose(1, 2, 0, 3)


_of_stride_1 = _xla_with(_images_gradient_of_stride_1, _kernel_gradient_of_stride_1)


def _banded(images: Array, kernel: Array, stride: int, padding: int) -> Array:
    """The convolution of few channels on small images as one matrix product; elsewhere `_hybrid`.

    Each output row is cut into tiles of t columns. What a tile sees of the image, kh rows of t + kw - 1 columns, is multiplied
    by a banded matrix that all tiles share,

        T[i, x, c, o, f] = kernel[i, x - o, c, f], 0 outside of the kernel.

    That multiplies (t + kw - 1) / kw times as many numbers as are needed, but as large matrices.
    """
    _, kw, channels, features = kernel.shape
    # As far as was measured: the layers of mnist_cnn and cnn.
    if stride > 1 or images.shape[2] + 2 * padding > 6 * kw or channels > 2 * kw or features >= 32:
        return _hybrid(images, kernel, stride, (padding, padding))
    sides = _sides(images.astype(jnp.float32), kernel.shape, stride, (padding, padding))  # whose gradients are added up
    return _of_sides(sides, images, kernel, stride, (padding, padding))


def _band(kernel: Array, tile: int) -> Array:
    """The matrix T of `_banded`, [kh (t + kw - 1) ch, t F], for a kernel [kh, kw, ch, F]."""
    kh, kw, channels, features = kernel.shape
    met = tile + kw - 1
    # A kernel row and zeros, met + 1 long, repeated and cut into pieces of length met, moves on by one from piece to piece.
    period = jnp.pad(kernel, ((0, 0), (0, met + 1 - kw), (0, 0), (0, 0)))
    repeated = jnp.broadcast_to(period[:, None], (kh, tile, *period.shape[1:])).reshape(kh, -1, channels, features)
    band = repeated[:, : tile * met].reshape(kh, tile, met, channels, features).transpose(0, 2, 3, 1, 4)
    return band.reshape(kh * met * channels, tile * features)


def gpu_conv(images: Maps, kernel: Kernel, stride: int, padding: int) -> Convolved:
    """What `xla_conv` computes, as one large matrix product, and two for its gradients. Reverse mode only.

    At stride 1 the tiles and the banded matrix are those of `_banded`. Matrix units are made for 128 columns, and with tiles of
    t = 4 a 3x3 kernel holds each number of the image 4.5 times instead of 9. Other strides have t = 1, the full im2col.
    """
    return _tiled(images, kernel, stride, (padding, padding))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _tiled(images: Array, kernel: Array, stride: int, padding: tuple[int, int]) -> Array:
    return _tiled_forward(images, kernel, stride, padding)[0]


def _tiled_forward(
    images: Array, kernel: Array, stride: int, padding: tuple[int, int]
) -> tuple[Array, tuple[Array, Array, Array]]:
    sides = _sides(images, kernel.shape, stride, padding)
    return _of_sides(sides, images, kernel, stride, padding), (images, kernel, sides)


def _of_sides(sides: Array, images: Array, kernel: Array, stride: int, padding: tuple[int, int]) -> Array:
    """The convolution of images as the product of their `_sides` and a kernel's `_band`."""
    batch, rows, tiles, _ = sides.shape
    tile = _tile_of(images.shape, kernel.shape, stride, padding)
    out = product(sides, _band(kernel.astype(jnp.float32), tile), images.dtype)
    return out.reshape(batch, rows, tiles * tile, -1).astype(images.dtype)


def _tiled_backward(
    stride: int, padding: tuple[int, int], residuals: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array]:
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
    """Columns of a tile, t <= 8: the widest that divides the row and has at most 128 numbers t F; 1 at strides above 1."""
    if kernel[1] == 1 or stride > 1:
        return 1
    columns = images[2] + 2 * padding[1] - kernel[1] + 1
    return max(t for t in range(1, 9) if columns % t == 0 and (t == 1 or t * kernel[3] <= 128))


def _sides(images: Array, kernel: tuple[int, ...], stride: int, padding: tuple[int, int]) -> Array:
    """What each tile of the output sees of the images: [B, H', W' / t, kh (t + kw - 1) ch]."""
    kh, kw, channels, _ = kernel
    tile = _tile_of(images.shape, kernel, stride, padding)
    batch, height, width, _ = images.shape
    rows, columns = ((n + 2 * p - k) // stride + 1 for n, p, k in zip((height, width), padding, (kh, kw), strict=True))
    met = tile + kw - 1
    # A tile sees its own columns and the first ones of the next tile.
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


def cpu_conv(images: Maps, kernel: Kernel, stride: int, padding: int) -> Convolved:
    """What `xla_conv` computes, in the form that is fastest in a loop on a CPU. Reverse mode only.

    For many channels that is Winograd's minimal filtering F(4, 3) along rows. Four neighboring outputs need six inputs d and a
    kernel row g; with the matrices above

        out = A^T [(G g) * (B^T d)],

    6 products in place of 12, each a convolution of the columns alone by `_hybrid`. Rounding grows to about 1e-6 of the norm,
    from 4e-7. Images of 4x4 and many input channels are left to `_im2col`, as XLA's convolutions are slow there since jax 0.11;
    other kernels and strides, few channels and bfloat16 are left to `_banded`.
    """
    batch, height, width, channels = images.shape
    height, width = height + 2 * padding - kernel.shape[0] + 1, width + 2 * padding - 2
    tiles = -(-width // 4)
    fits = stride == 1 and kernel.shape[1] == 3 and 2 * tiles < width and images.dtype == jnp.float32
    if not fits or channels + kernel.shape[3] < 96:  # with 32 and 32, as in WRN-28-2, it gains nothing
        return _banded(images, kernel, stride, padding)
    if height * width <= _FEW_POSITIONS or channels >= _MANY_CHANNELS:
        return _im2col(images, kernel, stride, (padding, padding))
    right = 4 * (tiles + 1) - images.shape[2] - padding
    images = jnp.pad(images, ((0, 0), (padding, padding), (padding, right), (0, 0)))
    # Slices of whole columns copy whole channels; strided ones would copy number by number.
    fours = jnp.split(images.reshape(batch, -1, tiles + 1, 4 * channels), 4, axis=-1)
    columns = [x[:, :, :-1] for x in fours] + [x[:, :, 1:] for x in fours[:2]]
    of_kernel = [kernel[:, j : j + 1] for j in range(3)]
    products = [
        _hybrid(_combined(b, columns), _combined(g, of_kernel), 1, (0, 0)) for b, g in zip(_OF_IMAGES, _OF_KERNEL, strict=True)
    ]
    out = jnp.concatenate([_combined(a, products) for a in _OF_PRODUCTS], axis=-1)
    return out.reshape(batch, height, 4 * tiles, kernel.shape[-1])[:, :, :width]


def _combined(coefficients: np.ndarray, arrays: Sequence[Array]) -> Array:
    """The sum of coefficients times arrays, without those that are 0."""
    terms = [x if c == 1 else float(c) * x for c, x in zip(coefficients, arrays, strict=True) if c]
    return functools.reduce(jnp.add, terms)


LOWERINGS: dict[str, Callable[[Maps, Kernel, int, int], Convolved]] = {
    "xla": xla_conv,
    "cpu": cpu_conv,
    "gpu": gpu_conv,
    "onednn": onednn_conv,
}


def resolve_conv(conv: str, platform: str, *, kernels_vmapped: bool = False, dtype: str = "float32") -> str:
    """The lowering that `execution.conv` stands for: a key of LOWERINGS, `auto` by platform.

    Kernels are vmapped where clients with parameters of their own are trained under `vmap`. ValueError for another `conv`, or
    `cpu` on another platform (as `jax.default_backend()` names it), where sums of products may be less precise.
    """
    if conv == "auto":
        # Measured in benchmarks/speed.md: five networks with `auto`; `cpu` beside `xla` for WRN-28-2 ("Measured once"). On an
        # H200, kernels vmapped, `xla` took 80 to 200 times as long as `gpu`, not autotuned; without vmap nobody compared them.
        if platform == "cpu" and dtype == "bfloat16" and multiplies_bfloat16():
            return "onednn"
        return "cpu" if platform == "cpu" else "gpu" if platform == "gpu" and kernels_vmapped else "xla"
    if conv not in LOWERINGS:
        raise ValueError(f"execution.conv: got {conv}, accepted: auto, {', '.join(LOWERINGS)}")
    if conv in ("cpu", "onednn") and platform != "cpu":
        raise ValueError(f"execution.conv: got {conv} on {platform}, accepted: auto, xla, gpu")
    return conv


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has units that multiply bfloat16 matrices (AMX), as far as the system tells."""
    try:
        return "amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
