"""From a dataset to federated data: who holds which labels, and which unlabeled images."""

from __future__ import annotations

import dataclasses
import logging
from typing import NamedTuple

import numpy as np

from fedjax_ssl.data.federated import FederatedData, Pool, pack
from fedjax_ssl.data.partition import PARTITIONS, balanced_labels, random_labels
from fedjax_ssl.data.shares import Partition, Rows
from fedjax_ssl.data.sources import Dataset

_log = logging.getLogger(__name__)

LABELS_AT = ("server", "clients")
LABEL_SELECTIONS = ("balanced", "random")


@dataclasses.dataclass(frozen=True)
class Split:
    """How a training set is split; these are keys of a config's `data`, which checks them.

    Three ways, by `labels_at` and `is_joint`: a labeled set at the server and the other examples at the clients; at the
    clients, one partition of all examples and a labeled share within each client; or at the clients, a labeled set and the
    other examples, each split by a partition drawn on its own.

    Attributes:
        num_clients: K.
        labels_at: where the labels are: `server` or `clients`.
        num_labels: labeled examples in all; not used where labeled_fraction is given.
        labeled_fraction: labeled share of all training examples. With labels at the clients, and neither labeled_partition
            nor unlabeled_partition given, of each client's examples, drawn within its own: one number, or one per client.
        label_selection: how num_labels are chosen: `balanced` over classes, or at `random`.
        exclude_labeled: whether labeled examples are kept out of the clients' unlabeled data.
        labels_first: whether the labeled examples are taken out before the others are partitioned; false: all examples are
            partitioned, and the labeled ones leave the clients then (FedCon).
        reveal_labels: split as usual, then give each client's unlabeled examples their true labels (the -SL references).
        partition: how examples are spread over clients, a key of `fedjax_ssl.data.partition.PARTITIONS`.
        labeled_partition: with labels at the clients: how num_labels are spread; empty: as partition.
        unlabeled_partition: with labels at the clients: how all others are, in a draw of their own; empty: as partition.
        alpha: concentration of `dirichlet` and `dirichlet_classes`; small is skewed.
        min_size: fewest examples, labeled and unlabeled apart, that `dirichlet` may leave a client.
        shards_per_client: of `shards`.
        classes_per_client: of `class_shards` and `random_classes`.
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


class Holdings(NamedTuple):
    """Who holds which training examples.

    Attributes:
        server: int64 [L], the server's labeled examples.
        labeled: K arrays int64, the clients' labeled examples.
        unlabeled: K arrays int64, the clients' unlabeled examples.
        pooled: int64, every unlabeled training example, held by a client or by nobody.
        unassigned: how many training examples nobody holds.
        notes: lines on what is not as was asked for.
    """

    server: np.ndarray
    labeled: Rows
    unlabeled: Rows
    pooled: np.ndarray
    unassigned: int
    notes: tuple[str, ...]


def draw(labels: np.ndarray, num_classes: int, how: Split, seed: int) -> Holdings:
    """Draws a split.

    Args:
        labels: int [N], labels of the training set, values in 0..C-1.
        num_classes: C.
        how: the split.
        seed: draws the labeled set, the partition and the labeled partition; each from a stream of its own.

    Returns:
        Holdings.

    Raises:
        ValueError: where the request cannot be met.
    """
    label_rng, split_rng, labeled_rng = (np.random.default_rng([seed, stream]) for stream in range(3))
    nobody = [np.zeros(0, np.int64)] * how.num_clients
    server, labeled, apart = nobody[0], nobody, Partition([], nobody[0])
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
            kept = [rows[free[rows]] for rows in (*shared.rows, shared.unassigned)]
            shared = shared._replace(rows=kept[:-1], unassigned=kept[-1])
        unlabeled = shared.rows
        if how.labels_at == "server":
            server = labeled_set
        else:
            apart = _share(how, "labeled", how.labeled_partition or how.partition, labels, labeled_set, labeled_rng)
            labeled = apart.rows
    pooled = np.concatenate([*unlabeled, shared.unassigned])
    if how.reveal_labels:
        labeled = [np.union1d(known, revealed) for known, revealed in zip(labeled, unlabeled, strict=True)]
        unlabeled, pooled = nobody, shared.unassigned
    held = np.zeros(len(labels), bool)
    held[np.concatenate([server, *labeled, *unlabeled])] = True
    unassigned = len(labels) - int(held.sum())
    notes = (*apart.notes, *shared.notes, *(_without_labels(labeled) if how.labels_at == "clients" else ()))
    return Holdings(server, labeled, unlabeled, np.sort(pooled), unassigned, notes)


def federate(dataset: Dataset, how: Split, seed: int) -> FederatedData:
    """Federated data of a dataset; what nobody holds is logged, and what is not as asked for is a warning.

    Args:
        dataset: the dataset.
        how: the split.
        seed: see `draw`.

    Returns:
        FederatedData of NumPy arrays.

    Raises:
        ValueError: where the request cannot be met.
    """
    labels = dataset.train_labels
    holdings = draw(labels, dataset.num_classes, how, seed)
    if holdings.unassigned:
        _log.info("%d of %d training examples go to nobody", holdings.unassigned, len(labels))
    for note in holdings.notes:
        _log.warning("%s", note)
    return FederatedData(
        train=Pool(dataset.train_images, labels.astype(np.int32)),
        test=Pool(dataset.test_images, dataset.test_labels.astype(np.int32)),
        server=pack([holdings.server]),
        labeled=pack(holdings.labeled),
        unlabeled=pack(holdings.unlabeled),
        held=pack([_union(*rows) for rows in zip(holdings.labeled, holdings.unlabeled, strict=True)]),
        pooled=pack([holdings.pooled]),
    )


def _union(labeled: np.ndarray, unlabeled: np.ndarray) -> np.ndarray:
    """All of a client's examples in order, once where an unlabeled one is a labeled one too (`exclude_labeled` false)."""
    if not len(labeled):  # every client, with labels at the server: a million of them take seconds otherwise
        return unlabeled
    return np.concatenate([labeled, unlabeled[~np.isin(unlabeled, labeled)]])


