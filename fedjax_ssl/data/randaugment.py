"""RandAugment inside jit, equal to Pillow: a few operations, drawn for each image and applied one after the other.

`lax.switch` under vmap would compute every operation for every image; here the operations share three computations:

    warp    one gather through an affine map: Rotate, ShearX/Y, TranslateX/Y
    blend   d + f (x - d) with a degenerate image d: Brightness, Color, Contrast, Sharpness
    remap   new values for old, channel by channel: AutoContrast, Equalize, Posterize, Solarize, Invert

Inside, an image is `Planes` with whole values 0..255.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt32

from fedjax_ssl.arrays import Array, Count, Key, Scalar
from fedjax_ssl.data.augment import Augmentation, Image, compose, luma, pillow_box, rounded_mean
from fedjax_ssl.data.variants import VARIANTS, Op, Variant

Planes = Float32[Array, "ch H W"]


def randaugment(name: str) -> Augmentation:
    """The operations of a variant of RandAugment on images of 1 or 3 channels, without its final cutout."""
    if name not in VARIANTS:
        raise ValueError(f"got RandAugment variant {name!r}, accepted: {', '.join(VARIANTS)}")
    variant = VARIANTS[name]

    def apply(key: Key, image: Image) -> Image:
        height, width, channels = image.shape
        if channels not in (1, 3):
            raise ValueError(f"got an image of {channels} channels, accepted by RandAugment: 1 (gray) or 3 (RGB)")

        def slot(planes: Planes, key: Key) -> tuple[Planes, None]:
            return apply_op(draw(key, variant, height, width), planes, variant), None

        planes = jnp.moveaxis(image.astype(jnp.float32), -1, 0)
        planes, _ = jax.lax.scan(slot, planes, jax.random.split(key, variant.slots))
        return jnp.moveaxis(planes, 0, -1)

    return apply


def strong_view(name: str, base: Augmentation) -> Augmentation:
    """The strong view of a variant: `base` (flip and crop), the variant's operations before or after it, and its cutout."""
    ops, variant = randaugment(name), VARIANTS[name]
    return compose(*((ops, base) if variant.ops_first else (base, ops)), variant.cutout)


class Draw(NamedTuple):
    """One operation to apply: a value of `Op`, its magnitude in its own unit, and Cutout's center as shares in [0, 1)."""

    op: Count
    magnitude: Scalar
    center: Float32[Array, " 2"]


def draw(key: Key, variant: Variant, height: int, width: int) -> Draw:
    """Draws an operation of `variant` for an image of H x W pixels: IDENTITY where the one drawn is not to be applied."""
    ops = {**variant.ops, Op.TRANSLATE_X: variant.translate(width), Op.TRANSLATE_Y: variant.translate(height)}
    counts = np.array([len(magnitude.values) for magnitude in ops.values()])
    values = np.array([np.resize(magnitude.values, counts.max()) for magnitude in ops.values()], np.float32)
    spans = np.array([magnitude.span for magnitude in ops.values()], np.float32)

    which, applied, level, *center = jax.random.uniform(key, (5,))
    row = jnp.int32(which * len(ops))
    column = jnp.int32(level * jnp.array(counts)[row])
    op = jnp.where(applied < variant.probability, jnp.array(list(ops), jnp.int32)[row], Op.IDENTITY)
    return Draw(op, jnp.array(values)[row, column] + jnp.array(spans)[row] * level, jnp.stack(center))


def apply_op(drawn: Draw, planes: Planes, variant: Variant) -> Planes:
    """Applies an operation of the variant to an image of 1 or 3 channels, as Pillow does."""
    op, magnitude, center = drawn
    _, height, width = planes.shape
    # All three start from `planes`, not from each other's results, which XLA would compute again for every use.
    changed = jnp.select(
        [(op >= Op.ROTATE) & (op <= Op.TRANSLATE_Y), (op >= Op.BRIGHTNESS) & (op <= Op.SHARPNESS)],
        [_warp(op, magnitude, planes, variant), _blend(op, magnitude, planes)],
        _remap(op, magnitude, planes, variant),
    )
    if Op.CUTOUT in variant.ops:
        box = pillow_box(center[0], center[1], magnitude * width, height, width)
        changed = jnp.where((op == Op.CUTOUT) & box, 127.0, changed)
    return changed


def _warp(op: Count, magnitude: Scalar, planes: Planes, variant: Variant) -> Planes:
    """Rotate, Shear, Translate: pixel (x, y) comes from (a x + b y + c, d x + e y + f), in Pillow's 16.16 fixed point."""
    channels, height, width = planes.shape

    def only(code: Op) -> Scalar:
        return jnp.where(op == code, magnitude, 0.0)

    def source(a: Scalar, b: Scalar, c: Scalar) -> Int32[Array, "H W"]:
        start, per_column, per_row = (jnp.int32(jnp.floor(65536 * v + 0.5)) for v in (c + (a + b) / 2, a, b))
        return start + per_column * jnp.arange(width) + per_row * jnp.arange(height)[:, None]

    def pixels(row: Int32[Array, "H W"], column: Int32[Array, "H W"]) -> Planes:
        place = jnp.clip(row, 0, height - 1) * width + jnp.clip(column, 0, width - 1)
        return planes.reshape(channels, -1).at[:, place].get(mode="promise_in_bounds")

    angle, x, y = jnp.deg2rad(only(Op.ROTATE)), width / 2, height / 2
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    column = source(cos, only(Op.SHEAR_X) - sin, only(Op.TRANSLATE_X) + x - cos * x + sin * y)
    row = source(only(Op.SHEAR_Y) + sin, cos, only(Op.TRANSLATE_Y) + y - sin * x - cos * y)
    inside = (column >= 0) & (column < width << 16) & (row >= 0) & (row < height << 16)
    if variant.bilinear:
        # A shear moves along one axis alone, so it interpolates between two pixels.
        shear = (op == Op.SHEAR_X) | (op == Op.SHEAR_Y)
        row, column = (jnp.where(shear, v - 32768, v) for v in (row, column))
        row_part, column_part = (jnp.where(shear, v & 65535, 0) for v in (row, column))
        before = pixels(row >> 16, column >> 16)
        after = pixels((row >> 16) + (row_part > 0), (column >> 16) + (column_part > 0))
        warped = jnp.floor(before + (row_part + column_part) / 65536 * (after - before))
    else:
        warped = pixels(row >> 16, column >> 16)
    return jnp.where(inside, warped, variant.fill)


