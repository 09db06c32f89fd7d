"""Which client gets which examples: the table of partitions, and the choice of a labeled set. All run once, in NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from numpy.random import Generator

from fedjax_ssl.data import class_partitions as classes
from fedjax_ssl.data.dirichlet import dirichlet, dirichlet_classes
from fedjax_ssl.data.shares import Indices, Labels, Partition, Positions, Rows, checked


class Scheme(NamedTuple):
    """A partition, see `shares`, and the names of its own parameters."""

    function: Callable[..., Partition]
    parameters: tuple[str, ...] = ()


def balanced_labels(labels: Labels, num_labels: int, num_classes: int, rng: Generator) -> tuple[Positions, Positions]:
    """A class-balanced labeled set, num_labels / C random examples of every class, and the rest, both ascending."""
    labels = np.asarray(labels)
    if num_labels > len(labels):
        raise ValueError(f"num_labels={num_labels} is more than the {len(labels)} training examples: ask for fewer labels")
    if num_labels < 1 or num_labels % num_classes:
        raise ValueError(
            f"num_labels={num_labels} cannot be balanced over {num_classes} classes: give a positive multiple of {num_classes}"
        )
    per_class, counts = num_labels // num_classes, np.bincount(labels, minlength=num_classes)
    if per_class > np.min(counts):
        raise ValueError(
            f"num_labels={num_labels} needs {per_class} examples of every class, but class {np.argmin(counts)} has "
            f"{np.min(counts)}: give at most {np.min(counts) * num_classes}"
        )
    chosen = [rng.choice(np.flatnonzero(labels == c), per_class, replace=False) for c in range(num_classes)]
    return _and_the_rest(np.concatenate(chosen), len(labels))


def random_labels(num_examples: int, num_labels: int, rng: Generator) -> tuple[Positions, Positions]:
    """A labeled set at random, whatever the classes (FedCon), and the rest, both ascending."""
    if not 1 <= num_labels <= num_examples:
        raise ValueError(f"num_labels={num_labels} of {num_examples} training examples: give 1 to {num_examples} labels")
    return _and_the_rest(rng.choice(num_examples, num_labels, replace=False), num_examples)


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


PARTITIONS: dict[str, Scheme] = {
    "iid": Scheme(iid),
    "class_balanced": Scheme(classes.class_balanced),
    "dirichlet": Scheme(dirichlet, ("alpha", "min_size")),
    "dirichlet_classes": Scheme(dirichlet_classes, ("alpha",)),
    "shards": Scheme(classes.shards, ("shards_per_client",)),
    "class_shards": Scheme(classes.class_shards, ("classes_per_client",)),
    "random_classes": Scheme(classes.random_classes, ("classes_per_client",)),
    "class_grid": Scheme(classes.class_grid),
    "batch_imbalanced": Scheme(classes.batch_imbalanced),
}


def class_counts(rows: Rows, labels: Labels, num_classes: int) -> Int64[np.ndarray, "K C"]:
    """The examples of each client and class."""
    counts = [np.bincount(np.asarray(labels)[row], minlength=num_classes) for row in rows]
    return np.array(counts).reshape(len(rows), num_classes)
