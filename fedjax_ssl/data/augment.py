"""Augmentation inside jit: flips, crops, cutouts, colors, and the plain, weak, strong and labeled view of a batch.

An augmentation is a pure function (key, image) -> image of whole values 0..255, as uint8 or float32. Flips and crops do not
change the dtype; all others return float32. `make_views` maps augmentations over a batch, one key per example, and normalizes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Shaped, UInt8

from fedjax_ssl.arrays import Array, Count, Key, Number

Image = Shaped[Array, "H W ch"]
Augmentation = Callable[[Key, Image], Image]
Batch = UInt8[Array, "B H W ch"] | Float32[Array, "B V D"]
"""A batch of images, or for texts V stored views, each of D features."""
View = Float32[Array, "B H W ch"] | Float32[Array, "B D"]
Fill = float | Sequence[float]

LUMA = (19595.0, 38470.0, 7471.0)
"""Weights of R, G, B in Pillow's gray, in units of 2**-16; their sums are exact in float32."""

_PAD_MODES = {"reflect": "reflect", "zero": "constant", "edge": "edge"}


def compose(*augmentations: Augmentation) -> Augmentation:
    """Applies augmentations one after the other, each with its own key; `compose()` returns the image unchanged."""

    def apply(key: Key, image: Image) -> Image:
        for augmentation, own_key in zip(augmentations, jax.random.split(key, len(augmentations)), strict=True):
            image = augmentation(own_key, image)
        return image

    return apply


def flip() -> Augmentation:
    """The left-right mirror image, with probability 1/2."""

    def apply(key: Key, image: Image) -> Image:
        return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)

    return apply


def crop(pad: int = 4, mode: str = "reflect") -> Augmentation:
    """Pads every side by `pad` pixels and crops back to the old size, at one of (2 pad + 1)^2 equally likely positions.

    The padding is `reflect` (the image mirrored at its border pixel), `zero` or `edge`.
    """
    if mode not in _PAD_MODES:
        raise ValueError(f"got crop mode {mode!r}, accepted: {', '.join(_PAD_MODES)}")
    if pad < 0:
        raise ValueError(f"got crop pad {pad}, accepted: 0 or more pixels")

    def apply(key: Key, image: Image) -> Image:
        padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode=_PAD_MODES[mode])
        top, left = _below(key, 2 * pad + 1, 2 * pad + 1)
        return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)

    return apply


def contrast(low: float, high: float) -> Augmentation:
    """Changes the contrast of an image of 1 or 3 channels as Pillow does: d + f (x - d), mean gray d, f ~ U(low, high)."""
    return blend(lambda image: rounded_mean(gray_of(image)), low, high)


def blend(degenerate: Callable[[Image], Number | Image], low: float, high: float) -> Augmentation:
    """Pillow's way to change an image x: d + f (x - d), cut to 0..255 and rounded down, with f ~ U(low, high).

    d is the `degenerate` image of x, or its one value.
    """
    if not 0 <= low <= high:
        raise ValueError(f"got factors of an image from {low} to {high}, accepted: 0 <= low <= high")

    def apply(key: Key, image: Image) -> Image:
        factor, d = low + (high - low) * jax.random.uniform(key), degenerate(image)
        return jnp.floor(jnp.clip(d + factor * (image.astype(jnp.float32) - d), 0, 255))

    return apply


def grayscale(probability: float) -> Augmentation:
    """With this probability, turns all channels of an image of 1 or 3 channels gray."""
    if not 0 <= probability <= 1:
        raise ValueError(f"got a grayscale probability of {probability}, accepted: a number in [0, 1]")

    def apply(key: Key, image: Image) -> Image:
        return jnp.where(jax.random.bernoulli(key, probability), gray_of(image), image.astype(jnp.float32))

    return apply


def gray_of(image: Image) -> Float32[Array, "H W 1"]:
    """Pillow's gray of an image of 1 or 3 channels."""
    if image.shape[-1] not in (1, 3):
        raise ValueError(f"got an image of {image.shape[-1]} channels, accepted: 1 (gray) or 3 (RGB)")
    if image.shape[-1] == 1:
        return image.astype(jnp.float32)
    return luma(*(image[..., k].astype(jnp.float32) for k in range(3)))[..., None]


def luma(red: Float[Array, "H W"], green: Float[Array, "H W"], blue: Float[Array, "H W"]) -> Float[Array, "H W"]:
    """Pillow's gray of colors 0..255: their weighted sum, rounded."""
    weighted = (weight * color for weight, color in zip(LUMA, (red, green, blue), strict=True))
    return jnp.floor((sum(weighted) + 0x8000) / 65536)


def rounded_mean(gray: Float32[Array, "*shape"]) -> Count:
    """The mean of whole values, rounded to a whole number."""
    return (2 * jnp.int32(jnp.sum(gray)) + gray.size) // (2 * gray.size)  # a float quotient can miss a half


