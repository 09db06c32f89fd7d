"""Batch normalization that ignores padded examples, and what methods do with its statistics.

In training a network normalizes by its batch and returns the batch's statistics, a pytree with leaves `mean` and `var`. Methods
drop them ((FL)^2 and SemiFL), average them as PyTorch does (`running`), or average them over a pass through the data (static
batch norm: `start`, `add`, `finish`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Float32

from fedjax_ssl.arrays import Array, Mask, Number, PyTree

Channels = Float32[Array, " F"]


def moments(x: Float[Array, "B *rest F"], real: Bool[Array, "*_"]) -> tuple[Channels, Channels, Float32[Array, ""]]:
    """Mean, biased variance and number of values of each channel over the `real` examples; zeros if there are none."""
    x = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - 1))
    count = jnp.sum(jnp.broadcast_to(real, (*x.shape[:-1], 1)), dtype=jnp.float32)
    divisor = jnp.maximum(count, 1.0)
    mean = jnp.sum(jnp.where(real, x, 0.0), axes) / divisor
    var = jnp.sum(jnp.where(real, jnp.square(x - mean), 0.0), axes) / divisor
    return mean, var, count


class Norm(NamedTuple):
    """One layer of batch norm: its statistics, and its scale and bias, which may be 1 and 0."""

    mean: Channels
    var: Channels
    scale: Channels | float
    bias: Channels | float
    epsilon: float


def normalize(
    x: Float[Array, "B *rest F"], mask: Mask | None, layer: Norm, *, train: bool
) -> tuple[Float[Array, "B *rest F"], Channels, Channels]:
    """Batch norm, y = scale (x - mean) / sqrt(var + epsilon) + bias, and the statistics to report: (y, mean, var).

    In training mean and (biased) var are those of the batch's real examples. The statistics to report are then the batch's mean
    and unbiased variance, as PyTorch stores them, without gradient; in evaluation, or if no example is real, the layer's.
    Padded examples become zeros: scaled by a variance that is not theirs, layer after layer, they could overflow. Without a
    mask all examples are real. Training has gradients in reverse mode only.
    """
    real = jnp.ones((), bool) if mask is None else mask.reshape(mask.shape + (1,) * (x.ndim - 1))
    stored = lax.stop_gradient((layer.mean, layer.var))
    scale, bias = (jnp.broadcast_to(jnp.asarray(value, jnp.float32), x.shape[-1:]) for value in (layer.scale, layer.bias))
    if not train:
        return _normalized(x, real, *stored, scale, bias, layer.epsilon), *stored
    y, mean, var, count = _by_batch(x, real, scale, bias, layer.epsilon)
    mean, unbiased = lax.stop_gradient((mean, var * count / jnp.maximum(count - 1.0, 1.0)))
    return y, jnp.where(count > 0, mean, stored[0]), jnp.where(count > 0, unbiased, stored[1])


def _normalized(x: Array, real: Array, mean: Array, var: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    y = (x.astype(jnp.float32) - mean) * (scale * lax.rsqrt(var + epsilon)) + bias
    return jnp.where(real, y, 0.0).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _by_batch(x: Array, real: Array, scale: Array, bias: Array, epsilon: float) -> tuple[Array, Array, Array, Array]:
    """What x is normalized by its own moments, and these, through which no gradient flows."""
    return _by_batch_forward(x, real, scale, bias, epsilon)[0]


def _by_batch_forward(
    x: Array, real: Array, scale: Array, bias: Array, epsilon: float
) -> tuple[tuple[Array, Array, Array, Array], tuple[Array, ...]]:
    mean, var, count = moments(x, real)
    y = _normalized(x, real, mean, var, scale, bias, epsilon)
    return (y, mean, var, count), (x, real, mean, var, count, scale)


def _by_batch_backward(
    epsilon: float, residuals: tuple[Array, ...], cotangents: tuple[Array, ...]
) -> tuple[Array, None, Array, Array]:
    """The gradients for x, scale and bias, in two passes over x and the cotangent g of y; autodiff takes a dozen.

        dx = scale / sqrt(var + epsilon) (g - mean(g) - z mean(g z)),    dscale = sum(g z),    dbias = sum(g)

    with z = (x - mean) / sqrt(var + epsilon), and means and sums over the real values.
    """
    x, real, mean, var, count, scale = residuals
    g = jnp.where(real, cotangents[0].astype(jnp.float32), 0.0)
    centered = jnp.where(real, x.astype(jnp.float32) - mean, 0.0)
    axes, divisor, factor = tuple(range(x.ndim - 1)), jnp.maximum(count, 1.0), lax.rsqrt(var + epsilon)
    d_scale, d_bias = factor * jnp.sum(g * centered, axes), jnp.sum(g, axes)
    dx = scale * factor * (g - d_bias / divisor - centered * (factor * d_scale / divisor))
    return jnp.where(real, dx, 0.0).astype(x.dtype), None, d_scale, d_bias


_by_batch.defvjp(_by_batch_forward, _by_batch_backward)


def running(stats: PyTree, batch_stats: PyTree, momentum: Number = 0.1) -> PyTree:
    """PyTorch's running averages after one more batch, (1 - momentum) stats + momentum batch_stats.

    What Flax calls momentum is 1 minus this one.
    """
    return jax.tree.map(lambda old, new: (1.0 - momentum) * old + momentum * new, stats, batch_stats)


class Cumulative(NamedTuple):
    """A weighted average of statistics, not yet divided: the sum over batches, and the sum of their weights."""

    total: PyTree
    weight: Float32[Array, ""]


def start(stats: PyTree) -> Cumulative:
    """The average of no batch, for statistics of this structure."""
    return Cumulative(jax.tree.map(jnp.zeros_like, stats), jnp.zeros((), jnp.float32))


def add(cumulative: Cumulative, batch_stats: PyTree, weight: Number) -> Cumulative:
    """The average with one more batch in it, of `weight` >= 0; 0 leaves the batch out, whatever it holds."""
    weight = jnp.asarray(weight, jnp.float32)
    total = jax.tree.map(lambda a, b: jnp.where(weight > 0, a + weight * b, a), cumulative.total, batch_stats)
    return Cumulative(total, cumulative.weight + weight)


def finish(cumulative: Cumulative, fallback_stats: PyTree) -> PyTree:
    """sum_b w_b stats_b / sum_b w_b, the static batch-norm statistics; `fallback_stats` where all weights were 0."""
    divisor = jnp.where(cumulative.weight > 0, cumulative.weight, 1.0)
    return jax.tree.map(
        lambda total, fallback: jnp.where(cumulative.weight > 0, total / divisor, fallback), cumulative.total, fallback_stats
    )
