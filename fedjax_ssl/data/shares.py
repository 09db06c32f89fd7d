"""What all partitions share: arguments, result and the handling of index arrays.

A partition is a function (labels of the whole pool, indices of the N examples to share out, num_clients K, rng, **parameters)
-> Partition. It raises ValueError unless K is in 1..N, each index occurs once and its own parameters are in range.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64
from numpy.random import Generator

Labels = Int[np.ndarray, " pool"]
"""Labels of the whole pool, also of examples that are not shared out; the largest is C - 1."""
Indices = Int[np.ndarray, " N"]
Positions = Int64[np.ndarray, " _"]
Rows = list[Positions]
"""Pool positions of each client."""


class Partition(NamedTuple):
    """Which client gets which examples: disjoint pool positions of each of K clients, and those that no client gets."""

    rows: Rows
    unassigned: Positions
    notes: tuple[str, ...] = ()  # one line for each way in which the result differs from the request


def distinct(indices: Indices) -> Positions:
    """The indices in ascending order, so that a partition does not depend on their order; ValueError if one occurs twice."""
    positions = np.unique(np.asarray(indices, np.int64))
    if len(positions) != len(indices):
        raise ValueError(f"indices hold {len(indices) - len(positions)} repeated positions: give each position once")
    return positions


def checked(indices: Indices, num_clients: int) -> Positions:
    """`distinct` positions; ValueError also if there are fewer positions than clients."""
    positions = distinct(indices)
    if not 1 <= num_clients <= len(positions):
        raise ValueError(
            f"num_clients={num_clients} cannot share {len(positions)} examples: give 1 to {len(positions)} clients"
        )
    return positions


def shuffled_by_class(labels: Labels, positions: Positions, rng: Generator) -> tuple[Positions, Int64[np.ndarray, " C"]]:
    """Positions class after class, in random order within each class, and the number of examples of each class."""
    labels = np.asarray(labels)
    shuffled = rng.permutation(positions)
    of_class = labels[shuffled]
    return shuffled[np.argsort(of_class, kind="stable")], np.bincount(of_class, minlength=int(labels.max()) + 1)


def by_client(positions: Int64[np.ndarray, " N"], client: Indices, num_clients: int) -> Rows:
    """Rows of the positions of each client, where `client` says whose each position is."""
    ends = np.cumsum(np.bincount(client, minlength=num_clients))
    return np.split(positions[np.argsort(client, kind="stable")], ends[:-1])


def mixed(rows: Rows, rng: Generator) -> Rows:
    """Each client's positions in random order."""
    client = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    order = rng.permutation(len(client))
    return by_client(np.concatenate(rows)[order], client[order], len(rows))


def cut(by_class: Positions, sizes: Int64[np.ndarray, "C K"]) -> Rows:
    """Cuts class-sorted positions into one row per client; `sizes` says how many examples of each class each client gets."""
    num_clients = sizes.shape[1]
    client = np.repeat(np.tile(np.arange(num_clients), len(sizes)), sizes.ravel())
    return by_client(by_class, client, num_clients)
