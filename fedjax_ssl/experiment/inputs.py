"""The inputs of `Experiment.predict`: examples as the dataset takes them, which get the shape that the network's views take."""

from typing import Any

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from fedjax_ssl.data.sources.values import array_of


def checked(
    examples: Any, stored: tuple[int, ...], pooled: tuple[int, ...]
) -> UInt8[np.ndarray, "B H W ch"] | Float32[np.ndarray, "B V D"]:
    """Examples in the shape of the pool's, from images or features as the dataset takes them; ValueError for others.

    `stored` is the shape of one example of the dataset: (H, W, ch), or (V, D) of features. `pooled` is that, zero-padded.
    """
    array = array_of(examples)
    if np.ma.is_masked(array):
        raise ValueError(f"examples: got {np.ma.count_masked(array)} masked values, accepted: arrays without any")
    return _features(array, stored[-1]) if len(stored) == 2 else _images(array, stored, pooled)


def _features(array: Shaped[np.ndarray, "*_"], size: int) -> Float32[np.ndarray, "B V D"]:
    if array.dtype != np.float32 or array.ndim not in (2, 3) or array.shape[-1] != size or 0 in array.shape[1:]:
        raise ValueError(f"examples: got {_shown(array)}, accepted: features float32 [B, {size}] or [B, V, {size}]")
    return array[:, None] if array.ndim == 2 else array


def _images(array: Shaped[np.ndarray, "*_"], stored: tuple[int, ...], pooled: tuple[int, ...]) -> UInt8[np.ndarray, "B H W ch"]:
    given = array[..., None] if array.ndim == 3 and stored[-1] == 1 else array
    shapes = list(dict.fromkeys((stored, pooled)))
    if array.dtype != np.uint8 or given.shape[1:] not in shapes:
        gray = [f"[B, {height}, {width}]" for height, width, channels in shapes if channels == 1]
        accepted = " or ".join([*(f"[B, {height}, {width}, {channels}]" for height, width, channels in shapes), *gray])
        raise ValueError(f"examples: got {_shown(array)}, accepted: images uint8 {accepted}, as the dataset has them")
    borders = [(0, 0), *(((to - side) // 2, (to - side + 1) // 2) for side, to in zip(given.shape[1:], pooled, strict=True))]
    return np.pad(given, borders) if given.shape[1:] != pooled else given


def _shown(array: Shaped[np.ndarray, "*_"]) -> str:
    return f"{array.dtype} {list(array.shape)}"
