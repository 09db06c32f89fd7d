"""Twin-sight's losses of features (Zhang et al. 2024, as its released code has them): instances, and their neighborhoods."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32

from fedjax_ssl.arrays import Array, Mask, Number, Scalar
from fedjax_ssl.ssl import losses


def contrastive(first: Float[Array, "B P"], second: Float[Array, "B P"], mask: Mask, temperature: Number) -> Scalar:
    """NT-Xent (Chen et al. 2020, Eq. 1): the mean over both views of all examples in `mask`; 0 without one.

        -log(exp(cos(z_i, z_j) / T) / sum_{k != i} exp(cos(z_i, z_k) / T))

    j is the other view of i, and k any view of an example in `mask`. Examples outside of it may be NaN.
    """
    number, real = len(mask), jnp.concatenate([mask, mask])
    views = losses.unit(jnp.where(real[:, None], jnp.concatenate([first, second]), 0.0))
    cosines = views @ views.T / temperature
    others = real & ~jnp.eye(2 * number, dtype=bool)
    total = jax.nn.logsumexp(jnp.where(others, cosines, -1e9), axis=1)
    positive = jnp.diagonal(jnp.roll(cosines, -number, axis=1))
    return losses.masked_mean(total - positive, real)


def neighborhood(first: Float[Array, "B F"], second: Float[Array, "B F"], mask: Mask, divisor: Number) -> Scalar:
    """The squared difference of two networks' cosines, sum_ij (cos(h_i, h_j) - cos(h'_i, h'_j))^2 / divisor.

    The sum is over pairs of examples in `mask`, whose features are h and h'. It is 0 where the divisor is.
    """
    one, other = (_cosines(features, mask) for features in (first, second))
    return losses.masked_mean(jnp.square(one - other).ravel(), (mask[:, None] & mask).ravel(), divisor)


def _cosines(features: Float[Array, "B F"], mask: Mask) -> Float32[Array, "B B"]:
    """The cosines of all pairs of features; 0 for those outside of `mask`, which may be NaN."""
    features = losses.unit(jnp.where(mask[:, None], features, 0.0))
    return features @ features.T
