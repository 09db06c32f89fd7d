"""The views of a dataset: its own normalization and augmentations, or those that a config names."""

import numpy as np
from jaxtyping import UInt8

from fedjax_ssl.data import augment
from fedjax_ssl.data.augment import Augmentation, Views, compose, crop, flip
from fedjax_ssl.data.catalog import known
from fedjax_ssl.data.randaugment import VARIANTS, strong_view
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.options import plural

WEAK_VIEWS: dict[str, Augmentation] = {
    "none": compose(),
    "crop1": compose(crop(1)),
    "crop4": compose(crop(4)),
    "zero_crop4": compose(crop(4, "zero")),
    "flip_crop4": compose(flip(), crop(4)),
    "flip_zero_crop4": compose(flip(), crop(4, "zero")),
    # FedSiam's paper does not say how strongly: here as usual in contrastive learning.
    "fedsiam": compose(flip(), crop(4), augment.contrast(0.6, 1.4), augment.grayscale(0.2)),
}
STRONG_VIEWS = (*VARIANTS, "none")
LABELED_VIEWS = (*WEAK_VIEWS, "feddure")
"""Views of labeled examples. `feddure`: flip_zero_crop4, then a cutout that is zero once normalized."""
FALLBACK = ("crop4", "usb")
"""Weak and strong view of an unknown dataset, without a flip, as a mirror image may be of another class."""


def make(
    dataset: Dataset,
    *,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    weak: str = "default",
    strong: str = "default",
    labeled: str = "default",
) -> Views:
    """The plain, weak, strong and labeled view of a dataset's examples; the options are those of a config's `data`.

    The dataset is the one before any padding, as an unknown dataset's mean and std are measured, and its views are FALLBACK. A
    strong view follows the weak one; `none` is the weak view again.
    """
    if dataset.holds_features:
        given = {"mean": mean, "std": std, "weak": weak, "strong": strong, "labeled": labeled}
        for key, value in given.items():
            if value not in ((), "default"):
                accepted = "()" if key in ("mean", "std") else "default"
                raise ValueError(f"data.{key}: got {value!r} for text features, accepted: {accepted}, their views are stored")
        return augment.feature_views()
    about = known(dataset.name)
    default_weak, default_strong = (about.weak, about.strong) if about else FALLBACK
    weak, strong = default_weak if weak == "default" else weak, default_strong if strong == "default" else strong
    labeled = weak if labeled == "default" else labeled
    channels = dataset.train_images.shape[-1]
    for key, view in (("strong", strong), ("weak", weak), ("labeled", labeled)):
        if channels not in (1, 3) and (view in VARIANTS or view == "fedsiam"):  # those that change colors
            raise ValueError(
                f"data.{key}: got {view} for images of {plural(channels, 'channel')}, accepted: none, or 1 or 3 channels"
            )
    mean, std = (mean, std) if mean else (about.mean, about.std) if about and about.mean else measured(dataset.train_images)
    if not len(mean) == len(std) or len(mean) not in (1, channels):
        raise ValueError(
            f"data.mean, data.std: got {len(mean)} and {len(std)} values for images of {plural(channels, 'channel')}, "
            f"accepted: {channels} in both{', or 1' if channels > 1 else ''}"
        )
    mean, std = mean * (channels // len(mean)), std * (channels // len(std))
    feddure = compose(WEAK_VIEWS["flip_zero_crop4"], augment.cutout_clipped(0.5, [255 * m for m in mean]))
    return augment.make_views(
        weak=WEAK_VIEWS[weak],
        strong=WEAK_VIEWS[weak] if strong == "none" else strong_view(strong, WEAK_VIEWS[weak]),
        labeled=feddure if labeled == "feddure" else WEAK_VIEWS[labeled],
        mean=mean,
        std=std,
    )


def measured(images: UInt8[np.ndarray, "N H W ch"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (1e-3 or more) of each channel of the images, scaled to [0, 1]."""
    mean, std = [], []
    for channel in range(images.shape[-1]):  # from histograms, without a copy of the images as floats
        share = np.bincount(images[..., channel].ravel(), minlength=256) / images[..., channel].size
        level = np.arange(256) / 255
        mean.append(float(share @ level))
        std.append(max(1e-3, float(np.sqrt(share @ (level - mean[-1]) ** 2))))
    return tuple(mean), tuple(std)
