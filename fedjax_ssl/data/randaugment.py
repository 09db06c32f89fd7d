"""RandAugment inside jit, equal to Pillow: a table of variants, and one function that applies any of their operations.

A variant draws a few operations per image and applies them one after the other. Variants differ in which operations, how often
and how strongly, which is what `VARIANTS` lists. `lax.switch` under vmap would compute every operation for every image; here
the operations share three passes over the image, and the one drawn picks its pass:

    warp    one gather through an affine map: Rotate, ShearX/Y, TranslateX/Y
    blend   d + f (x - d) with a degenerate image d: Brightness, Color, Contrast, Sharpness
    remap   new values for old, channel by channel: AutoContrast, Equalize, Posterize, Solarize, Invert

In here an image is planes float32 [ch, H, W] with whole values 0..255: reductions and shifts then run along memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.augment import Augmentation, Key, compose, cutout, cutout_clipped, luma, pillow_box, rounded_mean


class Op(enum.IntEnum):
    """The operations; the comment says what the magnitude is."""

    IDENTITY = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    POSTERIZE = 4  # bits kept
    SOLARIZE = 5  # threshold from which on values are inverted
    BRIGHTNESS = 6  # factor; 1 leaves the image as it is, here and in the next three
    COLOR = 7
    CONTRAST = 8
    SHARPNESS = 9
    ROTATE = 10  # degrees, counterclockwise
    SHEAR_X = 11  # pixels per pixel
    SHEAR_Y = 12
    TRANSLATE_X = 13  # pixels
    TRANSLATE_Y = 14
    CUTOUT = 15  # side, as a share of the width


class Magnitude(NamedTuple):
    """Distribution of an operation's magnitude: one of `values`, all equally likely, plus U(0, span)."""

    values: tuple[float, ...] = (0.0,)
    span: float = 0.0


def _uniform(low: float, high: float) -> Magnitude:
    return Magnitude((low,), high - low)


def _one_of(*values: float | np.ndarray) -> Magnitude:
    return Magnitude(tuple(np.hstack(values).tolist()))


def _either_sign(values: float | np.ndarray) -> Magnitude:
    return _one_of(values, -values)


class Variant(NamedTuple):
    """One version of RandAugment.

    Attributes:
        slots: operations drawn per image, independently and with replacement.
        probability: that a drawn operation is applied.
        ops: the operations to draw from, all equally likely, and their magnitudes.
        translate: side of the image in pixels -> magnitude of TranslateX and TranslateY, which are among the operations.
        cutout: what ends the strong view.
        fill: value of pixels that come in from outside.
        bilinear: interpolate shears. (Rotation keeps Pillow's default, the nearest pixel.)
        ops_first: the operations come before flip and crop.
    """

    slots: int
    probability: float
    ops: Mapping[Op, Magnitude]
    translate: Callable[[int], Magnitude]
    cutout: Augmentation = compose()
    fill: float = 0.0
    bilinear: bool = False
    ops_first: bool = False


def _ops(
    *plain: Op, enhance: Magnitude, posterize: Magnitude, solarize: Magnitude, rotate: Magnitude, shear: Magnitude
) -> dict[Op, Magnitude]:
    """`plain` operations, which have no magnitude, and those that all variants share (translations apart)."""
    return {
        **dict.fromkeys(plain, Magnitude()),
        Op.POSTERIZE: posterize,
        Op.SOLARIZE: solarize,
        **dict.fromkeys([Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS], enhance),
        Op.ROTATE: rotate,
        **dict.fromkeys([Op.SHEAR_X, Op.SHEAR_Y], shear),
    }


def _fixed(slots: int, level: float, *, ops_first: bool = False) -> Variant:
    """One fixed level for all, a share of each operation's scale: low is dark, flat, inverted; Posterize 8 bits to 4."""
    return Variant(
        slots=slots,
        probability=1.0,
        ops=_ops(
            *_PLAIN,
            enhance=_one_of(0.1 + 1.8 * level),
            posterize=_one_of(8 - np.round(4 * level)),
            solarize=_one_of(256 * level),
            rotate=_either_sign(30 * level),
            shear=_either_sign(0.3 * level),
        ),
        translate=lambda side: _either_sign(0.3 * level * side),
        ops_first=ops_first,
    )


_PLAIN = (Op.IDENTITY, Op.AUTO_CONTRAST, Op.EQUALIZE)
_LEVELS = np.arange(1, 10) / 10  # l / 10 for the levels l = 1..9
_MILD = np.repeat(np.arange(5), [77, 77, 47, 27, 12]) / 9  # k / 9 for k uniform in 0..M-1, M uniform in 2..5

