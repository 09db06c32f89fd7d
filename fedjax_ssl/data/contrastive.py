"""Augmentations of contrastive learning: crops that are resized, and changes of color, as torchvision makes them on Pillow."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from fedjax_ssl.arrays import Array, Key
from fedjax_ssl.data.augment import Augmentation, Image, blend, compose, contrast, flip, gray_of, grayscale

TRIES = 10  # how often a crop is drawn until it fits into the image


def simclr() -> Augmentation:
    """SimCLR's augmentation without blur (Chen et al. 2020, Appendix A), at the strengths of Twin-sight's code.

    The colors change with probability .8, in this order: brightness, contrast, saturation (factors .2 to 1.8) and hue (up to a
    fifth of a turn); there they change in a random order.
    """
    factors = 0.2, 1.8
    colors = compose(blend(lambda _: 0.0, *factors), contrast(*factors), blend(gray_of, *factors), hue(0.2))
    return compose(resized_crop(0.08), flip(), sometimes(0.8, colors), grayscale(0.2))


def sometimes(probability: float, augmentation: Augmentation) -> Augmentation:
    """The augmentation, with this probability; else the image itself."""

    def apply(key: Key, image: Image) -> Image:
        chance, own = jax.random.split(key)
        return jnp.where(jax.random.bernoulli(chance, probability), augmentation(own, image), image.astype(jnp.float32))

    return apply


def enlarged_crop(factor: float) -> Augmentation:
    """A window of the image's size, at a uniform place of the image that is enlarged by `factor`, bilinearly."""

    def apply(key: Key, image: Image) -> Image:
        shares, found = jax.random.uniform(key, (2,)), image
        for axis, share in enumerate(shares):
            size = image.shape[axis]
            large = round(factor * size)
            place = jnp.floor(share * (large - size + 1)) + jnp.arange(size)
            found = _interpolated(found, jnp.clip((place + 0.5) * size / large - 0.5, 0, size - 1), axis)
        return jnp.round(found)

    return apply


def resized_crop(smallest: float, ratio: float = 4 / 3) -> Augmentation:
    """A part of the image, enlarged to its size bilinearly: torchvision's RandomResizedCrop.

    Its area is U(smallest, 1) of the image's; its width is its height times a factor from 1/ratio to ratio, log-uniform. Of ten
    draws it is the first that fits into the image; if none does, it is the whole image.
    """

    def apply(key: Key, image: Image) -> Image:
        height, width, _ = image.shape
        area, logarithm, *_ = jax.random.uniform(key, (2, TRIES))
        area = height * width * (smallest + (1 - smallest) * area)
        factor = jnp.exp((2 * logarithm - 1) * math.log(ratio))
        sides = jnp.round(jnp.sqrt(jnp.stack([area / factor, area * factor])))  # heights, widths
        fits = (sides[0] >= 1) & (sides[0] <= height) & (sides[1] >= 1) & (sides[1] <= width)
        shares, found = jax.random.uniform(jax.random.fold_in(key, 1), (2,)), image
        for axis, size in enumerate((height, width)):
            length = jnp.where(jnp.any(fits), sides[axis, jnp.argmax(fits)], size)
            start = jnp.floor(shares[axis] * (size - length + 1))
            found = _interpolated(found, start + jnp.clip((jnp.arange(size) + 0.5) * length / size - 0.5, 0, length - 1), axis)
        return jnp.round(found)

    return apply


def _interpolated(image: Image, at: Float32[Array, " n"], axis: int) -> Float32[Array, "_ _ ch"]:
    """The image at fractional rows, or columns, from 0 to its last one."""
    first = jnp.floor(at)
    shape = [-1 if own == axis else 1 for own in range(3)]
    low, high = (
        jnp.take(image, jnp.int32(jnp.minimum(place, image.shape[axis] - 1)), axis).astype(jnp.float32)
        for place in (first, first + 1)
    )
    return low + (at - first).reshape(shape) * (high - low)


def hue(limit: float) -> Augmentation:
    """Turns the hue of an RGB image by U(-limit, limit) of a full turn; gray images have none.

    In HSV a channel is V - V S max(0, min(k, 4 - k, 1)) with k = (n + 6 H) mod 6, and n = 5, 3, 1 for R, G, B.
    """

    def apply(key: Key, image: Image) -> Image:
        image = image.astype(jnp.float32)
        if image.shape[-1] == 1:
            return image
        red, green, blue = (image[..., k] for k in range(3))
        value, least = jnp.max(image, axis=-1), jnp.min(image, axis=-1)
        span = value - least
        safe = jnp.where(span > 0, span, 1.0)
        of_green, of_blue = 2 + (blue - red) / safe, 4 + (red - green) / safe
        turn = jnp.where(value == red, (green - blue) / safe, jnp.where(value == green, of_green, of_blue))
        turn += 6 * limit * (2 * jax.random.uniform(key) - 1)
        k = (jnp.array([5.0, 3.0, 1.0]) + turn[..., None]) % 6
        return jnp.round(value[..., None] - span[..., None] * jnp.clip(jnp.minimum(k, 4 - k), 0, 1))

    return apply
