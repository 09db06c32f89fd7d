"""A dataset's own splits, merged and drawn anew."""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from fedjax_ssl.arrays import digest
from fedjax_ssl.data.sources.checks import Dataset, Origins, Part, checked_part, dataset, named, with_validation
from fedjax_ssl.data.sources.labels import renumbered
from fedjax_ssl.data.sources.values import UNLABELED

_log = logging.getLogger(__name__)
OTHERS = "data.validation=pool or data.validation=labels"  # which need no validation part
VALID = "val"  # the name of the validation split; the others are `train` and `test`


class Splits(NamedTuple):
    """Which splits of a dataset are read: its own, or all of them merged and drawn anew.

    `resplit` are fractions (train, validation, test), stratified by class, which the seed draws; all examples without a label
    go to the training split. None: no new split. The validation split is read only if `validation` is true.
    """

    resplit: Sequence[float] | None = None
    seed: int = 0
    validation: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the splits that are read, where a dataset has them."""
        return ("train", VALID, "test") if self.validation or self.resplit is not None else ("train", "test")


def with_splits(
    name: str,
    splits: Mapping[str, Part],
    how: Splits,
    num_classes: int | None = None,
    *,
    renumber: bool = False,
    classes: Sequence[str] | np.ndarray = (),
) -> Dataset:
    """A dataset of those among `splits` that `how` names, as they are or merged and drawn anew.

    With `renumber`, labels become 0..C-1. `classes` are the names of the classes; if there are none, the labels before
    `renumber` are these names. ValueError where there is no validation split and one is asked for.
    """
    resplit = how.resplit
    if resplit is None:
        splits = {split: splits[split] for split in how.names if split in splits}
    if renumber:
        splits, found = renumbered(name, splits, merged=resplit is not None)
        classes = classes if np.size(classes) else found
    kind = "original" if next(iter(splits.values())).origins is None else "file"
    if resplit is None:
        if how.validation and VALID not in splits:
            raise ValueError(f"{name} has no validation part of its own: take {OTHERS}")
        return named(_joined(name, kind, splits["train"], splits["test"], num_classes, splits.get(VALID)), classes)
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
    train, test, rest = stratified(pool, num_train, num_test, how.seed)
    if how.validation and not len(rest.labels):
        raise ValueError(f"resplit={fractions} leaves no validation part: give it a share, or take {OTHERS}")
    whole = digest((pool.images, pool.labels)).hexdigest()
    data = _joined(name, kind, train, test, num_classes, rest if how.validation else None)
    return named(data._replace(whole=whole), classes)


def _joined(name: str, kind: str, train: Part, test: Part, num_classes: int | None, valid: Part | None) -> Dataset:
    """The dataset of its parts, with where their examples are from, if they know."""
    data = with_validation(dataset(name, train, test, num_classes), valid)
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


def stratified(pool: Part, num_train: int, num_test: int, seed: int) -> tuple[Part, Part, Part]:
    """Two disjoint random subsets in which every class has its share, and the other labeled examples.

    All examples without a label go to the first subset.
    """
    from sklearn.model_selection import train_test_split

    rows, unlabeled = np.flatnonzero(pool.labels != UNLABELED), np.flatnonzero(pool.labels == UNLABELED)
    train, test = train_test_split(
        rows, train_size=num_train, test_size=num_test, stratify=pool.labels[rows], random_state=seed
    )
    rest = np.setdiff1d(rows, np.concatenate([train, test]))
    return _take(pool, np.concatenate([train, unlabeled])), _take(pool, test), _take(pool, rest)


def _take(part: Part, rows: Int[np.ndarray, " _"]) -> Part:
    clients, origins = (None if array is None else array[rows] for array in (part.clients, part.origins))
    return Part(part.images[rows], part.labels[rows], clients, origins)