VARIANTS: dict[str, Variant] = {
    # FixMatch (its RandAugment, "rac")
    "fixmatch": Variant(
        slots=2,
        probability=0.5,
        ops=_ops(
            *_PLAIN,
            enhance=_one_of(0.1 + 1.8 * _LEVELS),
            posterize=_one_of(4 - np.floor(4 * _LEVELS)),
            solarize=_one_of(256 - np.floor(256 * _LEVELS)),
            rotate=_either_sign(30 * _LEVELS),
            shear=_either_sign(0.3 * _LEVELS),
        ),
        translate=lambda side: _either_sign(10 * _LEVELS),
        cutout=cutout_clipped(0.5, 127.5),
    ),
    # RandAugmentMC(2, 10): FixMatch's PyTorch port, FedDure
    "randaugment_mc": Variant(
        slots=2,
        probability=0.5,
        ops=_ops(
            *_PLAIN,
            enhance=_one_of(0.05 + 0.9 * _LEVELS),
            posterize=_one_of(4 + np.floor(4 * _LEVELS)),
            solarize=_one_of(256 - np.floor(256 * _LEVELS)),
            rotate=_either_sign(30 * _LEVELS),
            shear=_either_sign(0.3 * _LEVELS),
        ),
        translate=lambda side: _either_sign(np.floor(0.3 * _LEVELS * side)),
        cutout=cutout(0.5, 0.5, 127),
    ),
    # RandAugment(3, 5): USB and TorchSSL, where the 5 is unused, and (FL)^2
    "usb": Variant(
        slots=3,
        probability=1.0,
        ops=_ops(
            *_PLAIN,
            enhance=_uniform(0.05, 0.95),
            posterize=_one_of(4, 5, 6, 7),
            solarize=_uniform(0, 256),
            rotate=_uniform(-30, 30),
            shear=_uniform(-0.3, 0.3),
        ),
        translate=lambda side: _uniform(-0.3 * side, 0.3 * side),
        cutout=cutout(0, 0.5, (125, 123, 114)),
    ),
    # SemiFL: full strength; for every operation the probability is itself drawn from U(.2, .8), which makes it .5
    "semifl": Variant(
        slots=2,
        probability=0.5,
        ops={
            Op.CUTOUT: _one_of(40 / 32),
            **_ops(
                *(Op.AUTO_CONTRAST, Op.EQUALIZE, Op.INVERT),
                enhance=_one_of(1.9),
                posterize=_one_of(4),
                solarize=_one_of(0),
                rotate=_either_sign(30),
                shear=_either_sign(0.3),
            ),
        },
        translate=lambda side: _either_sign(100),
        bilinear=True,
    ),
    "fedlabel_released": _fixed(slots=1, level=10 / 30, ops_first=True),
    "fedlabel_paper": _fixed(slots=10, level=1 / 30),
    # FedSiam's FedMatch and FedFixMatch: n = 10, m = 10, read as 10 of the usual 30
    "fedsiam": _fixed(slots=10, level=10 / 30),
    # FedMatch: mild; its Equalize does nothing. It draws M once per image and shears bicubically; here per slot, nearest pixel
    "fedmatch": Variant(
        slots=6,
        probability=1.0,
        ops={
            **_ops(
                *(Op.IDENTITY, Op.AUTO_CONTRAST),
                enhance=_one_of(1 + 0.9 * _MILD, 1 - 0.9 * _MILD),
                posterize=_one_of(np.round(8 - 4 * _MILD)),
                solarize=_one_of(256 - 25 * _MILD),
                rotate=_one_of(360 * _MILD),
                shear=_either_sign(0.3 * _MILD),
            ),
            Op.CONTRAST: _one_of(1 + 0.5 * _MILD, 1 - 0.5 * _MILD),
            Op.BRIGHTNESS: _one_of(1 + 0.3 * _MILD, 1 - 0.3 * _MILD),
        },
        translate=lambda side: _either_sign(0.2 * _MILD * side),
        fill=128.0,
    ),
}


def randaugment(name: str) -> Augmentation:
    """The operations of a variant, without its final cutout.

    Args:
        name: a key of `VARIANTS`.

    Raises:
        ValueError: no such variant; for images that have neither 1 nor 3 channels, when traced.
    """
    variant = _variant(name)

    def apply(key: Key, image: jax.Array) -> jax.Array:
        height, width, channels = image.shape
        if channels not in (1, 3):
            raise ValueError(f"got an image of {channels} channels, accepted by RandAugment: 1 (gray) or 3 (RGB)")

        def slot(planes: jax.Array, key: Key) -> tuple[jax.Array, None]:
            return apply_op(draw(key, variant, height, width), planes, variant), None

        planes = jnp.moveaxis(image.astype(jnp.float32), -1, 0)
        planes, _ = jax.lax.scan(slot, planes, jax.random.split(key, variant.slots))
        return jnp.moveaxis(planes, 0, -1)

    return apply


