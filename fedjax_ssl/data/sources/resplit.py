"""A dataset's own splits, merged and drawn anew."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from fedjax_ssl.arrays import digest
from fedjax_ssl.data.sources.checks import Dataset, Origins, Part, checked_part, dataset, named
from fedjax_ssl.data.sources.labels import renumbered
from fedjax_ssl.data.sources.values import UNLABELED

_log = logging.getLogger(__name__)


def with_splits(
    name: str,
    splits: Mapping[str, Part],
    resplit: Sequence[float] | None,
    seed: int,
    num_classes: int | None = None,
    *,
    renumber: bool = False,
    classes: Sequence[str] | np.ndarray = (),
) -> Dataset:
    """A dataset of the splits `train` and `test`, or of all splits merged and split anew.

    `resplit` are fractions (train, validation, test), stratified by class; the validation part is not used, and all examples
    without a label go to the training split. None: no new split. With `renumber`, labels become 0..C-1. `classes` are the names
    of the classes; if there are none, the labels before `renumber` are these names.
    """
    if resplit is None:
        splits = {split: splits[split] for split in ("train", "test")}
    if renumber:
        splits, found = renumbered(name, splits, merged=resplit is not None)
        classes = classes if np.size(classes) else found
    kind = "original" if next(iter(splits.values())).origins is None else "file"
    if resplit is None:
        return named(_joined(name, kind, splits["train"], splits["test"], num_classes), classes)
    fractions = tuple(resplit)
    if len(fractions) != 3 or min(fractions) < 0 or not fractions[0] * fractions[2] > 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(
            f"resplit={fractions}: give three fractions (train, validation, test) that add up to 1, "
            "train and test above 0, such as (0.8, 0.05, 0.15)"
        )
    pool = _merged(name, splits)
    num_labeled = int(np.sum(pool.labels != UNLABELED))
    counts = np.unique(pool.labels[pool.labels != UNLABELED], return_counts=True)[1]
    num_train = round(fractions[0] * num_labeled)
    num_test = min(round(fractions[2] * num_labeled), num_labeled - num_train)
    if min(num_train, num_test) < len(counts) or np.min(counts, initial=2) < 2:
        raise ValueError(
            f"resplit={fractions} of {num_labeled} examples of {len(counts)} classes (the rarest has {np.min(counts)}) "
            "leaves classes without a training or test example: give larger fractions, or more examples of each class"
        )
    train, test = stratified(pool, num_train, num_test, seed)
    whole = digest((pool.images, pool.labels)).hexdigest()
    return named(_joined(name, kind, train, test, num_classes)._replace(whole=whole), classes)


def _joined(name: str, kind: str, train: Part, test: Part, num_classes: int | None) -> Dataset:
    """The dataset of two parts, with where their examples are from, if they know."""
    data = dataset(name, train, test, num_classes)
    if train.origins is None or test.origins is None:
        return data
    return data._replace(origins=Origins(kind, train.origins, test.origins))


def _merged(name: str, splits: Mapping[str, Part]) -> Part:
    """All splits as one, checked before, so that an error names the split that is wrong."""
    whole = [checked_part(f"{name} {split}", arrays, may_lack_labels=True) for split, arrays in splits.items()]
    unlabeled = {split: int(np.sum(part.labels == UNLABELED)) for split, part in zip(splits, whole, strict=True)}
    if any(unlabeled.values()):
        counts = ", ".join(f"{unlabeled[s]} of {len(part.labels)} in {s}" for s, part in zip(splits, whole, strict=True))
        is_usual = not any(list(unlabeled.values())[1:])  # in the training part alone
        _log.log(
            logging.INFO if is_usual else logging.WARNING,
            "%s: examples with the label -1 have no class and go to the training part of resplit (%s): if -1 is a class, "
            "number the classes from 0 on",
            *(name, counts),
        )
    shapes = sorted({split.images.shape[1:] for split in whole})
    if len(shapes) > 1:
        raise ValueError(f"{name}: splits hold images of different shapes {shapes}: resize them to one shape")
    without = [split for split, part in zip(splits, whole, strict=True) if part.clients is None]
    if without and len(without) < len(whole):
        raise ValueError(f"{name}: resplit merges all splits, and {without[0]} has no clients' ids: give them, or drop resplit")
    clients = None if without else np.concatenate([part.clients for part in whole])
    names = [[f"{split}[{i}]" for i in range(len(part.labels))] for split, part in zip(splits, whole, strict=True)]
    origins = [np.array(own) if part.origins is None else part.origins for own, part in zip(names, whole, strict=True)]
    images, labels = np.concatenate([part.images for part in whole]), np.concatenate([part.labels for part in whole])
    return Part(images, labels, clients, np.concatenate(origins))


def stratified(pool: Part, num_train: int, num_test: int, seed: int) -> tuple[Part, Part]:
    """Two disjoint random subsets in which every class has its share; other labeled examples are not used.

    All examples without a label go to the first subset.
    """
    from sklearn.model_selection import train_test_split

    rows, unlabeled = np.flatnonzero(pool.labels != UNLABELED), np.flatnonzero(pool.labels == UNLABELED)
    train, test = train_test_split(
        rows, train_size=num_train, test_size=num_test, stratify=pool.labels[rows], random_state=seed
    )
    return _take(pool, np.concatenate([train, unlabeled])), _take(pool, test)


def _take(part: Part, rows: Int[np.ndarray, " _"]) -> Part:
    clients, origins = (None if array is None else array[rows] for array in (part.clients, part.origins))
    return Part(part.images[rows], part.labels[rows], clients, origins)
