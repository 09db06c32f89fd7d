"""RandAugment inside jit, equal to Pillow: a table of variants, and one pass that applies any of their operations.

Every variant draws a few operations per image and applies them one after the other; variants differ in which operations, how
often, and how strongly, which is what `VARIANTS` lists. `lax.switch` under vmap would compute every operation for every image.
Here all share three passes instead, each of which leaves the image alone unless its operation was drawn:

    warp    one gather through an affine map: Rotate, ShearX/Y, TranslateX/Y
    blend   d + f (x - d) with a degenerate image d: Brightness, Color, Contrast, Sharpness
    lookup  a table of 256 entries per channel: AutoContrast, Equalize, Posterize, Solarize, Invert

Images are planes float32 [ch, H, W] with whole values 0..255 in here: reductions and shifts then run along memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.augment import LUMA, Augmentation, Key, compose, cutout, cutout_clipped, pillow_box


class Op(enum.IntEnum):
    """The operations; in brackets what their magnitude is."""

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
    return Magnitude(tuple(float(v) for v in np.ravel(values)))


def _either_sign(values: float | np.ndarray) -> Magnitude:
    return _one_of(np.concatenate([np.ravel(values), -np.ravel(values)]))


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
    """

    slots: int
    probability: float
    ops: Mapping[Op, Magnitude]
    translate: Callable[[int], Magnitude]
    cutout: Augmentation = compose()
    fill: float = 0.0
    bilinear: bool = False


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


def _fedlabel(slots: int, level: float) -> Variant:
    """FedLabel's fixed level, as a share of the largest magnitude; Posterize goes from 8 bits to 4."""
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
    # SemiFL: full strength; the probability is itself drawn from U(.2, .8) for every operation, which makes it .5
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
    "fedlabel_released": _fedlabel(slots=1, level=10 / 30),
    "fedlabel_paper": _fedlabel(slots=10, level=1 / 30),
    # FedMatch: mild; its Equalize does nothing; shears by the nearest pixel (there: bicubic)
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
            raise ValueError(f"got an image of {channels} channels, accepted by RandAugment: 1 (grey) or 3 (RGB)")

        def slot(planes: jax.Array, key: Key) -> tuple[jax.Array, None]:
            draw_key, op_key = jax.random.split(key)
            op, magnitude = draw(draw_key, variant, (height, width))
            return apply_op(op, magnitude, op_key, planes, variant), None

        planes = jnp.moveaxis(image.astype(jnp.float32), -1, 0)
        planes, _ = jax.lax.scan(slot, planes, jax.random.split(key, variant.slots))
        return jnp.moveaxis(planes, 0, -1)

    return apply


def strong_view(name: str, base: Augmentation) -> Augmentation:
    """A variant's whole strong view: `base` (flip and crop, drawn anew), its RandAugment, its final cutout.

    Raises:
        ValueError: `name` is not a key of `VARIANTS`.
    """
    return compose(base, randaugment(name), _variant(name).cutout)


def _variant(name: str) -> Variant:
    if name not in VARIANTS:
        raise ValueError(f"got RandAugment variant {name!r}, accepted: {', '.join(VARIANTS)}")
    return VARIANTS[name]


