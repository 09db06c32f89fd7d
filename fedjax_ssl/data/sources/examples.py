"""Other examples than a dataset's own: those of an `.npz` file or a folder, with labels as a model numbers its classes."""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_ssl.data.sources import checks, folders, npz
from fedjax_ssl.data.sources.labels import numbered
from fedjax_ssl.data.sources.values import UNLABELED, understood
from fedjax_ssl.options import plural

_log = logging.getLogger(__name__)
KEYS = (("x_test", "y_test"), ("test_images", "test_labels"), ("test_features", "test_labels"), ("images", "labels"))


class Examples(NamedTuple):
    """What is predicted: images or features [N, ...]; labels int [N] (-1: unknown) or None; and where the examples are from.

    `origins` are texts, and `kind` is what they are, as in `sources.checks.Origins`.
    """

    images: np.ndarray
    labels: np.ndarray | None
    origins: Sequence[str] = ()
    kind: str = "file"


class Classes(NamedTuple):
    """A model's classes: their names, if they have some, and how many there are."""

    names: Sequence[str]
    number: int


def read(where: str, model: Classes, channels: int) -> Examples:
    """The examples in a file or folder, for a model of images with so many channels.

    ValueError or FileNotFoundError where there are no examples, or their classes are not the model's.
    """
    path = os.path.expanduser(where)
    if os.path.isdir(path):
        part, names, files = folders.test_part(path)
        is_gray = part.images.shape[-1] == 1 and channels == 3  # of files, for a model of colored ones
        images = np.repeat(part.images, 3, axis=-1) if is_gray else part.images
        return Examples(images, labels_of(where, part.labels, len(images), names, model), files)
    arrays, there = npz.read(path, [key for pair in KEYS for key in pair] + [npz.CLASSES])
    names = list(checks.names_of(where, arrays.get(npz.CLASSES, ())))
    for inputs, key in KEYS:
        if inputs in arrays and (key in arrays or inputs == "images"):
            images = arrays[inputs]
            return Examples(images, labels_of(where, arrays[key], len(images), names, model) if key in arrays else None)
    accepted = "x_test and y_test, test_images and test_labels, or images and, if known, labels"
    raise ValueError(f"--data: got {where} with {', '.join(there) or 'nothing'}, accepted: {accepted}")


def labels_of(where: str, labels: np.ndarray, number: int, names: Sequence[str], model: Classes) -> np.ndarray | None:
    """Labels as the model numbers them; None: none is known. `names` are those of the labels' classes, if they have some."""
    labels = understood(f"{where}: labels", labels)
    if not names and labels.dtype.kind == "U":
        text, unknown = labels, str(UNLABELED)
        names = sorted(set(text.ravel().tolist()) - {unknown})
        labels = np.where(text == unknown, UNLABELED, np.searchsorted(np.array(names, str), text))
    if labels.dtype.kind not in "iu" or labels.shape != (number,):
        got = f"got labels {labels.dtype} {list(labels.shape)} for {plural(number, 'example')} in {where}"
        raise ValueError(f"--data: {got}, accepted: integers [{number}]")
    values, labels = np.unique(labels.astype(np.int64), return_inverse=True)
    if names and len(values) and not -1 <= values[0] <= values[-1] < len(names):
        got = f"got labels from {values[0]} to {values[-1]} in {where}"
        raise ValueError(f"--data: {got}, accepted: 0 to {len(names) - 1}, or -1 where one is not known")
    known = [value for value in values.tolist() if value != UNLABELED]
    if not known:
        return None
    found = _matched(where, known, names, *model)
    return np.array([UNLABELED] * (len(values) - len(known)) + found)[labels]


def _matched(where: str, labels: list[int], names: Sequence[str], classes: Sequence[str], num_classes: int) -> list[int]:
    """The model's number of each label: by integers, where both sides have some, or by names; by position where one lacks them.

    A class without a name is its number. The log says where they are matched by position alone.
    """
    theirs, ours = _integers(names) if names else None, _integers(classes or range(num_classes))
    if ours and (theirs or not names):
        own = [theirs[label] for label in labels] if theirs else labels
        if strange := sorted(set(own) - set(ours)):
            is_whole = len(ours) == max(ours) - min(ours) + 1
            accepted = f"{min(ours)} to {max(ours)}" if is_whole else ", ".join(map(str, ours))
            kind = "class" if names else "label"
            raise ValueError(
                f"--data: got {where} with {kind} {strange[0]}, accepted: {accepted}, or -1 where one is not known"
            )
        return list(map(ours.index, own))
    if names and classes:
        if strange_names := sorted(set(names) - set(classes)):
            raise ValueError(f"--data: got {where} with class {strange_names[0]}, accepted: {numbered(classes)}")
        return [classes.index(names[label]) for label in labels]
    if names and len(names) != num_classes:
        got = f"got {where} with {plural(len(names), 'class')}"
        raise ValueError(f"--data: {got}, accepted: each of the model's {num_classes} classes")
    if strange := [label for label in labels if not 0 <= label < num_classes]:
        got = f"got {where} with label {strange[0]}"
        raise ValueError(f"--data: {got}, accepted: 0 to {num_classes - 1}, or -1 where one is not known")
    whose = f"the names in {where}" if names else "the model's names"
    _log.warning("classes are matched by position alone, by %s: %s", whose, numbered(names or classes))
    return labels


def _integers(names: Iterable[str | int]) -> list[int]:
    """The integers that all names are, each once, such as 3, 03 or, from pandas, 3.0; empty: they are not."""
    words = list(map(str, names))
    found = [int(word.partition(".")[0]) for word in words if re.fullmatch(r"-?[0-9]{1,18}(\.0*)?", word)]
    return found if len(set(found)) == len(words) else []
