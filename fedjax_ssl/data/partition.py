"""Which client gets which examples: the table of partitions, and the choice of a labeled set. All run once, in NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy.random import Generator

from fedjax_ssl.data import class_partitions as classes
from fedjax_ssl.data.dirichlet import dirichlet, dirichlet_classes, dirichlet_pairs
from fedjax_ssl.data.shares import Indices, Labels, Partition, Positions, Rows, by_client, checked, distinct


class Scheme(NamedTuple):
    """A partition, see `shares`, and the names of its parameters: keys of `DataSettings`, or `clients` of the dataset."""

    function: Callable[..., Partition]
    parameters: tuple[str, ...] = ()


def balanced_labels(labels: Labels, num_labels: int, num_classes: int, rng: Generator) -> tuple[Positions, Positions]:
    """A class-balanced labeled set, num_labels / C random examples of every class, and the rest, both ascending.

    Labels of -1 are unknown, and their examples are in the rest.
    """
    labels = np.asarray(labels)
    if num_labels > len(labels):
        raise ValueError(f"num_labels={num_labels} is more than the {len(labels)} training examples: ask for fewer labels")
    if num_labels < 1 or num_labels % num_classes:
        raise ValueError(
            f"num_labels={num_labels} cannot be balanced over {num_classes} classes: give a positive multiple of {num_classes}"
        )
    per_class, counts = num_labels // num_classes, np.bincount(labels[labels >= 0], minlength=num_classes)
    if per_class > np.min(counts):
        raise ValueError(
            f"num_labels={num_labels} needs {per_class} examples of every class, but class {np.argmin(counts)} has "
            f"{np.min(counts)}: give at most {np.min(counts) * num_classes}, or label_selection=random"
        )
    chosen = [rng.choice(np.flatnonzero(labels == c), per_class, replace=False) for c in range(num_classes)]
    return _and_the_rest(np.concatenate(chosen), len(labels))


def random_labels(labels: Labels, num_labels: int, rng: Generator) -> tuple[Positions, Positions]:
    """A labeled set at random, whatever the classes (FedCon), and the rest, with every example of label -1; both ascending."""
    return _and_the_rest(rng.choice(_known(labels, num_labels), num_labels, replace=False), len(labels))


def stratified_labels(labels: Labels, num_labels: int, rng: Generator) -> tuple[Positions, Positions]:
    """About num_labels examples, the same share of each class, and the rest, with every example of label -1; both ascending."""
    share = num_labels / len(_known(labels, num_labels))
    chosen = share_of_classes(rng.permutation(len(labels)), labels, share)
    if not len(chosen):
        raise ValueError(f"num_labels={num_labels} is less than one example of any class: give more, or label_selection=random")
    return _and_the_rest(chosen, len(labels))


def share_of_classes(rows: Positions, labels: Labels, share: float) -> Positions:
    """A share of the examples of each class in `rows`, the first ones, rounded half to even (FedSiam's released code)."""
    of_classes = (rows[labels[rows] == c] for c in np.unique(labels[labels >= 0]))
    return np.concatenate([own[: round(share * len(own))] for own in of_classes])


def _known(labels: Labels, num_labels: int) -> Positions:
    """The examples of known class; ValueError where they are fewer than num_labels."""
    known = np.flatnonzero(np.asarray(labels) >= 0)
    if not 1 <= num_labels <= len(known):
        raise ValueError(f"num_labels={num_labels} of {len(known)} labeled training examples: give 1 to {len(known)} labels")
    return known


def _and_the_rest(labeled: Positions, num_examples: int) -> tuple[Positions, Positions]:
    return np.sort(labeled), np.setdiff1d(np.arange(num_examples), labeled, assume_unique=True)


def iid(labels: Labels, indices: Indices, num_clients: int, rng: Generator) -> Partition:
    """Equal shares at random: floor(N / K) examples for every client ((FL)^2, SemiFL); N mod K examples are unassigned."""
    del labels
    positions = checked(indices, num_clients)
    share = len(positions) // num_clients
    shuffled = rng.permutation(positions)
    rows = shuffled[: share * num_clients].reshape(num_clients, share)
    return Partition(list(rows), shuffled[share * num_clients :])


def natural(labels: Labels, indices: Indices, num_clients: int, rng: Generator, *, clients: Labels) -> Partition:
    """The clients' examples as the dataset assigns them; those of no client (-1) are unassigned."""
    del labels, rng
    positions = distinct(indices)
    of_client = clients[positions]
    is_owned = of_client >= 0
    return Partition(by_client(positions[is_owned], of_client[is_owned], num_clients), positions[~is_owned])


PARTITIONS: dict[str, Scheme] = {
    "iid": Scheme(iid),
    "class_balanced": Scheme(classes.class_balanced),
    "dirichlet": Scheme(dirichlet, ("alpha", "min_size")),
    "dirichlet_classes": Scheme(dirichlet_classes, ("alpha",)),
    "dirichlet_pairs": Scheme(dirichlet_pairs, ("alpha",)),
    "shards": Scheme(classes.shards, ("shards_per_client",)),
    "class_shards": Scheme(classes.class_shards, ("classes_per_client",)),
    "random_classes": Scheme(classes.random_classes, ("classes_per_client",)),
    "class_grid": Scheme(classes.class_grid),
    "batch_imbalanced": Scheme(classes.batch_imbalanced),
    "natural": Scheme(natural, ("clients",)),
}


def class_counts(rows: Rows, labels: Labels, num_classes: int) -> Int64[np.ndarray, "K C"]:
    """The examples of each client and class; those of an unknown class (-1) are not counted."""
    labels = np.asarray(labels)
    counts = [np.bincount(labels[row][labels[row] >= 0], minlength=num_classes) for row in rows]
    return np.array(counts).reshape(len(rows), num_classes)
