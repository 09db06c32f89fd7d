"""Checks of every dataset, with one line on what is wrong and how to correct it."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

Images = UInt8[np.ndarray, "N H W ch"] | Float32[np.ndarray, "N V D"]
Classes = Int32[np.ndarray, " N"]


class Dataset(NamedTuple):
    """A classification dataset in memory. Every class in 0..C-1 occurs in the training split.

    Images of three channels are RGB. Texts are vectors of D features in V stored views: the first is of the text itself, the
    last is its strong view (V = 1 without one, and in the test split).
    """

    name: str
    train_images: Images
    train_labels: Classes
    test_images: Images
    test_labels: Classes
    num_classes: int

    @property
    def holds_features(self) -> bool:
        """Whether the examples are vectors of features, not images."""
        return self.train_images.dtype == np.float32


class Part(NamedTuple):
    """Examples and their labels, aligned."""

    images: Shaped[np.ndarray, "N ..."]
    labels: Shaped[np.ndarray, "N ..."]


def dataset(name: str, train: Part, test: Part, num_classes: int | None = None) -> Dataset:
    """A dataset of two splits of images, checked, see `sources.from_arrays`."""
    train, test = checked_part(f"{name} train", train), checked_part(f"{name} test", test)
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"{name}: train images have shape {train.images.shape[1:]} and test images {test.images.shape[1:]}: "
            "resize them to one shape"
        )
    return join(name, train, test, num_classes)


def join(name: str, train: Part, test: Part, num_classes: int | None = None) -> Dataset:
    """A dataset of two checked splits; their classes are checked here."""
    largest = int(max(train.labels.max(), test.labels.max()))
    num_classes = largest + 1 if num_classes is None else num_classes
    if largest >= num_classes:
        raise ValueError(f"{name}: label {largest} is out of range for {num_classes} classes: give labels 0..{num_classes - 1}")
    # Bounded by N, so that one absurd label costs no memory.
    present = np.bincount(train.labels[train.labels <= len(train.labels)], minlength=min(num_classes, len(train.labels) + 1))
    if not present.all():
        empty = np.flatnonzero(present == 0)
        raise ValueError(
            f"{name}: no training example of class {empty[0]} ({np.unique(train.labels).size} of {num_classes} classes occur): "
            "renumber the labels to 0..C-1 with every class in the training split"
        )
    return Dataset(name, *train, *test, num_classes)


def checked_part(where: str, split: Part) -> Part:
    """One split's images uint8 [N, H, W, ch] and labels, or a ValueError that says what is wrong with them."""
    images, labels = split
    if images.dtype != np.uint8:
        raise ValueError(f"{where}: images have dtype {images.dtype}: scale them to 0..255 and store them as uint8")
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise ValueError(f"{where}: images have shape {images.shape}: needed is [N, H, W] or [N, H, W, ch], none of them 0")
    return Part(images[..., None] if images.ndim == 3 else images, checked_labels(where, labels, len(images)))


def checked_labels(where: str, labels: np.ndarray, num_examples: int) -> Classes:
    """The labels of `num_examples` examples, or a ValueError that says what is wrong with them."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(f"{where}: labels have shape {labels.shape}: needed is [N] or [N, 1], one class per example")
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{where}: labels have dtype {labels.dtype}: store them as integers 0..C-1")
    if num_examples != len(labels):
        raise ValueError(f"{where}: {num_examples} examples but {len(labels)} labels: give one label per example")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > np.iinfo(np.int32).max:
        raise ValueError(f"{where}: labels range from {low} to {high}: number the classes 0..C-1 (-1 for unlabeled is not one)")
    return labels.astype(np.int32)


def first_line(value: object) -> str:
    """The first line of a value's text, at most 200 characters of it."""
    return (str(value).splitlines() or [""])[0][:200]