def _share(how: Split, what: str, name: str, labels: np.ndarray, indices: np.ndarray, rng: np.random.Generator) -> Partition:
    """The partition `name`; an error says which examples it was to share, as there may be two partitions."""
    scheme = PARTITIONS[name]
    parameters = {parameter: getattr(how, parameter) for parameter in scheme.parameters}
    try:
        return scheme.function(labels, indices, how.num_clients, rng, **parameters)
    except ValueError as error:
        raise ValueError(f"{what} examples by {name}: {error}") from error


def _without_labels(labeled: Rows) -> tuple[str, ...]:
    """A note where some clients hold no labeled example."""
    count = sum(len(row) == 0 for row in labeled)
    return (f"{count} of {len(labeled)} clients hold no labeled example",) if count else ()


def _labeled_set(labels: np.ndarray, num_classes: int, how: Split, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The labeled set and the rest; a share of the training set is rounded, and down to a multiple of C where balanced."""
    num_labels = how.num_labels
    if how.labeled_fraction:
        num_labels = round(how.labeled_fraction[0] * len(labels))
        num_labels -= num_labels % num_classes if how.label_selection == "balanced" else 0
        if not num_labels:
            least = "one label per class" if how.label_selection == "balanced" else "one label"
            raise ValueError(f"labeled_fraction={how.labeled_fraction[0]} of {len(labels)} examples is less than {least}")
    if how.label_selection == "balanced":
        return balanced_labels(labels, num_labels, num_classes, rng)
    return random_labels(len(labels), num_labels, rng)


def _label_within(rows: Rows, how: Split, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Labels a share of every row, uniformly at random, rounded half up; (labeled, unlabeled)."""
    fractions = np.broadcast_to(how.labeled_fraction, how.num_clients)
    shuffled = [rng.permutation(row) for row in rows]
    cuts = [int(fraction * len(row) + 0.5) for fraction, row in zip(fractions, rows, strict=True)]
    if not any(cuts):
        raise ValueError(f"labeled_fraction={max(how.labeled_fraction)} labels no example of any client: give a larger share")
    labeled = [row[:cut] for row, cut in zip(shuffled, cuts, strict=True)]
    return labeled, [row[cut if how.exclude_labeled else 0 :] for row, cut in zip(shuffled, cuts, strict=True)]
