"""Federated data: one pool of examples, and index tables that say who holds which.

A skewed split then pads integers, not pictures: the images stay in one uint8 array and clients are rows of an index table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

Array = Any  # of JAX, or of NumPy where the data stay on the host


class Pool(NamedTuple):
    """Examples of all holders together.

    Attributes:
        images: uint8 [N, H, W, ch]; or, of texts, float32 [N, V, D], V stored views of D features.
        labels: int32 [N].
    """

    images: Array
    labels: Array


class Table(NamedTuple):
    """Which examples of the pool each of K holders has: row k is `index[k, :count[k]]`, the rest is padding.

    Attributes:
        index: int32 [K, n], positions in the pool, padded with 0 (n >= 1).
        count: int32 [K].
    """

    index: Array
    count: Array

    @property
    def mask(self) -> Array:
        """Bool [..., n]: which entries of `index` are real."""
        return jnp.arange(self.index.shape[-1]) < self.count[..., None]


class FederatedData(NamedTuple):
    """A dataset, split: the training pool and index tables into it, and the test pool.

    Attributes:
        train: the training pool.
        test: the test pool.
        server: Table of one row: the labeled examples that the server holds.
        labeled: Table of K rows: the clients' labeled examples.
        unlabeled: Table of K rows: the clients' unlabeled examples.
        held: Table of K rows: all examples of each client, its labeled ones first, each once.
        pooled: Table of one row: every unlabeled training example, owned by a client or left over by the split.
    """

    train: Pool
    test: Pool
    server: Table
    labeled: Table
    unlabeled: Table
    held: Table
    pooled: Table

    @property
    def num_clients(self) -> int:
        """K."""
        return self.unlabeled.count.shape[0]


TABLES = ("server", "labeled", "unlabeled", "held", "pooled")
"""The fields of FederatedData that are index tables."""


class Examples(NamedTuple):
    """One holder's examples: rows of an index table over a pool of images.

    Attributes:
        images: uint8 [N, H, W, ch], the pool (shared by all holders, never copied per client); None in the tables that the
            simulator maps over clients, until a client attaches it.
        index: int32 [n].
        count: int32 scalar: the first `count` entries of `index` are real.
        labels: int32 [n], aligned with `index`; None where the holder has no labels.
    """

    images: Array
    index: Array
    count: Array
    labels: Array

    @property
    def mask(self) -> Array:
        """Bool [n]: which entries of `index` are real."""
        return jnp.arange(self.index.shape[-1]) < self.count[..., None]

    def take(self, positions: Array) -> Array:
        """Images uint8 [B, H, W, ch] (or features, as the pool has them) at `positions` int32 [B] of this holder's rows."""
        return self.images[self.index[positions]]


class Mixture(NamedTuple):
    """A holder's labeled and unlabeled examples together.

    Attributes:
        images: the pool.
        index: int32 [n], positions in it.
        labels: int32 [n], 0 where there is none.
        labeled: bool [n], which have a label.
        mask: bool [n], which entries are real.
    """

    images: Array
    index: Array
    labels: Array
    labeled: Array
    mask: Array

    def take(self, positions: Array) -> Array:
        """Images uint8 [B, H, W, ch] (or features, as the pool has them) at `positions` int32 [B]."""
        return self.images[self.index[positions]]


def mix(labeled: Examples, unlabeled: Examples, labeled_repeats: int = 1) -> Mixture:
    """A holder's labeled examples, `labeled_repeats` times, and its unlabeled ones, over one pool."""
    rows = [labeled] * labeled_repeats
    index = jnp.concatenate([*(row.index for row in rows), unlabeled.index])
    return Mixture(
        images=unlabeled.images,
        index=index,
        labels=jnp.concatenate([*(row.labels for row in rows), jnp.zeros_like(unlabeled.index)]),
        labeled=jnp.arange(len(index)) < labeled_repeats * len(labeled.index),
        mask=jnp.concatenate([*(row.mask for row in rows), unlabeled.mask]),
    )


def with_pseudo_labels(labeled: Examples, unlabeled: Examples, pseudo: Array, labeled_repeats: int = 1) -> Mixture:
    """`mix` of the labeled examples and of those unlabeled ones that have a pseudo-label, which is their label then.

    Args:
        labeled: n rows.
        unlabeled: m rows.
        pseudo: int32 [m], -1: none, as an example without one that takes no part.
        labeled_repeats: how often each labeled example is there.
    """
    examples = mix(labeled, unlabeled, labeled_repeats)
    has_label = jnp.concatenate([jnp.ones(len(examples.index) - len(pseudo), bool), pseudo >= 0])
    labels = jnp.concatenate([examples.labels[: -len(pseudo)], jnp.maximum(pseudo, 0)])
    return examples._replace(labels=labels, mask=examples.mask & has_label)


def pack(rows: Sequence[np.ndarray]) -> Table:
    """Index table of ragged rows: one integer array of pool positions per holder."""
    counts = np.array([len(row) for row in rows], np.int32)
    index = np.zeros((len(rows), max(1, counts.max(initial=0))), np.int32)
    for k, row in enumerate(rows):
        index[k, : len(row)] = row
    return Table(index, counts)


def widened(splits: Sequence[FederatedData]) -> list[FederatedData]:
    """Splits for as many clients each, in NumPy arrays, with tables of common shapes: narrower ones get more padding."""

    def widen(*tables: Table) -> list[Table]:
        width = max(table.index.shape[1] for table in tables)
        return [table._replace(index=np.pad(table.index, ((0, 0), (0, width - table.index.shape[1])))) for table in tables]

    wide = {name: widen(*(getattr(data, name) for data in splits)) for name in TABLES}
    rows: list[dict[str, Any]] = [{name: tables[i] for name, tables in wide.items()} for i in range(len(splits))]
    return [data._replace(**tables) for data, tables in zip(splits, rows, strict=True)]
