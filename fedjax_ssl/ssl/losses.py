"""Losses per example, and the masked mean that reduces them; masked quantiles."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32

from fedjax_ssl.arrays import Array, Labels, Logits, Mask, Number, PerExample, Scalar


def cross_entropy(logits: Logits, labels: Labels) -> PerExample:
    """Cross-entropy of hard labels: -log softmax(logits)[label], in nats ((FL)^2, Eqs. 2-4 before their mean).

    >>> [f"{loss:.3f}" for loss in cross_entropy(jnp.array([[0.0, 0.0], [0.0, 1.0]]), jnp.array([0, 1]))]
    ['0.693', '0.313']
    """
    chex.assert_rank([logits, labels], [2, 1])
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


def kl_divergence(target_logits: Logits, logits: Logits) -> PerExample:
    """KL(softmax(target) || softmax(logits)), in nats; no gradient reaches the target ((FL)^2, Eq. 13; FedSiam, Eq. 5).

    >>> print(kl_divergence(jnp.array([[0.0, 0.0], [30.0, 0.0]]), jnp.zeros((2, 2))).round(3))
    [0.    0.693]
    """
    chex.assert_equal_shape([target_logits, logits])
    target = jax.nn.log_softmax(jax.lax.stop_gradient(target_logits).astype(jnp.float32))
    output = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.sum(jnp.exp(target) * (target - output), axis=-1)


def sharpened_kl(weak_logits: Logits, strong_logits: Logits, temperature: float) -> PerExample:
    """UDA's KL(softmax(z_weak / T) || softmax(z_strong)), in nats; no gradient reaches z_weak (Xie et al. 2020, Eq. 1)."""
    return kl_divergence(weak_logits.astype(jnp.float32) / temperature, strong_logits)


def squared_error(target_logits: Logits, logits: Logits) -> PerExample:
    """Squared Euclidean distance of softmax outputs, in [0, 2]; no gradient reaches the target (FedSiam, Eq. 4).

    >>> squared_error(jnp.array([[50.0, 0.0]]), jnp.array([[0.0, 50.0]])).tolist()
    [2.0]
    """
    chex.assert_equal_shape([target_logits, logits])
    target = jax.nn.softmax(jax.lax.stop_gradient(target_logits).astype(jnp.float32))
    return jnp.sum(jnp.square(jax.nn.softmax(logits.astype(jnp.float32)) - target), axis=-1)


def negative_cosine(outputs: Float[Array, "B F"], targets: Float[Array, "B F"]) -> PerExample:
    """-cos of the angle between an output and its target, 0 if either is 0; no gradient reaches the target (BYOL, FedCon)."""
    chex.assert_equal_shape([outputs, targets])
    return -jnp.sum(unit(outputs) * jax.lax.stop_gradient(unit(targets)), axis=-1)


def unit(vectors: Float[Array, "B F"]) -> Float32[Array, "B F"]:
    """Vectors divided by their Euclidean lengths; zeros stay zeros."""
    vectors = vectors.astype(jnp.float32)
    squared = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jnp.where(squared > 0, jax.lax.rsqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)


def masked_mean(values: Float[Array, " B"], where: Mask, denominator: Number | None = None) -> Scalar:
    """The mean of `values` over `where`; 0, with a zero gradient, if nothing is selected.

    Values outside of `where` may be NaN, but their gradients must be finite. A `denominator` replaces the number of selected
    entries; if it is 0, so is the result.

    >>> values, where = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])
    >>> float(masked_mean(values, where)), float(masked_mean(values, where, denominator=8))
    (2.0, 0.5)
    """
    chex.assert_equal_shape([values, where])
    divisor = jnp.asarray(jnp.sum(where) if denominator is None else denominator, jnp.float32)
    total = jnp.sum(jnp.where(where, values, 0.0))
    return jnp.where(divisor > 0, total / jnp.where(divisor > 0, divisor, 1.0), 0.0)


def masked_quantile(values: Float[Array, "*shape"], where: Bool[Array, "*shape"], q: Number) -> Scalar:
    """The q-quantile of `values` over `where`, interpolated linearly; infinity if nothing is selected. Other values may be NaN.

    >>> float(masked_quantile(jnp.array([4.0, 0.0, 1.0, 9.0]), jnp.array([True, True, True, False]), 0.75))
    2.5
    """
    chex.assert_equal_shape([values, where])
    ordered = jnp.sort(jnp.where(where, values, jnp.inf), axis=None)
    last = jnp.sum(where) - 1
    position = q * last
    below = jnp.clip(jnp.floor(position).astype(jnp.int32), 0)
    low, high = ordered[below], ordered[jnp.clip(below + 1, 0, last)]
    return jnp.where(last >= 0, low + (position - below) * (high - low), jnp.inf)
