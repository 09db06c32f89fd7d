"""What is known of the datasets by name: their normalization. And the recipes of strong views."""

from __future__ import annotations

import numpy as np

from fedjax_ssl.data.augment import Augmentation, compose, crop
from fedjax_ssl.data.augment import flip as mirror
from fedjax_ssl.data.randaugment import VARIANTS, strong_view

# Channel means and standard deviations of the training images, in units of the full range.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn_cropped": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NORMALIZATIONS = ("dataset", "imagenet")
STRONG_VIEWS = (*VARIANTS, "none")


def statistics(name: str, images: np.ndarray, normalization: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Channel means and standard deviations to normalize with, in units of the full range.

    Args:
        name: the dataset's name; one that is not listed here is measured.
        images: uint8 [N, H, W, ch], the training images.
        normalization: `dataset` or `imagenet` (three channels alone).

    Raises:
        ValueError: for `imagenet` with images that have not three channels.
    """
    if normalization == "imagenet":
        if images.shape[-1] != 3:
            raise ValueError(f"data.normalization: got imagenet for images of {images.shape[-1]} channel(s), accepted: dataset")
        return IMAGENET
    if name in STATISTICS:
        return STATISTICS[name]
    flat = images.reshape(-1, images.shape[-1]).astype(np.float64) / 255
    return tuple(flat.mean(0).tolist()), tuple(np.maximum(flat.std(0), 1e-3).tolist())


def augmentations(strong: str, *, flip: bool, crop_padding: int) -> tuple[Augmentation, Augmentation]:
    """The weak augmentation, flip and reflect-padded crop at random, and the strong one, a RandAugment recipe after them.

    Args:
        strong: a key of VARIANTS, or `none` for the weak augmentation again.
        flip: whether to flip.
        crop_padding: pixels of reflected border; 0: no crop.
    """
    weak = compose(*([mirror()] if flip else []), *([crop(crop_padding)] if crop_padding else []))
    return weak, weak if strong == "none" else strong_view(strong, weak)
