"""What all partitions share: their arguments and result, and how index arrays are checked, ordered and dealt out.

A partition is a function (labels of the whole pool, indices of the N examples to share out, num_clients K, rng, **parameters)
-> Partition. It raises ValueError unless K is in 1..N, each index occurs once and its own parameters are in range.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

Labels = Int[np.ndarray, " pool"]
"""Labels of the whole pool, also of examples that are not shared out; the largest is C - 1."""
Indices = Int[np.ndarray, " N"]
Positions = Int64[np.ndarray, " _"]
Rows = list[Positions]
"""Pool positions of each client."""


class Partition(NamedTuple):
    """Which client gets which examples: rows and the unassigned rest are disjoint, and together all that was to be shared.

    Attributes:
        rows: pool positions of each of K clients.
        unassigned: pool positions of no client.
        notes: one line for each way in which the result differs from the request, to be logged.
    """

    rows: Rows
    unassigned: Positions
    notes: tuple[str, ...] = ()


def distinct(indices: Indices) -> Positions:
    """The indices in ascending order, so that a partition does not depend on their order; ValueError if one occurs twice."""
    positions = np.unique(np.asarray(indices, np.int64))
    if len(positions) != len(indices):
        raise ValueError(f"indices hold {len(indices) - len(positions)} repeated positions: give each position once")
    return positions


def checked(indices: Indices, num_clients: int) -> Positions:
    """`distinct` positions; ValueError too if there is not at least one for each client."""
    positions = distinct(indices)
    if not 1 <= num_clients <= len(positions):
        raise ValueError(
            f"num_clients={num_clients} cannot share {len(positions)} examples: give 1 to {len(positions)} clients"
        )
    return positions


def shuffled_by_class(
    labels: Labels, positions: Positions, rng: np.random.Generator
) -> tuple[Positions, Int64[np.ndarray, " C"]]:
    """Positions class after class, in random order within each class, and the number of each class."""
    labels = np.asarray(labels)
    shuffled = rng.permutation(positions)
    of_class = labels[shuffled]
    return shuffled[np.argsort(of_class, kind="stable")], np.bincount(of_class, minlength=int(labels.max()) + 1)


def by_owner(positions: Int64[np.ndarray, " N"], owner: Indices, num_owners: int) -> Rows:
    """One row per owner: the positions whose `owner` it is, in their order."""
    ends = np.cumsum(np.bincount(owner, minlength=num_owners))
    return np.split(positions[np.argsort(owner, kind="stable")], ends[:-1])


def cut(by_class: Positions, sizes: Int64[np.ndarray, "C owners"]) -> Rows:
    """Cuts positions, class after class, into one row per owner: `sizes` of each class and owner."""
    num_owners = sizes.shape[1]
    owner = np.repeat(np.tile(np.arange(num_owners), len(sizes)), sizes.ravel())
    return by_owner(by_class, owner, num_owners)
