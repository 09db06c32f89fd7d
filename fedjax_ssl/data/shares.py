"""What all partitions share: their result, and how index arrays are checked, ordered and dealt out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Rows = list[np.ndarray]


class Partition(NamedTuple):
    """Who gets which examples: rows and the unassigned rest are disjoint, and together all that was to be shared.

    Attributes:
        rows: K arrays int64 of pool positions.
        unassigned: int64 [U], the positions that nobody got.
        notes: one line for each way in which the result is not what was asked for, to be logged.
    """

    rows: Rows
    unassigned: np.ndarray
    notes: tuple[str, ...] = ()


def distinct(indices: np.ndarray) -> np.ndarray:
    """Ascending positions int64 [N]: partitions see their indices as a set, so that the order at the input is irrelevant.

    Raises:
        ValueError: a position occurs twice.
    """
    positions = np.unique(np.asarray(indices, np.int64))
    if len(positions) != len(indices):
        raise ValueError(f"indices hold {len(indices) - len(positions)} repeated positions: give each position once")
    return positions


def checked(indices: np.ndarray, num_clients: int) -> np.ndarray:
    """`distinct` positions, at least one for each client.

    Raises:
        ValueError: num_clients is not in 1..N, or a position occurs twice.
    """
    positions = distinct(indices)
    if not 1 <= num_clients <= len(positions):
        raise ValueError(
            f"num_clients={num_clients} cannot share {len(positions)} examples: give 1 to {len(positions)} clients"
        )
    return positions


def shuffled_by_class(labels: np.ndarray, positions: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions class after class, in random order within each class, and how many there are of each.

    Args:
        labels: int [pool], labels of the whole pool; its largest is C - 1.
        positions: int64 [N].
        rng: source of randomness; advanced.

    Returns:
        (positions int64 [N], counts int64 [C]).
    """
    labels = np.asarray(labels)
    shuffled = rng.permutation(positions)
    of_class = labels[shuffled]
    return shuffled[np.argsort(of_class, kind="stable")], np.bincount(of_class, minlength=int(labels.max()) + 1)


def by_owner(positions: np.ndarray, owner: np.ndarray, num_owners: int) -> Rows:
    """One row per owner: the positions [N] whose `owner` int [N] it is, in their order."""
    ends = np.cumsum(np.bincount(owner, minlength=num_owners))
    return np.split(positions[np.argsort(owner, kind="stable")], ends[:-1])


def cut(by_class: np.ndarray, sizes: np.ndarray) -> Rows:
    """Cuts positions [N], class after class, into one row per owner: `sizes` int [C', owners] of each class and owner."""
    num_owners = sizes.shape[1]
    owner = np.repeat(np.tile(np.arange(num_owners), len(sizes)), sizes.ravel())
    return by_owner(by_class, owner, num_owners)