def cutout(low: float, high: float, fill: Fill, first: float = 0.0) -> Augmentation:
    """Paints a square whose side is U(low, high) times the width: the cutout of RandAugment's PyTorch ports.

    The center is drawn uniformly over the image, without the rows and columns before `first`. The top left corner is clamped to
    the image and rounded down before the side is added, and the far edges are painted too, as Pillow's rectangles include them.
    The fill is a value 0..255 or one per channel; gray images get the luma of an RGB fill.
    """
    if not 0 <= low <= high:
        raise ValueError(f"got cutout sides from {low} to {high}, accepted: 0 <= low <= high, as shares of the width")

    def apply(key: Key, image: Image) -> Image:
        height, width, channels = image.shape
        *center, size = jax.random.uniform(key, (3,))
        row, column = ((first + (side - first) * share) / side for share, side in zip(center, (height, width), strict=True))
        box = pillow_box(row, column, (low + (high - low) * size) * width, height, width)
        return jnp.where(box[..., None], _fill(fill, channels), image.astype(jnp.float32))

    return apply


def cutout_clipped(size: float, fill: Fill) -> Augmentation:
    """Paints a square around a pixel drawn uniformly, clipped where it leaves the image: FixMatch's own cutout.

    Rows c - s/2 <= row < c + s/2 for center c and side s, and columns likewise; s is `size` times the width, rounded down to an
    even number. The fill is that of `cutout`.
    """
    if size <= 0:
        raise ValueError(f"got cutout size {size}, accepted: a positive share of the width")

    def apply(key: Key, image: Image) -> Image:
        height, width, channels = image.shape
        half = int(size * width) // 2
        row, column = _below(key, height, width)
        rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
        box = (rows >= row - half) & (rows < row + half) & (columns >= column - half) & (columns < column + half)
        return jnp.where(box[..., None], _fill(fill, channels), image.astype(jnp.float32))

    return apply


def pillow_box(row: Number, column: Number, side: Number, height: int, width: int) -> Bool[Array, "H W"]:
    """The pixels that `cutout` paints, for a center in shares in [0, 1) of the image's sides and a square's side in pixels."""

    def covered(center: Number, size: int) -> Bool[Array, " size"]:
        first = jnp.floor(jnp.maximum(center * size - side / 2, 0))
        last = jnp.floor(first + side)
        return (jnp.arange(size) >= first) & (jnp.arange(size) <= last)

    return covered(row, height)[:, None] & covered(column, width)


def _below(key: Key, *limits: int) -> Int32[Array, " limits"]:
    """One whole number in 0..limit-1 per limit."""
    return jnp.int32(jax.random.uniform(key, (len(limits),)) * jnp.array(limits))


def _fill(fill: Fill, channels: int) -> Float[np.ndarray, " ch"]:
    """A fill value for every channel."""
    values = np.atleast_1d(np.asarray(fill, np.float32))
    if channels == 1 and len(values) == 3:
        return np.floor((values @ LUMA + 0x8000) / 65536)[None]
    if len(values) not in (1, channels):
        raise ValueError(f"got a fill of {len(values)} values for an image of {channels} channels, accepted: 1 or {channels}")
    return np.broadcast_to(values, (channels,))


class Views(NamedTuple):
    """The functions that turn a batch into a network's inputs.

    `plain` only normalizes; the others first augment: weakly, strongly, or as labeled examples are augmented for training.
    """

    plain: Callable[[Batch], View]
    weak: Callable[[Key, Batch], View]
    strong: Callable[[Key, Batch], View]
    labeled: Callable[[Key, Batch], View]


def make_views(
    *, weak: Augmentation, strong: Augmentation, labeled: Augmentation, mean: Sequence[float], std: Sequence[float]
) -> Views:
    """Views that augment each example with a key of its own and normalize: (x / 255 - mean) / std, per channel."""
    shift, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    if shift.shape != scale.shape or shift.ndim != 1:
        raise ValueError(f"got mean of shape {shift.shape}, std of {scale.shape}, accepted: one value per channel in both")
    if not (np.all((shift >= 0) & (shift <= 1)) and np.all(scale > 0)):
        raise ValueError(f"got mean {mean} and std {std}, accepted: for images scaled to [0, 1], so mean in [0, 1] and std > 0")

    @jax.named_scope("views")
    def plain(images: Shaped[Array, "B ..."]) -> View:
        if images.ndim != 4 or images.shape[-1] != len(shift):
            raise ValueError(f"got images of shape {images.shape}, accepted: [B, H, W, {len(shift)}], as mean and std have it")
        return (images.astype(jnp.float32) / 255.0 - shift) / scale

    def view(augmentation: Augmentation) -> Callable[[Key, Batch], View]:
        @jax.named_scope("views")
        def apply(key: Key, images: Batch) -> View:
            return plain(jax.vmap(augmentation)(jax.random.split(key, len(images)), images))

        return apply

    return Views(plain, view(weak), view(strong), view(labeled))


def feature_views() -> Views:
    """Views of features: the strong view is the last stored one, the others are the first; the key is not used."""
    return Views(plain=lambda x: x[:, 0], weak=lambda _, x: x[:, 0], strong=lambda _, x: x[:, -1], labeled=lambda _, x: x[:, 0])
