"""Mixup: convex combinations of two batches and of their losses (Zhang et al. 2018), as SemiFL uses it."""

import chex
import jax
from jaxtyping import Float

from fedjax_ssl.arrays import Array, Key, Labels, Logits, Number, PerExample, Scalar
from fedjax_ssl.ssl import losses


def ratio(key: Key, alpha: float) -> Scalar:
    """The mixing ratio lambda ~ Beta(alpha, alpha) of a whole batch."""
    return jax.random.beta(key, alpha, alpha)


def mix(first: Float[Array, "B ..."], second: Float[Array, "B ..."], ratio: Number) -> Float[Array, "B ..."]:
    """The mixtures lambda first + (1 - lambda) second of two batches of inputs, lambda = `ratio`.

    >>> import jax.numpy as jnp
    >>> mix(jnp.array([[0.0, 8.0]]), jnp.array([[4.0, 0.0]]), 0.75).tolist()
    [[1.0, 6.0]]
    """
    chex.assert_equal_shape([first, second])
    return ratio * first + (1.0 - ratio) * second


def cross_entropy(logits: Logits, first: Labels, second: Labels, ratio: Number) -> PerExample:
    """The loss of mixed inputs, lambda CE(first) + (1 - lambda) CE(second), from the labels of both inputs of `mix`."""
    return ratio * losses.cross_entropy(logits, first) + (1.0 - ratio) * losses.cross_entropy(logits, second)
