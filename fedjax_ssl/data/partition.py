"""Who gets which examples: the table of partitions, and the choice of a labeled set, from labels and a seeded generator.

Pure NumPy functions that run once, before anything is compiled; `fedjax_ssl.data.federated.pack` makes an index table of
their rows. Every function sees its indices as a set: their order at the input does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_ssl.data.class_partitions import (
    batch_imbalanced,
    class_balanced,
    class_grid,
    class_shards,
    random_classes,
    shards,
)
from fedjax_ssl.data.dirichlet import dirichlet, dirichlet_classes
from fedjax_ssl.data.shares import Partition, Rows, checked


class Scheme(NamedTuple):
    """A partition by name.

    Attributes:
        function: (labels, indices, num_clients, rng, **parameters) -> Partition.
        parameters: the names of its own parameters.
    """

    function: Callable[..., Partition]
    parameters: tuple[str, ...] = ()


class Summary(NamedTuple):
    """What a partition looks like.

    Attributes:
        sizes: int64 [K], examples of each client.
        histogram: int64 [K, C], examples of each client and class.
    """

    sizes: np.ndarray
    histogram: np.ndarray


def balanced_labels(
    labels: np.ndarray, num_labels: int, num_classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Class-balanced labeled set: num_labels / C examples of every class, drawn without replacement.

    Args:
        labels: int [N], values in 0..C-1.
        num_labels: size of the labeled set, a positive multiple of C.
        num_classes: C.
        rng: source of randomness; advanced.

    Returns:
        (labeled, rest): int64 [num_labels] and int64 [N - num_labels], both ascending, disjoint, together 0..N-1.

    Raises:
        ValueError: num_labels is not a positive multiple of C, or a class has too few examples.
    """
    labels = np.asarray(labels)
    if num_labels > len(labels):
        raise ValueError(f"num_labels={num_labels} is more than the {len(labels)} training examples: ask for fewer labels")
    if num_labels < 1 or num_labels % num_classes:
        raise ValueError(
            f"num_labels={num_labels} cannot be balanced over {num_classes} classes: give a positive multiple of {num_classes}"
        )
    per_class = num_labels // num_classes
    counts = np.bincount(labels, minlength=num_classes)
    if per_class > counts.min():
        raise ValueError(
            f"num_labels={num_labels} needs {per_class} examples of every class, but class {counts.argmin()} has "
            f"{counts.min()}: give at most {counts.min() * num_classes}"
        )
    labeled = np.zeros(len(labels), bool)
    for c in range(num_classes):
        labeled[rng.choice(np.flatnonzero(labels == c), per_class, replace=False)] = True
    return np.flatnonzero(labeled), np.flatnonzero(~labeled)


def random_labels(num_examples: int, num_labels: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Labeled set at random, whatever the classes (FedCon).

    Args:
        num_examples: N.
        num_labels: size of the labeled set, 1..N.
        rng: source of randomness; advanced.

    Returns:
        (labeled, rest): int64 [num_labels] and int64 [N - num_labels], both ascending, disjoint, together 0..N-1.

    Raises:
        ValueError: num_labels is out of range.
    """
    if not 1 <= num_labels <= num_examples:
        raise ValueError(f"num_labels={num_labels} of {num_examples} training examples: give 1 to {num_examples} labels")
    labeled = np.zeros(num_examples, bool)
    labeled[rng.choice(num_examples, num_labels, replace=False)] = True
    return np.flatnonzero(labeled), np.flatnonzero(~labeled)


def iid(labels: np.ndarray, indices: np.ndarray, num_clients: int, rng: np.random.Generator) -> Partition:
    """Equal shares at random: floor(N / K) examples for every client, without replacement ((FL)^2, SemiFL).

    Args:
        labels: not used; every partition takes them.
        indices: int [N], distinct pool positions.
        num_clients: K.
        rng: source of randomness; advanced.

    Returns:
        Partition of K rows int64 [floor(N / K)]; N mod K positions are unassigned.

    Raises:
        ValueError: K is not in 1..N, or a position occurs twice.
    """
    del labels
    positions = checked(indices, num_clients)
    share = len(positions) // num_clients
    shuffled = rng.permutation(positions)
    rows = shuffled[: share * num_clients].reshape(num_clients, share)
    return Partition(list(rows), shuffled[share * num_clients :])


PARTITIONS: dict[str, Scheme] = {
    "iid": Scheme(iid),
    "class_balanced": Scheme(class_balanced),
    "dirichlet": Scheme(dirichlet, ("alpha", "min_size")),
    "dirichlet_classes": Scheme(dirichlet_classes, ("alpha",)),
    "shards": Scheme(shards, ("shards_per_client",)),
    "class_shards": Scheme(class_shards, ("classes_per_client",)),
    "random_classes": Scheme(random_classes, ("classes_per_client",)),
    "class_grid": Scheme(class_grid),
    "batch_imbalanced": Scheme(batch_imbalanced),
}


def summary(rows: Rows, labels: np.ndarray, num_classes: int) -> Summary:
    """Sizes and class histograms of a partition.

    Args:
        rows: K arrays of pool positions.
        labels: int [pool], values in 0..C-1.
        num_classes: C.

    Returns:
        Summary of sizes int64 [K] and histogram int64 [K, C]; the histogram's rows add up to the sizes.
    """
    labels = np.asarray(labels)
    histogram = np.array([np.bincount(labels[row], minlength=num_classes) for row in rows]).reshape(len(rows), num_classes)
    return Summary(histogram.sum(1), histogram)
