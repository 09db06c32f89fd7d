"""The views of a dataset: its own normalization and augmentations, or those that a config names."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from fedjax_ssl.arrays import Key
from fedjax_ssl.data import augment
from fedjax_ssl.data.augment import Augmentation, Image, Views, compose, crop, flip
from fedjax_ssl.data.catalog import known
from fedjax_ssl.data.contrastive import enlarged_crop, simclr
from fedjax_ssl.data.randaugment import VARIANTS, strong_view
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.options import plural


class Move(NamedTuple):
    """How a view moves an image: mirrored half of the time, and cropped after padding (None: 1/8 of a side, 4 at most)."""

    flips: bool
    pad: int | None
    mode: str = "reflect"

    def pad_of(self, side: int) -> int:
        """The pixels of padding of an image with this shorter side."""
        return min(4, side // SHIFTED) if self.pad is None else self.pad

    def augmentation(self) -> Augmentation:
        """The augmentation that makes this move."""

        def move(key: Key, image: Image) -> Image:
            return crop(self.pad_of(min(image.shape[:2])), self.mode)(key, image)

        return compose(*([flip()] if self.flips else []), *([move] if self.pad != 0 else []))

    def words(self, side: int) -> str:
        """A description of the move, for images with this shorter side."""
        pad = self.pad_of(side)
        plural = "s" * (pad != 1)
        filled = f"{pad} zero{plural} of {side} pixels" if self.mode == "zero" else f"{pad} mirrored pixel{plural} of {side}"
        return ", ".join([*(["flip"] if self.flips else []), *([f"crop with {filled}"] if pad else [])]) or "none"


SHIFTED = 8
"""Shifts of up to 1/8 of an image's side hardly damage it; larger ones give a warning."""
MOVES = {
    "none": Move(False, 0), "crop1": Move(False, 1), "crop4": Move(False, 4),
    "zero_crop4": Move(False, 4, "zero"), "flip_crop4": Move(True, 4), "flip_zero_crop4": Move(True, 4, "zero"),
    "crop": Move(False, None), "fedsiam": Move(True, 4), "feddure": Move(True, 4, "zero"),
    "enlarged_crop": Move(True, 0), "simclr": Move(True, 0),
}  # fmt: skip
_MORE = {
    "fedsiam": ", contrast, gray", "feddure": ", cutout", "enlarged_crop": ", crop of the image enlarged by a quarter",
    "simclr": ", resized crop, colors, gray",
}  # fmt: skip
WEAK_VIEWS: dict[str, Augmentation] = {name: move.augmentation() for name, move in MOVES.items() if name not in _MORE} | {
    # FedSiam's paper does not say how strongly: here as usual in contrastive learning.
    "fedsiam": compose(flip(), crop(4), augment.contrast(0.6, 1.4), augment.grayscale(0.2)),
    "enlarged_crop": compose(flip(), enlarged_crop(1.25)),  # RSCFed, CBAFed: 32 pixels resized to 40
    "simclr": simclr(),  # Twin-sight on SVHN
}
STRONG_VIEWS = (*VARIANTS, "none")
LABELED_VIEWS = (*WEAK_VIEWS, "feddure")
"""Views of labeled examples. `feddure`: flip_zero_crop4, then a cutout that is zero once normalized."""
FALLBACK = ("crop", "usb")
"""Weak and strong view of an unknown dataset, without a flip, as a mirror image may be of another class."""


def names(dataset: str, weak: str = "default", strong: str = "default", labeled: str = "default") -> tuple[str, str, str]:
    """The names of the weak, strong and labeled view of a dataset of images, with its own in place of `default`."""
    about = known(dataset)
    own_weak, own_strong = (about.weak, about.strong) if about else FALLBACK
    weak, strong = own_weak if weak == "default" else weak, own_strong if strong == "default" else strong
    return weak, strong, weak if labeled == "default" else labeled


def described(weak: str, strong: str, labeled: str, *, side: int, used: Sequence[str]) -> str:
    """A line that says what the `used` views do to images with this shorter side; no name of a view may be `default`."""
    of_weak, of_labeled = (MOVES[name].words(side) + _MORE.get(name, "") for name in (weak, labeled))
    after = "as the weak view" if strong == "none" else f"the weak view and {strong}"
    of_labeled = "as the weak view" if labeled == weak and "weak" in used else of_labeled
    found = {"weak": of_weak, "strong": after, "labeled": of_labeled}
    return "; ".join(f"{view} view: {words}" for view, words in found.items() if view in used)


def far_shifts(dataset: str, weak: str, labeled: str, side: int) -> Iterator[str]:
    """A line if views shift images with this shorter side by more than an eighth, and more than the dataset's own weak view."""
    own = MOVES[names(dataset)[0]].pad_of(side)
    views = {"weak": weak} if labeled == weak else {"weak": weak, "labeled": labeled}
    if far := {key: name for key, name in views.items() if MOVES[name].pad_of(side) > max(side / SHIFTED, own)}:
        given, pad = ", ".join(f"data.{key}={name}" for key, name in far.items()), MOVES[next(iter(far.values()))].pad_of(side)
        yield f"{given}: images of {side} pixels are shifted by up to {pad}, more than an eighth; data.weak=crop shifts by less"


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

    `dataset` must not be padded yet: an unknown dataset's mean and std are measured on its images. Its views are FALLBACK.
    The strong view is applied after the weak one; if `strong` is `none`, it is the weak view again.
    """
    if dataset.holds_features:
        given = {"mean": mean, "std": std, "weak": weak, "strong": strong, "labeled": labeled}
        for key, value in given.items():
            if value not in ((), "default"):
                accepted = "()" if key in ("mean", "std") else "default"
                raise ValueError(f"data.{key}: got {value!r} for text features, accepted: {accepted}, their views are stored")
        return augment.feature_views()
    about = known(dataset.name)
    weak, strong, labeled = names(dataset.name, weak, strong, labeled)
    channels = dataset.train_images.shape[-1]
    for key, view in (("strong", strong), ("weak", weak), ("labeled", labeled)):
        if channels not in (1, 3) and (view in VARIANTS or view in ("fedsiam", "simclr")):  # those that change colors
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
