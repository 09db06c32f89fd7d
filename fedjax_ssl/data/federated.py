"""Federated data: one pool of examples, and index tables that say which client has which.

Padding the clients of a skewed split then pads integers, not pictures.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Shaped, UInt8

from fedjax_ssl.arrays import Stored as Array
from fedjax_ssl.data.profiles import Profiles

Images = UInt8[Array, "N H W ch"] | Float32[Array, "N V D"]
"""Images, or for texts V stored views, each of D features."""


class Pool(NamedTuple):
    """Examples of all clients and the server together."""

    images: Images
    labels: Int32[Array, " N"]


class Table(NamedTuple):
    """Which examples of the pool each client has: client k has `index[k, :count[k]]`, and the rest (zeros) is padding."""

    index: Int32[Array, "K n"]
    count: Int32[Array, " K"]


class FederatedData(NamedTuple):
    """A dataset, split: the training pool with index tables into it, and the test pool."""

    train: Pool
    test: Pool
    server: Table  # its labeled examples, one row
    labeled: Table
    unlabeled: Table
    client_data: Table  # all examples of each client, each once, its labeled ones first
    pooled: Table  # every unlabeled training example, also those that no client has, one row
    profiles: Profiles | None = None  # the clients' devices; None: all alike
    validation: Table | None = None  # examples for validation, one row, which are in no other table; None: there are none
    client_test: Table | None = None  # examples on which each client is tested, in no other table; None: there are none


TABLES = ("server", "labeled", "unlabeled", "client_data", "pooled", "validation", "client_test")
"""The fields of FederatedData that are index tables; the last two may be None."""


def tables_of(data: "FederatedData") -> dict[str, Table]:
    """The index tables of a split by their names."""
    return {name: table for name in TABLES if (table := getattr(data, name)) is not None}


class Examples(NamedTuple):
    """One client's examples, or the server's: the first `count` entries of `index` into a pool, and their labels, if any."""

    images: Images  # the whole pool, never copied per client; None in the tables that the simulator maps over clients
    index: Int32[Array, " n"]
    count: Int32[Array, ""]
    labels: Int32[Array, " n"]

    @property
    def mask(self) -> Bool[Array, "*K n"]:
        """Which entries of `index` are real."""
        return jnp.arange(self.index.shape[-1]) < self.count[..., None]

    def take(self, positions: Int[Array, "*B"]) -> UInt8[Array, "*B H W ch"] | Float32[Array, "*B V D"]:
        """The pool's images, or features, at `positions` of this client's rows."""
        return self.images[self.index[positions]]


class Mixture(NamedTuple):
    """A client's labeled and unlabeled examples together: `labeled` says which entries have a label, `mask` which are real."""

    images: Images
    index: Int32[Array, " n"]
    labels: Int32[Array, " n"]
    labeled: Bool[Array, " n"]
    mask: Bool[Array, " n"]

    def take(self, positions: Int[Array, "*B"]) -> UInt8[Array, "*B H W ch"] | Float32[Array, "*B V D"]:
        """The pool's images, or features, at `positions` of this client's rows."""
        return self.images[self.index[positions]]


def mix(
    labeled: Examples,
    unlabeled: Examples,
    labeled_repeats: int = 1,
    repeats: Int32[Array, ""] | None = None,
    pseudo: Int[Array, " m"] | None = None,
) -> Mixture:
    """A client's labeled examples, `labeled_repeats` times, followed by its unlabeled ones.

    The last `repeats` copies of the labeled ones are real; None: all. Unlabeled examples have labels 0, or `pseudo`-labels; an
    example whose pseudo-label is -1 takes no part.
    """
    rows, masked = [labeled] * labeled_repeats, 0 if repeats is None else labeled_repeats - repeats
    index = jnp.concatenate([*(row.index for row in rows), unlabeled.index])
    pseudo = jnp.zeros_like(unlabeled.index) if pseudo is None else pseudo
    return Mixture(
        images=unlabeled.images,
        index=index,
        labels=jnp.concatenate([*(row.labels for row in rows), jnp.maximum(pseudo, 0)]),
        labeled=jnp.arange(len(index)) < labeled_repeats * len(labeled.index),
        mask=jnp.concatenate([*(row.mask & (i >= masked) for i, row in enumerate(rows)), unlabeled.mask & (pseudo >= 0)]),
    )


def of_kind(
    labeled: Examples, unlabeled: Examples, labels: Int[Array, " m"] | None = None, used: Bool[Array, " m"] | None = None
) -> Mixture:
    """A client's labeled examples or, where it has none, its unlabeled ones, at their positions in `labeled` or `unlabeled`.

    `labels` are pseudo-labels (None: 0), and `used` says which of the unlabeled examples take part (None: all).
    """
    labels, used = jnp.zeros_like(unlabeled.index) if labels is None else labels, unlabeled.mask if used is None else used
    is_labeled, width = labeled.count > 0, max(len(labeled.index), len(used))

    def either(one: Shaped[Array, " n"], other: Shaped[Array, " m"]) -> Shaped[Array, " k"]:
        return jnp.where(is_labeled, *(jnp.pad(x, (0, width - len(x))) for x in (one, other)))

    mask = either(labeled.mask, used)
    index, known = either(labeled.index, unlabeled.index), either(labeled.labels, labels)
    return Mixture(unlabeled.images, index, known, mask & is_labeled, mask)


def pack(rows: Sequence[Int[np.ndarray, " _"]]) -> Table:
    """The index table of each client's pool positions."""
    counts = np.array([len(row) for row in rows], np.int32)
    index = np.zeros((len(rows), max(1, int(np.max(counts, initial=0)))), np.int32)
    for k, row in enumerate(rows):
        index[k, : len(row)] = row
    return Table(index, counts)


def widened(splits: Sequence[FederatedData], least: Mapping[str, int] | None = None) -> list[FederatedData]:
    """Splits in NumPy arrays, of equally many clients each, whose tables get common shapes by padding.

    A table gets the largest number of columns that it has in any split, or the one in `least` under its name, if larger.
    """
    least = least or {}
    names = list(tables_of(splits[0]))
    widths = {name: max(least.get(name, 0), *(getattr(data, name).index.shape[1] for data in splits)) for name in names}

    def widen(table: Table, width: int) -> Table:
        return table._replace(index=np.pad(table.index, ((0, 0), (0, width - table.index.shape[1]))))

    tables: list[dict[str, Any]] = [{name: widen(getattr(data, name), widths[name]) for name in names} for data in splits]
    return [data._replace(**own) for data, own in zip(splits, tables, strict=True)]