def draw(key: Key, variant: Variant, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """What one slot does to an image of `shape` (H, W): an operation (int32 scalar) and its magnitude (float32 scalar).

    The operation is IDENTITY where the one drawn is not applied.
    """
    height, width = shape
    ops = {**variant.ops, Op.TRANSLATE_X: variant.translate(width), Op.TRANSLATE_Y: variant.translate(height)}
    counts = [len(magnitude.values) for magnitude in ops.values()]
    values = jnp.asarray([np.resize(magnitude.values, max(counts)) for magnitude in ops.values()], jnp.float32)
    spans = jnp.asarray([magnitude.span for magnitude in ops.values()], jnp.float32)

    which, applied, level = jax.random.uniform(key, (3,))
    row = jnp.int32(which * len(ops))
    column = jnp.int32(level * jnp.asarray(counts)[row])
    op = jnp.where(applied < variant.probability, jnp.asarray(list(ops), jnp.int32)[row], Op.IDENTITY)
    return op, values[row, column] + spans[row] * level


def apply_op(op: jax.Array, magnitude: jax.Array, key: Key, planes: jax.Array, variant: Variant) -> jax.Array:
    """One operation, as Pillow does it.

    Args:
        op: int32 scalar, a value of `Op` that is among the variant's.
        magnitude: float32 scalar, in the operation's unit.
        key: for the position of Cutout.
        planes: float32 [ch, H, W], whole values 0..255; ch is 1 or 3.
        variant: whose operations, fill and interpolation apply.

    Returns:
        float32 [ch, H, W], whole values 0..255.
    """
    planes = _warp(op, magnitude, planes, variant)
    planes = _blend(op, magnitude, planes)
    planes = _lookup(op, magnitude, planes, variant)
    if Op.CUTOUT in variant.ops:
        box = pillow_box(key, planes.shape[1:], magnitude * planes.shape[2])
        planes = jnp.where((op == Op.CUTOUT) & box, 127.0, planes)
    return planes


def _warp(op: jax.Array, magnitude: jax.Array, planes: jax.Array, variant: Variant) -> jax.Array:
    """Rotate, shear or translate by one gather: pixel (x, y) comes from (a x + b y + c, d x + e y + f), in 16.16 fixed point."""
    _, height, width = planes.shape

    def only(*ops: Op) -> jax.Array:
        return jnp.where(jnp.isin(op, jnp.array(ops)), magnitude, 0.0)

    def source(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        per_column, per_row, start = jnp.int32(jnp.floor(jnp.stack([a, b, c + (a + b) / 2]) * 65536 + 0.5))
        return start + per_column * jnp.arange(width) + per_row * jnp.arange(height)[:, None]

    angle = jnp.deg2rad(only(Op.ROTATE))
    cos, sin, x, y = jnp.cos(angle), jnp.sin(angle), width / 2, height / 2
    column = source(cos, only(Op.SHEAR_X) - sin, only(Op.TRANSLATE_X) + x - cos * x + sin * y)
    row = source(only(Op.SHEAR_Y) + sin, cos, only(Op.TRANSLATE_Y) + y - sin * x - cos * y)
    inside = (column >= 0) & (column < width << 16) & (row >= 0) & (row < height << 16)

    def pixels(row: jax.Array, column: jax.Array) -> jax.Array:
        return planes.at[:, row, column].get(mode="clip", wrap_negative_indices=False)

    if not variant.bilinear:
        return jnp.where(inside, pixels(row >> 16, column >> 16), variant.fill)
    # A shear moves along one axis, so the pixel before and the pixel after are all there is to interpolate.
    between = (op == Op.SHEAR_X) | (op == Op.SHEAR_Y)
    row, column = (jnp.where(between, coordinate - 32768, coordinate) for coordinate in (row, column))
    row_part, column_part = (jnp.where(between, coordinate & 65535, 0) for coordinate in (row, column))
    before = pixels(row >> 16, column >> 16)
    after = pixels((row >> 16) + (row_part > 0), (column >> 16) + (column_part > 0))
    mixed = jnp.floor(before + (row_part + column_part) / 65536 * (after - before))
    return jnp.where(inside, mixed, variant.fill)


def _blend(op: jax.Array, magnitude: jax.Array, planes: jax.Array) -> jax.Array:
    """Brightness, Color, Contrast, Sharpness: d + f (x - d) rounded down, for a factor f and a degenerate image d."""
    channels, height, width = planes.shape
    grey = planes
    if channels == 3:
        grey = jnp.floor((jnp.tensordot(LUMA, planes, 1) + 0x8000) / 65536)[None]
    mean = jnp.floor(jnp.mean(grey) + 0.5)
    degenerate = jnp.select(
        [op == Op.BRIGHTNESS, op == Op.COLOR, op == Op.CONTRAST, op == Op.SHARPNESS],
        [0.0, grey, mean, _smooth(planes)],
        planes,
    )
    factor = jnp.where((op >= Op.BRIGHTNESS) & (op <= Op.SHARPNESS), magnitude, 1.0)
    return jnp.floor(jnp.clip(degenerate + factor * (planes - degenerate), 0.0, 255.0))


def _smooth(planes: jax.Array) -> jax.Array:
    """(5 x + the sum of its 8 neighbors) / 13, rounded; border pixels stay."""
    _, height, width = planes.shape
    padded = jnp.pad(planes, ((0, 0), (1, 1), (1, 1)))
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * planes
    interior = np.pad(np.ones((height - 2, width - 2), bool), 1)
    return jnp.where(interior, jnp.floor(total / 13 + 0.5), planes)


def _lookup(op: jax.Array, magnitude: jax.Array, planes: jax.Array, variant: Variant) -> jax.Array:
    """AutoContrast, Equalize, Posterize, Solarize, Invert: a table of the 256 values per channel, then one gather."""
    levels = jnp.arange(256, dtype=jnp.float32)
    index = planes.astype(jnp.int32)
    low, high = jnp.min(planes, (1, 2))[:, None], jnp.max(planes, (1, 2))[:, None]

    stretch = (op == Op.AUTO_CONTRAST) & (high > low)
    # The quotient is at least 1/255 from the next whole number, or whole: 1e-3 covers the rounding error alone.
    stretched = jnp.floor((levels - low) * 255 / jnp.maximum(high - low, 1) + 1e-3)
    table = jnp.where(stretch, jnp.clip(stretched, 0, 255), levels)

    step = jnp.exp2(jnp.where(op == Op.POSTERIZE, 8 - magnitude, 0.0))
    table = jnp.floor(table / step) * step

    threshold = jnp.select([op == Op.SOLARIZE, op == Op.INVERT], [magnitude, 0.0], 256.0)
    table = jnp.where(table < threshold, table, 255 - table)
    if Op.EQUALIZE in variant.ops:
        table = jnp.where(op == Op.EQUALIZE, _equalized(index, high), table)
    return jax.vmap(lambda row, plane: row[plane])(table, index)


def _equalized(index: jax.Array, high: jax.Array) -> jax.Array:
    """float32 [ch, 256]: the table that makes every channel's values equally frequent, as far as whole bins can.

    table[v] = (s // 2 + number of values below v) // s, s = (H W - count of the highest value) // 255; s = 0: no change.
    """
    channels, height, width = index.shape
    histogram = jnp.zeros((channels, 256)).at[jnp.arange(channels)[:, None, None], index].add(1.0, mode="promise_in_bounds")
    below = jnp.cumsum(histogram, 1) - histogram
    levels = jnp.arange(256, dtype=jnp.float32)
    below_highest = jnp.sum(jnp.where(levels == high, below, 0.0), 1, keepdims=True)
    step = jnp.floor(below_highest / 255)
    table = jnp.floor((jnp.floor(step / 2) + below + 0.5) / jnp.maximum(step, 1))
    return jnp.where(step > 0, jnp.minimum(table, 255), levels)
