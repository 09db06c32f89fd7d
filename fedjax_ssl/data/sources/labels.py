"""Labels and clients' ids as their owners wrote them, as numbers from 0 on."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32, Shaped

from fedjax_ssl.data.sources.checks import Part, first_line
from fedjax_ssl.data.sources.values import UNLABELED, array_of, understood

_log = logging.getLogger(__name__)
Ids = Shaped[np.ndarray, " N"]
Numbers = Int32[np.ndarray, " N"]


def renumbered(name: str, splits: Mapping[str, Part], *, merged: bool) -> tuple[dict[str, Part], Ids]:
    """The splits with labels, integers or text, numbered 0..C-1 in sorted order, and the classes; logs them. -1 stays -1.

    The classes are those of the training split, or, where splits are `merged`, of all. ValueError if another split has others.
    """
    given = {split: _flat(f"{name} {split}: labels", part.labels) for split, part in splits.items()}
    text = any(labels.dtype.kind == "U" for labels in given.values())
    given = {split: labels.astype(str) if text else labels for split, labels in given.items()}
    unknown = str(UNLABELED) if text else UNLABELED
    labeled = {split: labels[labels != unknown] for split, labels in given.items()}
    classes = np.unique(np.concatenate(list(labeled.values())) if merged else labeled["train"])
    for split, labels in labeled.items():
        if len(strange := np.setdiff1d(labels, classes)):
            got = f"label {_shown(strange[:1])} occurs in {split} alone"
            raise ValueError(f"{name}: {got}: add training examples of it, or remove it")
    _log.info("%s: labels are numbered: %s", name, numbered(classes))

    def number(labels: Ids) -> Numbers:
        numbers = np.searchsorted(classes, labels).astype(np.int32)
        return np.where(labels == unknown, np.int32(UNLABELED), numbers)

    return {split: part._replace(labels=number(given[split])) for split, part in splits.items()}, classes


def _flat(what: str, values: np.ndarray) -> Ids:
    """Integers or text [N]; ValueError says `what` is something else."""
    values = understood(what, values)
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        texts = ", such as labels.astype(str)" if values.dtype == object else ""
        raise ValueError(
            f"{what} have dtype {values.dtype} and shape {values.shape}: give an integer or a text per example{texts}"
        )
    return values


def clients_of_splits(
    name: str, given: Mapping[str, Any], sizes: Mapping[str, int], *, merged: bool
) -> dict[str, Int32[np.ndarray, " _"]]:
    """The clients of the examples of several splits, numbered over all where these are `merged`, else as in `train`.

    `given` has what `clients` takes, for each split that names its clients. Unless the splits are merged, the result
    is empty if `train` is not one of these.
    """
    if not given or (not merged and "train" not in given):
        return {}
    if not merged:
        found = {"train": clients(f"{name} train", given["train"], sizes["train"])}
        own = _ids_of(f"{name} train", given["train"])
        others = {split: ids for split, ids in given.items() if split != "train"}
        return found | {split: _alike(f"{name} {split}", ids, own, sizes[split]) for split, ids in others.items()}
    whole = np.concatenate([_flat(f"{name} {split}: clients", array_of(ids)) for split, ids in given.items()])
    numbers = clients(f"{name} {', '.join(given)}", whole, sum(sizes[split] for split in given))
    return dict(zip(given, np.split(numbers, np.cumsum([sizes[split] for split in given])[:-1]), strict=True))


def _ids_of(where: str, given: Any) -> Ids:
    """The ids of clients, in the order of their numbers; with lists of positions they are these numbers."""
    if _are_lists(given):
        return np.arange(len(given))
    ids = _flat(f"{where}: clients", array_of(given))
    return np.unique(ids[ids != (str(UNLABELED) if ids.dtype.kind == "U" else UNLABELED)])


def _alike(where: str, given: Any, known: Shaped[np.ndarray, " K"], num_examples: int) -> Numbers:
    """The client of each example by the sorted ids that training examples have; -1: it has none of these."""
    ids = _flat(f"{where}: clients", array_of(given))
    if len(ids) != num_examples:
        raise ValueError(f"{where}: {num_examples} examples but {len(ids)} clients' ids: give one id per example")
    if (ids.dtype.kind == "U") != (known.dtype.kind == "U"):
        raise ValueError(f"{where}: clients' ids are {ids.dtype} and those of training examples {known.dtype}: give one kind")
    places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    has_one = known[places] == ids
    if not has_one.all():
        without = int(np.sum(~has_one))
        _log.info("%s: %d of %d examples are of no client with training examples", where, without, num_examples)
    return np.where(has_one, places, UNLABELED).astype(np.int32)


def _are_lists(given: Any) -> bool:
    """Whether clients are given as lists of positions, and not as an id for each example."""
    return not isinstance(given, np.ndarray) and bool(len(given)) and all(np.ndim(rows) == 1 for rows in given)


def clients(where: str, given: Any, num_examples: int) -> Numbers:
    """The client of each of `num_examples` examples, numbered from 0 on; -1: nobody's.

    `given` is an id per example, integers or text, which are numbered in sorted order (-1 stays), or one list of positions per
    client. Raises ValueError where ids are something else, too few or too many, or an example is in two lists.
    """
    if _are_lists(given):
        return _of_lists(where, given, num_examples)
    ids = _flat(f"{where}: clients", array_of(given))
    if len(ids) != num_examples:
        raise ValueError(f"{where}: {num_examples} examples but {len(ids)} clients' ids: give one id per example")
    nobody = ids == (str(UNLABELED) if ids.dtype.kind == "U" else UNLABELED)
    names = np.unique(ids[~nobody])
    if not len(names):
        raise ValueError(f"{where}: client is -1 for every example: give the ids of whom they belong to")
    _log.info("%s: %d clients are numbered: %s", where, len(names), numbered(names))
    return np.where(nobody, UNLABELED, np.searchsorted(names, ids)).astype(np.int32)


def _of_lists(where: str, lists: Sequence[Any], num_examples: int) -> Numbers:
    numbers = np.full(num_examples, UNLABELED, np.int32)
    for k, rows in enumerate(map(array_of, lists)):
        if np.ma.is_masked(rows):
            raise ValueError(f"{where}: clients[{k}] has masked positions: leave these out")
        if not len(rows) or rows.dtype.kind not in "iu":
            got = f"dtype {rows.dtype}" if len(rows) else "no position"
            raise ValueError(f"{where}: clients[{k}] has {got}: give the positions of its training examples, or leave it out")
        if rows.min() < 0 or rows.max() >= num_examples:
            bad = rows[(rows < 0) | (rows >= num_examples)][0]
            raise ValueError(f"{where}: clients[{k}] has position {bad}, accepted: 0..{num_examples - 1}")
        taken = rows[numbers[rows] != UNLABELED]
        if len(taken) or len(np.unique(rows)) < len(rows):
            also = f"clients[{numbers[taken[0]]}] and clients[{k}]" if len(taken) else f"clients[{k}] twice"
            raise ValueError(f"{where}: an example is in {also}: give each to one client, once")
        numbers[rows] = k
    return numbers


def numbered(names: Sequence[Any] | Ids) -> str:
    """Names with their numbers, in words: the first twenty and the last."""
    shown = [f"{number} = {_shown([name])}" for number, name in enumerate(names[:20])]
    return ", ".join([*shown, *([f"... {len(names) - 1} = {_shown(names[-1:])}"] if len(names) > 20 else [])])


def _shown(names: Sequence[Any] | Ids) -> str:
    return first_line(names[0] if isinstance(names[0], str) else int(names[0]))
