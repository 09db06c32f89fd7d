"""From a dataset to federated data: which client, or the server, has which labeled and unlabeled examples."""

import dataclasses
import logging
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fedjax_ssl.data.federated import FederatedData, Pool, pack
from fedjax_ssl.data.partition import PARTITIONS, balanced_labels, random_labels
from fedjax_ssl.data.shares import Labels, Partition, Positions, Rows
from fedjax_ssl.data.sources import Dataset

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Split:
    """How a training set is split: keys of a config's `data`, which `experiment.settings.DataSettings` describes and checks.

    Labels are at the server, or at the clients: jointly (`is_joint`), as a share of what each client gets by one partition of
    all examples, or apart, as a labeled set with a partition of its own.
    """

    num_clients: int = 100
    labels_at: str = "server"
    num_labels: int = 40
    labeled_fraction: tuple[float, ...] = ()
    label_selection: str = "balanced"
    exclude_labeled: bool = True
    labels_first: bool = True
    reveal_labels: bool = False
    partition: str = "iid"
    labeled_partition: str = ""
    unlabeled_partition: str = ""
    alpha: float = 0.3
    min_size: int = 10
    shards_per_client: int = 2
    classes_per_client: int = 2

    @property
    def is_joint(self) -> bool:
        """Whether one partition covers all examples, and each client has a share of labels within its own."""
        apart = self.labeled_partition or self.unlabeled_partition
        return self.labels_at == "clients" and bool(self.labeled_fraction) and not apart


class Assignment(NamedTuple):
    """Which training examples the server and each client have, labeled or not; `notes` are as in `Partition`."""

    server: Positions
    labeled: Rows
    unlabeled: Rows
    pooled: Positions  # every unlabeled training example, also those that no client has
    unassigned: int  # training examples that neither the server nor a client has
    notes: tuple[str, ...]


def draw(labels: Labels, num_classes: int, how: Split, seed: int) -> Assignment:
    """Draws a split of the training set with these labels; ValueError if the request cannot be met."""
    label_rng, split_rng, labeled_rng = (np.random.default_rng([seed, stream]) for stream in range(3))
    empty = [np.zeros(0, np.int64)] * how.num_clients
    server, labeled, apart = empty[0], empty, Partition([], empty[0])
    if how.is_joint:
        shared = _share(how, "all", how.partition, labels, np.arange(len(labels)), split_rng)
        labeled, unlabeled = _label_within(shared.rows, how, label_rng)
    else:
        labeled_set, rest = _labeled_set(labels, num_classes, how, label_rng)
        source = rest if how.exclude_labeled and how.labels_first else np.arange(len(labels))
        shared = _share(how, "unlabeled", how.unlabeled_partition or how.partition, labels, source, split_rng)
        if how.exclude_labeled and not how.labels_first:
            free = np.zeros(len(labels), bool)
            free[rest] = True
            *rows, unassigned = (row[free[row]] for row in (*shared.rows, shared.unassigned))
            shared = shared._replace(rows=rows, unassigned=unassigned)
        unlabeled = shared.rows
        if how.labels_at == "server":
            server = labeled_set
        else:
            apart = _share(how, "labeled", how.labeled_partition or how.partition, labels, labeled_set, labeled_rng)
            labeled = apart.rows
    pooled = np.concatenate([*unlabeled, shared.unassigned])
    if how.reveal_labels:
        labeled = [np.union1d(known, revealed) for known, revealed in zip(labeled, unlabeled, strict=True)]
        unlabeled, pooled = empty, shared.unassigned
    assigned = np.zeros(len(labels), bool)
    assigned[np.concatenate([server, *labeled, *unlabeled])] = True
    notes = [*apart.notes, *shared.notes]
    if how.labels_at == "clients" and (without := sum(len(row) == 0 for row in labeled)):
        notes.append(f"{without} of {len(labeled)} clients have no labeled example")
    return Assignment(server, labeled, unlabeled, np.sort(pooled), int(np.sum(~assigned)), tuple(notes))


def federate(dataset: Dataset, how: Split, seed: int) -> FederatedData:
    """Splits a dataset, see `draw`, into federated data in NumPy arrays; logs its notes."""
    labels = dataset.train_labels
    assignment = draw(labels, dataset.num_classes, how, seed)
    if assignment.unassigned:
        _log.info("%d of %d training examples go to nobody", assignment.unassigned, len(labels))
    for note in assignment.notes:
        _log.warning("%s", note)
    return FederatedData(
        train=Pool(dataset.train_images, labels.astype(np.int32)),
        test=Pool(dataset.test_images, dataset.test_labels.astype(np.int32)),
        server=pack([assignment.server]),
        labeled=pack(assignment.labeled),
        unlabeled=pack(assignment.unlabeled),
        client_data=pack([_union(*rows) for rows in zip(assignment.labeled, assignment.unlabeled, strict=True)]),
        pooled=pack([assignment.pooled]),
    )


def _union(labeled: Positions, unlabeled: Positions) -> Positions:
    """All of a client's examples, each once, also if a labeled one is among the unlabeled ones."""
    if not len(labeled):  # a shortcut for a million clients with labels at the server
        return unlabeled
    return np.concatenate([labeled, unlabeled[~np.isin(unlabeled, labeled)]])


def _share(how: Split, what: str, name: str, labels: Labels, indices: Positions, rng: Generator) -> Partition:
    """The partition `name` of some examples; an error says `what` they are."""
    scheme = PARTITIONS[name]
    parameters = {parameter: getattr(how, parameter) for parameter in scheme.parameters}
    try:
        return scheme.function(labels, indices, how.num_clients, rng, **parameters)
    except ValueError as error:
        raise ValueError(f"{what} examples by {name}: {error}") from error


def _labeled_set(labels: Labels, num_classes: int, how: Split, rng: Generator) -> tuple[Positions, Positions]:
    """The labeled set and the rest; a share is rounded, and down to a multiple of C if balanced."""
    num_labels = how.num_labels
    if how.labeled_fraction:
        num_labels = round(how.labeled_fraction[0] * len(labels))
        num_labels -= num_labels % num_classes if how.label_selection == "balanced" else 0
        if not num_labels:
            minimum = "one label per class" if how.label_selection == "balanced" else "one label"
            raise ValueError(f"labeled_fraction={how.labeled_fraction[0]} of {len(labels)} examples is less than {minimum}")
    if how.label_selection == "balanced":
        return balanced_labels(labels, num_labels, num_classes, rng)
    return random_labels(len(labels), num_labels, rng)


def _label_within(rows: Rows, how: Split, rng: Generator) -> tuple[Rows, Rows]:
    """Labeled and unlabeled examples of every client: a random share of its row is labeled, rounded half up."""
    fractions = np.broadcast_to(how.labeled_fraction, how.num_clients)
    shuffled = [rng.permutation(row) for row in rows]
    cuts = [int(fraction * len(row) + 0.5) for fraction, row in zip(fractions, rows, strict=True)]
    if not any(cuts):
        raise ValueError(f"labeled_fraction={max(how.labeled_fraction)} labels no example of any client: give a larger share")
    labeled = [row[:cut] for row, cut in zip(shuffled, cuts, strict=True)]
    return labeled, [row[cut if how.exclude_labeled else 0 :] for row, cut in zip(shuffled, cuts, strict=True)]
