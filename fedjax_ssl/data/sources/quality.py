"""Warnings about data that can be used, but are hardly as they were meant: copies, constant images, wrong scales."""

import hashlib
import logging

import numpy as np
from jaxtyping import Bool, UInt8

from fedjax_ssl.data.bars import bar
from fedjax_ssl.data.sources.checks import Dataset
from fedjax_ssl.data.sources.values import UNLABELED

_log = logging.getLogger(__name__)


def warn(dataset: Dataset) -> Dataset:
    """Returns the dataset, after one warning for each thing that is odd about its images."""
    if unlabeled := int(np.sum(dataset.train_labels == UNLABELED)):
        _log.info("%s: %d of %d training examples have no label", dataset.name, unlabeled, len(dataset.train_labels))
    if not dataset.holds_features:
        for line in oddities(dataset):
            _log.warning("%s: %s", dataset.name, line)
    return dataset


def oddities(dataset: Dataset) -> list[str]:
    """One line for each thing that is odd, with a count and what to do."""
    train, test = dataset.train_images, dataset.test_images
    lines = []
    if train.shape[-1] in (2, 4):
        lines.append(
            f"images have {train.shape[-1]} channels, and all are used: if the last is transparency, "
            f"give images[..., :{train.shape[-1] - 1}]"
        )
    if train.max() == 1:
        lines.append("all pixels of training images are 0 or 1, of 0..255: if they were scaled to 0..1, give 255 * images")
    for part, images in (("training", train), ("test", test)):
        constant = np.flatnonzero(_constant(images))
        if len(constant):
            lines.append(
                f"{len(constant)} of {len(images)} {part} images have one value in all pixels (first: number {constant[0]}): "
                "check how they were written, or remove them"
            )
    of_train, of_test = _digests(train), _digests(test)
    different = set(of_train)
    if copies := len(of_train) - len(different):
        lines.append(f"{copies} of {len(train)} training images are copies of others: remove them, as two clients may get one")
    if seen := sum(digest in different for digest in of_test):
        lines.append(
            f"{seen} of {len(test)} test images are training images, too: remove them from one, or accuracy is too high"
        )
    return lines


def _constant(images: UInt8[np.ndarray, "N H W ch"]) -> Bool[np.ndarray, " N"]:
    """Which images have one value in all pixels of a channel, in every channel; none where they have one pixel."""
    pixels = images.reshape(len(images), -1, images.shape[-1])
    return (pixels.max(1) == pixels.min(1)).all(1) & (pixels.shape[1] > 1)


def _digests(images: UInt8[np.ndarray, "N H W ch"]) -> list[bytes]:
    each = bar(np.ascontiguousarray(images), "looking for copies", total=len(images), unit="images")
    return [hashlib.blake2b(image, digest_size=16).digest() for image in each]
