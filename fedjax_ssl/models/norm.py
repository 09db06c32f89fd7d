"""Batch normalization that ignores padded examples, and what methods do with its statistics.

In training a network normalizes by its batch and returns the batch's statistics, a pytree with leaves `mean` and `var`. Methods
drop them ((FL)^2 and SemiFL), average them as PyTorch does (`running`), or average them over a pass through the data (static
batch norm: `local.server.with_statistics`).
"""

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
    mask all examples are real.
    """
    real = jnp.ones((), bool) if mask is None else mask.reshape(mask.shape + (1,) * (x.ndim - 1))
    mean, var = lax.stop_gradient((layer.mean, layer.var))
    reported = mean, var
    if train:
        mean, var, count = moments(x, real)
        unbiased = var * count / jnp.maximum(count - 1.0, 1.0)
        reported = lax.stop_gradient((jnp.where(count > 0, mean, layer.mean), jnp.where(count > 0, unbiased, layer.var)))
    y = (x.astype(jnp.float32) - mean) * (layer.scale * lax.rsqrt(var + layer.epsilon)) + layer.bias
    return jnp.where(real, y, 0.0).astype(x.dtype), *reported


def running(stats: PyTree, batch_stats: PyTree, momentum: Number = 0.1) -> PyTree:
    """PyTorch's running averages after one more batch, (1 - momentum) stats + momentum batch_stats.

    What Flax calls momentum is 1 minus this one.
    """
    return jax.tree.map(lambda old, new: (1.0 - momentum) * old + momentum * new, stats, batch_stats)
