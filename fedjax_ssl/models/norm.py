"""Batch normalization that padded examples cannot touch, and the policies for its statistics.

A network is a pure function: in training it normalizes by the batch and hands back the batch's statistics; what becomes of them
is the method's choice, made with the functions below on the statistics' pytree (leaves `mean` and `var`, float32 [F]):

- batch statistics with tracking off (training in (FL)^2 and SemiFL): drop them;
- PyTorch's running averages: `running`;
- static batch norm (sBN): a cumulative average over a pass through the data: `start`, `add`, `finish`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

PyTree = Any


def moments(x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, biased variance and number of values of each channel over the real examples; zeros where there is none.

    Args:
        x: [B, ..., F], any float dtype.
        real: bool, broadcastable to x, the same for all of an example's values.

    Returns:
        float32 [F], [F] and a scalar: the number of real examples times H W.
    """
    x = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - 1))
    count = jnp.sum(jnp.broadcast_to(real, (*x.shape[:-1], 1)), dtype=jnp.float32)
    divisor = jnp.maximum(count, 1.0)
    mean = jnp.sum(jnp.where(real, x, 0.0), axes) / divisor
    var = jnp.sum(jnp.where(real, jnp.square(x - mean), 0.0), axes) / divisor
    return mean, var, count


class BatchNorm(nn.Module):
    """Batch normalization: y = scale (x - mean) / sqrt(var + epsilon) + bias, with parameters `scale` and `bias`, float32 [F].

    In training, mean and (biased) var are those of the batch's real examples, and the collection `batch_stats` receives the
    batch's mean and unbiased variance, as PyTorch stores them, without gradient. A batch without real examples reports the
    statistics it was given. In evaluation, mean and var are read from `batch_stats`. Padded examples come out as zeros: scaled
    by a variance that is not theirs, layer after layer, they could overflow.

    Attributes:
        epsilon: added to the variance.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None, train: bool) -> jax.Array:
        """[B, ..., F] -> the same shape and dtype; mask bool [B], which examples are real (None: all)."""
        features = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, features, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, features, jnp.float32)
        stored_mean = self.variable("batch_stats", "mean", jnp.zeros, features, jnp.float32)
        stored_var = self.variable("batch_stats", "var", jnp.ones, features, jnp.float32)
        real = jnp.ones((), bool) if mask is None else mask.reshape(mask.shape + (1,) * (x.ndim - 1))
        if train:
            mean, var, count = moments(x, real)
            unbiased = var * count / jnp.maximum(count - 1.0, 1.0)
            stored_mean.value = lax.stop_gradient(jnp.where(count > 0, mean, stored_mean.value))
            stored_var.value = lax.stop_gradient(jnp.where(count > 0, unbiased, stored_var.value))
        else:
            mean, var = lax.stop_gradient((stored_mean.value, stored_var.value))
        y = (x.astype(jnp.float32) - mean) * (scale * lax.rsqrt(var + self.epsilon)) + bias
        return jnp.where(real, y, 0.0).astype(x.dtype)


def running(stats: PyTree, batch_stats: PyTree, momentum: float | jax.Array = 0.1) -> PyTree:
    """PyTorch's running averages after one more batch: (1 - momentum) stats + momentum batch_stats.

    Args:
        stats: the statistics so far.
        batch_stats: the same structure, what the network returned in training (mean and unbiased variance).
        momentum: the new batch's share (PyTorch's convention; Flax calls 1 minus it the momentum).
    """
    return jax.tree.map(lambda old, new: (1.0 - momentum) * old + momentum * new, stats, batch_stats)


class Cumulative(NamedTuple):
    """A weighted average of statistics in the making.

    Attributes:
        total: statistics' pytree, the weighted sum over batches.
        weight: float32 scalar, the sum of weights.
    """

    total: PyTree
    weight: jax.Array


def start(stats: PyTree) -> Cumulative:
    """The average of no batch, for statistics of this structure."""
    return Cumulative(jax.tree.map(jnp.zeros_like, stats), jnp.zeros((), jnp.float32))


def add(cumulative: Cumulative, batch_stats: PyTree, weight: float | jax.Array) -> Cumulative:
    """The average with one more batch in it.

    Args:
        cumulative: the average so far.
        batch_stats: what the network returned in training (mean and unbiased variance).
        weight: float32 scalar >= 0: 1 for each batch as PyTorch does with `momentum=None`, or the batch's number of real
            examples; 0 leaves the batch out, whatever it holds.
    """
    weight = jnp.asarray(weight, jnp.float32)
    total = jax.tree.map(lambda a, b: jnp.where(weight > 0, a + weight * b, a), cumulative.total, batch_stats)
    return Cumulative(total, cumulative.weight + weight)


def finish(cumulative: Cumulative, fallback_stats: PyTree) -> PyTree:
    """sum_b w_b stats_b / sum_b w_b, the static batch-norm statistics; `fallback_stats` where all weights were 0."""
    divisor = jnp.where(cumulative.weight > 0, cumulative.weight, 1.0)
    return jax.tree.map(
        lambda total, fallback: jnp.where(cumulative.weight > 0, total / divisor, fallback), cumulative.total, fallback_stats
    )
