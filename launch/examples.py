"""What `launch.evaluate --data` names: the examples of an `.npz` file or a folder, with labels as the model numbers them."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_ssl.data.sources import checks, folders, npz
from fedjax_ssl.data.sources.labels import numbered
from fedjax_ssl.data.sources.values import understood
from fedjax_ssl.experiment.experiment import Experiment

KEYS = (("x_test", "y_test"), ("test_images", "test_labels"), ("test_features", "test_labels"), ("images", "labels"))


class Examples(NamedTuple):
    """What is predicted: images or features [N, ...]; labels int [N], -1: not known, or None; and the files they are from."""

    images: np.ndarray
    labels: np.ndarray | None
    files: Sequence[str] = ()


def read(where: str, experiment: Experiment) -> Examples:
    """The examples in a file or folder; ValueError or FileNotFoundError where there are none, or not of the model's classes."""
    path = os.path.expanduser(where)
    if os.path.isdir(path):
        part, names, files = folders.test_part(path)
        is_gray = part.images.shape[-1] == 1 and experiment.stored_shape[-1] == 3  # of files, for a model of colored ones
        images = np.repeat(part.images, 3, axis=-1) if is_gray else part.images
        return Examples(images, _labels(where, part.labels, len(images), names, experiment), files)
    arrays, there = npz.read(path, [key for pair in KEYS for key in pair] + [npz.CLASSES])
    names = list(checks.names_of(where, arrays.get(npz.CLASSES, ())))
    for inputs, key in KEYS:
        if inputs in arrays and (key in arrays or inputs == "images"):
            images = arrays[inputs]
            return Examples(images, _labels(where, arrays[key], len(images), names, experiment) if key in arrays else None)
    accepted = "x_test and y_test, test_images and test_labels, or images and, if known, labels"
    raise ValueError(f"--data: got {where} with {', '.join(there) or 'nothing'}, accepted: {accepted}")


def _labels(where: str, labels: np.ndarray, number: int, names: list[str], experiment: Experiment) -> np.ndarray | None:
    """Labels as the model numbers them: by the `names` of their classes, where the model's have some; None: none is known."""
    classes, num_classes = experiment.classes, experiment.problem.spec.num_classes
    labels = understood(f"{where}: labels", labels)
    if classes and not names and (labels.dtype.kind == "U" or experiment.settings.data.renumber_labels):
        text, unknown = labels.astype(str), str(checks.UNLABELED)
        names = sorted(set(text.ravel().tolist()) - {unknown})
        labels = np.where(text == unknown, checks.UNLABELED, np.searchsorted(np.array(names, str), text))
    if labels.dtype.kind not in "iu" or labels.shape != (number,):
        got = f"got labels {labels.dtype} {list(labels.shape)} for {number} examples in {where}"
        raise ValueError(f"--data: {got}, accepted: integers [{number}]")
    labels = labels.astype(np.int64)
    own = len(names) or num_classes
    if labels.size and not -1 <= labels.min() <= labels.max() < own:
        got = f"got labels from {labels.min()} to {labels.max()} in {where}"
        raise ValueError(f"--data: {got}, accepted: 0 to {own - 1}, or -1 where one is not known")
    if labels.max(initial=checks.UNLABELED) < 0:
        return None
    by_number = not classes or names == list(map(str, range(len(names))))
    if by_number and names and len(names) != num_classes:
        got = f"got {where} with {len(names)} classes"
        raise ValueError(f"--data: {got}, accepted: each of the model's {num_classes} classes")
    if by_number or not names:
        return labels
    if strange := sorted(set(names) - set(classes)):
        raise ValueError(f"--data: got {where} with class {strange[0]}, accepted: {numbered(classes)}")
    return np.array([*map(classes.index, names), checks.UNLABELED])[labels]