def _blend(op: Count, magnitude: Scalar, planes: Planes) -> Planes:
    """Brightness, Color, Contrast, Sharpness: d + f (x - d), rounded down, for a factor f and a degenerate image d."""
    gray = luma(*planes)[None] if len(planes) == 3 else planes
    degenerate = jnp.select(
        [op == Op.BRIGHTNESS, op == Op.COLOR, op == Op.CONTRAST], [0.0, gray, rounded_mean(gray)], _smooth(planes)
    )
    return jnp.floor(jnp.clip(degenerate + magnitude * (planes - degenerate), 0, 255))


def _smooth(planes: Planes) -> Planes:
    """(4 x + the sum of the 3 x 3 pixels around x) / 13, rounded; the image's border does not change."""
    _, height, width = planes.shape
    total = planes
    for window in ((1, 3, 1), (1, 1, 3)):
        total = jax.lax.reduce_window(total, 0.0, jax.lax.add, window, (1, 1, 1), "SAME")
    interior = np.pad(np.ones((height - 2, width - 2), bool), 1)
    return jnp.where(interior, jnp.floor((total + 4 * planes + 6.5) / 13), planes)


def _remap(op: Count, magnitude: Scalar, planes: Planes, variant: Variant) -> Planes:
    """AutoContrast, Equalize, Posterize, Solarize, Invert: new values for old, per channel; other operations: no change."""
    low, high = jnp.min(planes, (1, 2), keepdims=True), jnp.max(planes, (1, 2), keepdims=True)
    # The quotient is whole or at least 1/255 away from it: 1e-3 covers the rounding error alone.
    stretched = jnp.floor((planes - low) * (255 / jnp.maximum(high - low, 1)) + 1e-3)
    if variant.rounds_as_pillow:
        place, value = jnp.int32(low * 256 + high), jnp.int32(planes)
        bits = jnp.asarray(_one_less())[place * 8 + (value >> 5)] >> (value & 31).astype(jnp.uint32)
        stretched -= (bits & 1).astype(jnp.float32)
    step = jnp.float32(1 << jnp.int32(jnp.where(op == Op.POSTERIZE, 8 - magnitude, 0)))
    threshold = jnp.select([op == Op.SOLARIZE, op == Op.INVERT], [magnitude, 0.0], 256.0)
    changed = jnp.where(planes < threshold, jnp.floor(planes / step) * step, 255 - planes)
    changed = jnp.where((op == Op.AUTO_CONTRAST) & (high > low), stretched, changed)
    if Op.EQUALIZE in variant.ops:
        changed = jnp.where(op == Op.EQUALIZE, _equalized(planes, op == Op.EQUALIZE), changed)
    return changed


@functools.cache
def _one_less() -> UInt32[np.ndarray, "524288"]:
    """A table of the values for which Pillow's AutoContrast returns 1 less than floor(255 (x - low) / (high - low)).

    Its product and its sum in float64 may fall just short of a whole number. A bit for each low, high and x, 32 in an entry.
    """
    x, bits = np.arange(256), np.zeros((256, 256, 256), bool)
    for low in x:
        value, width = x[low:], x[low + 1 :, None] - low
        scale = 255.0 / width
        bits[low, low + 1 :, low:] = np.int64(value * scale + -low * scale) < 255 * (value - low) // width
    return np.packbits(bits, bitorder="little").view("<u4")


def _equalized(planes: Planes, drawn: Bool[Array, ""]) -> Planes:
    """Equalize: (s // 2 + number of pixels darker than x) // s, s = number of pixels darker than the brightest // 255.

    A channel whose s is 0 does not change. The result is used only if Equalize was `drawn`.
    """
    channels = len(planes)
    place = jnp.int32(planes) + 256 * jnp.arange(channels)[:, None, None]
    # A scatter counts fastest on a CPU; images that did not draw Equalize count nothing, so a GPU skips them.
    counted = jnp.where(drawn, place, 256 * channels).ravel()
    histogram = jnp.zeros(256 * channels, jnp.int32).at[counted].add(1, mode="drop").reshape(channels, 256)
    # The exclusive cumulative sum, as a matrix product: XLA would repeat the last step of a cumsum for every pixel below.
    darker = jnp.matmul(jnp.float32(histogram), jnp.tri(256, k=-1).T, precision="highest").ravel()
    s = jnp.sum(planes < jnp.max(planes, (1, 2), keepdims=True), (1, 2), keepdims=True) // 255
    rank = s // 2 + darker.at[place].get(mode="promise_in_bounds")
    return jnp.where(s > 0, jnp.minimum(jnp.floor((rank + 0.5) / jnp.maximum(s, 1)), 255), planes)