def strong_view(name: str, base: Augmentation) -> Augmentation:
    """A variant's whole strong view: `base` (flip and crop, drawn anew), its RandAugment, its final cutout.

    The first two change places where the variant says so.

    Raises:
        ValueError: `name` is not a key of `VARIANTS`.
    """
    variant = _variant(name)
    ops = randaugment(name)
    return compose(*((ops, base) if variant.ops_first else (base, ops)), variant.cutout)


def _variant(name: str) -> Variant:
    if name not in VARIANTS:
        raise ValueError(f"got RandAugment variant {name!r}, accepted: {', '.join(VARIANTS)}")
    return VARIANTS[name]


class Draw(NamedTuple):
    """What one slot does.

    Attributes:
        op: int32 scalar, a value of `Op`; IDENTITY where the operation drawn is not applied.
        magnitude: float32 scalar, in the operation's unit.
        center: float32 [2], row and column of Cutout's center as shares in [0, 1).
    """

    op: jax.Array
    magnitude: jax.Array
    center: jax.Array


def draw(key: Key, variant: Variant, height: int, width: int) -> Draw:
    """An operation of `variant`, its magnitude and whether it is applied, for an image of H x W pixels."""
    ops = {**variant.ops, Op.TRANSLATE_X: variant.translate(width), Op.TRANSLATE_Y: variant.translate(height)}
    counts = np.array([len(magnitude.values) for magnitude in ops.values()])
    values = np.array([np.resize(magnitude.values, counts.max()) for magnitude in ops.values()], np.float32)
    spans = np.array([magnitude.span for magnitude in ops.values()], np.float32)

    which, applied, level, *center = jax.random.uniform(key, (5,))
    row = jnp.int32(which * len(ops))
    column = jnp.int32(level * jnp.array(counts)[row])
    op = jnp.where(applied < variant.probability, jnp.array(list(ops), jnp.int32)[row], Op.IDENTITY)
    return Draw(op, jnp.array(values)[row, column] + jnp.array(spans)[row] * level, jnp.stack(center))


def apply_op(drawn: Draw, planes: jax.Array, variant: Variant) -> jax.Array:
    """One operation, as Pillow does it.

    Args:
        drawn: the operation and its magnitude.
        planes: float32 [ch, H, W], whole values 0..255; ch is 1 or 3.
        variant: whose fill and interpolation apply; Equalize and Cutout do nothing for a variant that lacks them.

    Returns:
        float32 [ch, H, W], whole values 0..255.
    """
    op, magnitude, center = drawn
    _, height, width = planes.shape
    # All three start from `planes`, not from each other: what one computes, XLA would repeat for every use in the next.
    changed = jnp.select(
        [(op >= Op.ROTATE) & (op <= Op.TRANSLATE_Y), (op >= Op.BRIGHTNESS) & (op <= Op.SHARPNESS)],
        [_warp(op, magnitude, planes, variant), _blend(op, magnitude, planes)],
        _remap(op, magnitude, planes, equalize=Op.EQUALIZE in variant.ops),
    )
    if Op.CUTOUT in variant.ops:
        box = pillow_box(center[0], center[1], magnitude * width, height, width)
        changed = jnp.where((op == Op.CUTOUT) & box, 127.0, changed)
    return changed


