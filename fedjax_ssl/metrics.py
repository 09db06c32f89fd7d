"""Metrics that add up: a round's metrics are sums over clients, divided once at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


class Mean(NamedTuple):
    """A metric that is reduced by adding (total, weight) and dividing once.

    Attributes:
        total: float32 scalar ([M] once stacked over clients), a weighted sum of values.
        weight: float32, the sum of weights; where it is 0 the metric has no value and its key is left out.
    """

    total: jax.Array
    weight: jax.Array


class Sum(NamedTuple):
    """A metric that is reduced by adding alone (bytes, images).

    Attributes:
        total: int32 or float32 scalar ([M] once stacked over clients). Clients are added up in Python numbers, so that a
            cohort's bytes do not overflow int32; one client's must stay under 2 GiB.
    """

    total: jax.Array


Metrics = Mapping[str, Mean | Sum]


def mean(values: jax.Array, where: jax.Array | None = None) -> Mean:
    """Mean of `values` over the entries in `where`, as a pair to be added up and divided later.

    Args:
        values: any shape, numeric or bool.
        where: bool of the same shape, or None for all entries. Entries outside may be NaN: they are selected away.

    Returns:
        Mean of float32 scalars.
    """
    values = jnp.asarray(values, jnp.float32)
    where = jnp.ones(values.shape, bool) if where is None else where
    return Mean(jnp.sum(jnp.where(where, values, 0.0)), jnp.sum(where, dtype=jnp.float32))


def num_bytes(tree: PyTree) -> int:
    """Bytes that the arrays of `tree` take, from their shapes and dtypes (works on tracers)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def reduce(metrics: Metrics) -> dict[str, float | int]:
    """Values of metrics that were fetched from the device, stacked over clients or not.

    Args:
        metrics: name -> Mean or Sum of NumPy arrays, scalars or [M].

    Returns:
        name -> Python number; a Mean of weight 0 is left out.
    """
    values: dict[str, float | int] = {}
    for name, metric in metrics.items():
        total = np.sum(metric.total, dtype=np.int64 if np.asarray(metric.total).dtype.kind in "iu" else np.float64).item()
        if isinstance(metric, Sum):
            values[name] = total
        elif (weight := np.sum(metric.weight, dtype=np.float64).item()) != 0:
            values[name] = total / weight
    return values
