"""Metrics that add up over clients and are divided once, at the end of a round: scalars, or [M] once stacked over clients."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped

from fedjax_ssl.arrays import Array, Number, PyTree


class Mean(NamedTuple):
    """A weighted mean, as the weighted sum of values and the sum of weights; where that is 0 its key is left out."""

    total: Float32[Array, "*M"]
    weight: Float32[Array, "*M"]


class Sum(NamedTuple):
    """A sum over clients, such as bytes. The host adds them up in 64 bits; int32 limits one client's value alone."""

    total: Int32[Array, "*M"] | Float32[Array, "*M"]


class Each(NamedTuple):
    """What `diagnostics.clients_every` records of each client, an array of any shape that is never added up.

    A round that is not recorded leaves it out of its program. Names `example/...` are for `Experiment.inspect` alone.
    """

    value: Shaped[Array, "*_"]


Metrics = Mapping[str, Mean | Sum]
ClientMetrics = Mapping[str, Mean | Sum | Each]


def mean(values: Shaped[Array, "*shape"] | Number, where: Bool[Array, "*shape"] | bool | None = None) -> Mean:
    """The mean of `values` over the entries in `where` (None: all); others may be NaN.

    >>> reduce({"client/loss": mean(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))})
    {'client/loss': 2.0}
    """
    values = jnp.asarray(values, jnp.float32)
    where = jnp.ones(values.shape, bool) if where is None else where
    return Mean(jnp.sum(jnp.where(where, values, 0.0)), jnp.sum(where, dtype=jnp.float32))


def num_bytes(tree: PyTree) -> int:
    """The bytes of a tree's arrays, by their shapes and dtypes, also while tracing."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def reduce(metrics: ClientMetrics) -> dict[str, float | int]:
    """Python numbers of metrics on the host, stacked over clients or not; a Mean of weight 0 is left out, as is each Each."""
    values: dict[str, float | int] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Each):
            continue
        total = np.sum(metric.total, dtype=np.int64 if np.asarray(metric.total).dtype.kind in "iu" else np.float64).item()
        if isinstance(metric, Sum):
            values[name] = total
        elif (weight := np.sum(metric.weight, dtype=np.float64).item()) != 0:
            values[name] = total / weight
    return values