def _warp(op: jax.Array, magnitude: jax.Array, planes: jax.Array, variant: Variant) -> jax.Array:
    """Rotate, Shear, Translate: pixel (x, y) comes from (a x + b y + c, d x + e y + f), in Pillow's 16.16 fixed point."""
    channels, height, width = planes.shape

    def only(code: Op) -> jax.Array:
        return jnp.where(op == code, magnitude, 0.0)

    def source(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        start, per_column, per_row = (jnp.int32(jnp.floor(65536 * v + 0.5)) for v in (c + (a + b) / 2, a, b))
        return start + per_column * jnp.arange(width) + per_row * jnp.arange(height)[:, None]

    def pixels(row: jax.Array, column: jax.Array) -> jax.Array:
        place = jnp.clip(row, 0, height - 1) * width + jnp.clip(column, 0, width - 1)
        return planes.reshape(channels, -1).at[:, place].get(mode="promise_in_bounds")

    angle, x, y = jnp.deg2rad(only(Op.ROTATE)), width / 2, height / 2
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    column = source(cos, only(Op.SHEAR_X) - sin, only(Op.TRANSLATE_X) + x - cos * x + sin * y)
    row = source(only(Op.SHEAR_Y) + sin, cos, only(Op.TRANSLATE_Y) + y - sin * x - cos * y)
    inside = (column >= 0) & (column < width << 16) & (row >= 0) & (row < height << 16)
    if variant.bilinear:
        # A shear moves along one axis alone, so two pixels are all there is to interpolate between.
        shear = (op == Op.SHEAR_X) | (op == Op.SHEAR_Y)
        row, column = (jnp.where(shear, v - 32768, v) for v in (row, column))
        row_part, column_part = (jnp.where(shear, v & 65535, 0) for v in (row, column))
        before = pixels(row >> 16, column >> 16)
        after = pixels((row >> 16) + (row_part > 0), (column >> 16) + (column_part > 0))
        moved = jnp.floor(before + (row_part + column_part) / 65536 * (after - before))
    else:
        moved = pixels(row >> 16, column >> 16)
    return jnp.where(inside, moved, variant.fill)


def _blend(op: jax.Array, magnitude: jax.Array, planes: jax.Array) -> jax.Array:
    """Brightness, Color, Contrast, Sharpness: d + f (x - d), rounded down, for a factor f and a degenerate image d."""
    gray = luma(*planes)[None] if len(planes) == 3 else planes
    degenerate = jnp.select(
        [op == Op.BRIGHTNESS, op == Op.COLOR, op == Op.CONTRAST], [0.0, gray, rounded_mean(gray)], _smooth(planes)
    )
    return jnp.floor(jnp.clip(degenerate + magnitude * (planes - degenerate), 0, 255))


def _smooth(planes: jax.Array) -> jax.Array:
    """(4 x + the sum of the 3 x 3 pixels around x) / 13, rounded; the image's border stays as it is."""
    _, height, width = planes.shape
    total = planes
    for window in ((1, 3, 1), (1, 1, 3)):
        total = jax.lax.reduce_window(total, 0.0, jax.lax.add, window, (1, 1, 1), "SAME")
    interior = np.pad(np.ones((height - 2, width - 2), bool), 1)
    return jnp.where(interior, jnp.floor((total + 4 * planes + 6.5) / 13), planes)


def _remap(op: jax.Array, magnitude: jax.Array, planes: jax.Array, equalize: bool) -> jax.Array:
    """AutoContrast, Equalize, Posterize, Solarize, Invert: new values for old, per channel; any other: no change."""
    low, high = jnp.min(planes, (1, 2), keepdims=True), jnp.max(planes, (1, 2), keepdims=True)
    # The quotient is whole or at least 1/255 away from it: 1e-3 covers the rounding error, no more.
    stretched = jnp.floor((planes - low) * (255 / jnp.maximum(high - low, 1)) + 1e-3)
    step = jnp.float32(1 << jnp.int32(jnp.where(op == Op.POSTERIZE, 8 - magnitude, 0)))
    threshold = jnp.select([op == Op.SOLARIZE, op == Op.INVERT], [magnitude, 0.0], 256.0)
    changed = jnp.where(planes < threshold, jnp.floor(planes / step) * step, 255 - planes)
    changed = jnp.where((op == Op.AUTO_CONTRAST) & (high > low), stretched, changed)
    if equalize:
        changed = jnp.where(op == Op.EQUALIZE, _equalized(planes, op == Op.EQUALIZE), changed)
    return changed


def _equalized(planes: jax.Array, drawn: jax.Array) -> jax.Array:
    """Equalize: (s // 2 + number of pixels darker than x) // s, s = number of pixels darker than the brightest // 255.

    A channel whose s is 0 stays as it is. Meaningless where `drawn` (bool scalar) is false.
    """
    channels = len(planes)
    place = jnp.int32(planes) + 256 * jnp.arange(channels)[:, None, None]
    # A scatter is what a CPU counts with fastest; images that did not draw Equalize count nothing, so a GPU skips them.
    counted = jnp.where(drawn, place, 256 * channels).ravel()
    histogram = jnp.zeros(256 * channels, jnp.int32).at[counted].add(1, mode="drop").reshape(channels, 256)
    # The exclusive cumulative sum, as a matrix product: a cumsum's last step would be repeated for every pixel below.
    darker = jnp.matmul(jnp.float32(histogram), jnp.tri(256, k=-1).T, precision="highest").ravel()
    s = jnp.sum(planes < jnp.max(planes, (1, 2), keepdims=True), (1, 2), keepdims=True) // 255
    rank = s // 2 + darker.at[place].get(mode="promise_in_bounds")
    return jnp.where(s > 0, jnp.minimum(jnp.floor((rank + 0.5) / jnp.maximum(s, 1)), 255), planes)
