"""Metrics that add up over clients and are divided once, at the end of a round: scalars, or [M] once stacked over clients."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped

from fedjax_ssl.arrays import Array, Number, PyTree, Stored


class Mean(NamedTuple):
    """A weighted mean, as the weighted sum of values and the sum of weights. It is not logged if the weights sum to 0."""

    total: Float32[Array, "*M"]
    weight: Float32[Array, "*M"]


BASE_BITS = 30


class Sum(NamedTuple):
    """A sum over clients, such as a sum of bytes.

    Its value is `total + 2**30 * high`, two int32 parts, because JAX has no 64-bit integers by default.
    `Sum(number)` is enough for a number that an int32 holds. `plus` and `added` are exact below 2^60, and the host adds up
    clients and rounds in 64 bits.
    """

    total: Int32[Array, "*M"] | Float32[Array, "*M"]
    high: Int32[Stored, "*M"] = np.int32(0)

    @property
    def number(self) -> Float32[Array, "*M"]:
        """The value in float32, to compute with."""
        return jnp.float32(self.total) + jnp.float32(self.high) * 2.0**BASE_BITS

    def plus(self, other: "Sum") -> "Sum":
        """The sum of two Sums."""
        if jnp.issubdtype(jnp.result_type(self.total, other.total), jnp.inexact):
            return self._replace(total=self.number + other.number, high=np.int32(0))
        (a, b), highs = zip(*(_split(one.total) for one in (self, other)), strict=True)
        # XLA would fuse a chain of sums into one loop, in which each sum contains copies of all sums before it: 2^n for n sums.
        total, carry = _split(a + b)
        total, high = jax.lax.optimization_barrier((total, self.high + other.high + sum(highs) + carry))
        return self._replace(total=total, high=high)

    def __int__(self) -> int:
        """The exact sum as a Python integer, on the host."""
        return int(np.sum(values(self)))


def _split(total: Shaped[Array, "*M"]) -> tuple[Shaped[Array, "*M"], Shaped[Array, "*M"]]:
    """The lowest 30 bits of whole numbers >= 0, and the others."""
    return total & (2**BASE_BITS - 1), total >> BASE_BITS


class PerClient(NamedTuple):
    """A value of each client, an array of any shape that is never added up.

    It is computed in the rounds that `diagnostics.clients_every` records. Metrics named `example/...` are shown by
    `Experiment.inspect` only.
    """

    value: Shaped[Array, "*_"]


Metrics = Mapping[str, Mean | Sum]
ClientMetrics = Mapping[str, Mean | Sum | PerClient]


def mean(values: Shaped[Array, "*shape"] | Number, where: Bool[Array, "*shape"] | bool | None = None) -> Mean:
    """The mean of `values` over the entries where `where` is true (None: all); other entries may be NaN.

    >>> reduce({"client/loss": mean(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))})
    {'client/loss': 2.0}
    """
    values = jnp.asarray(values, jnp.float32)
    where = jnp.ones(values.shape, bool) if where is None else where
    return Mean(jnp.sum(jnp.where(where, values, 0.0)), jnp.sum(where, dtype=jnp.float32))


def whole(number: int) -> Sum:
    """A Python integer in [0, 2^60) as a Sum.

    >>> int(whole(2**40).plus(whole(1)))
    1099511627777
    """
    return Sum(*map(jnp.int32, (number % 2**BASE_BITS, number // 2**BASE_BITS)))


def added(numbers: Int32[Array, " n"]) -> Sum:
    """The exact sum of integers >= 0, as a Sum."""
    return jax.lax.scan(lambda total, number: (total.plus(Sum(number)), None), whole(0), numbers)[0]


def add(first: Metrics, second: Metrics) -> Metrics:
    """The metrics of two parts of a training, added up name by name."""

    def both(one: Any, other: Any) -> Any:
        return one.plus(other) if isinstance(one, Sum) else one + other

    return jax.tree.map(both, first, second, is_leaf=lambda x: isinstance(x, Sum))


def values(metric: Sum) -> Shaped[Stored, "*M"]:
    """The numbers of a Sum on the host, int64 or float64."""
    total = np.asarray(metric.total)
    if total.dtype.kind not in "iub":
        return total.astype(np.float64)
    return total.astype(np.int64) + (np.asarray(metric.high, np.int64) << BASE_BITS)


def num_bytes(tree: PyTree) -> int:
    """The bytes of a tree's arrays, by their shapes and dtypes, also while tracing."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def reduce(metrics: ClientMetrics) -> dict[str, float | int]:
    """Python numbers of metrics on the host, stacked over clients or not; a Mean of weight 0 and a PerClient are left out."""
    found: dict[str, float | int] = {}
    for name, metric in metrics.items():
        if isinstance(metric, PerClient):
            continue
        if isinstance(metric, Sum):
            found[name] = np.sum(values(metric)).item()
        elif (weight := np.sum(metric.weight, dtype=np.float64).item()) != 0:
            found[name] = np.sum(metric.total, dtype=np.float64).item() / weight
    return found
