"""Losses per example, and the masked mean that reduces them; masked quantiles."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy of hard labels: -log softmax(logits)[label], in nats.

    (FL)^2, Eqs. 2-4 before their mean.

    Args:
        logits: float [B, C].
        labels: int [B], in [0, C).

    Returns:
        float32 [B], >= 0.
    """
    chex.assert_rank([logits, labels], [2, 1])
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


def kl_divergence(target_logits: jax.Array, logits: jax.Array) -> jax.Array:
    """KL(softmax(target_logits) || softmax(logits)), in nats; no gradient reaches the target.

    (FL)^2, Eq. 13: the target is the clean model's output Q, the other side the perturbed model's Q*. FedSiam, Eq. 5 before
    its mean: the target is the target network's output. FedLabel, Eq. 6 in the usual order: the target is the other expert's.

    Args:
        target_logits: float [B, C].
        logits: float [B, C].

    Returns:
        float32 [B], >= 0 up to rounding.
    """
    target, output = _log_probs(target_logits, logits)
    return jnp.sum(jnp.exp(target) * (target - output), axis=-1)


def reverse_kl(target_logits: jax.Array, logits: jax.Array) -> jax.Array:
    """KL(softmax(logits) || softmax(target_logits)), in nats; no gradient reaches the target.

    FedLabel, Eq. 6 in the order in which it is printed.

    Args:
        target_logits: float [B, C].
        logits: float [B, C].

    Returns:
        float32 [B], >= 0 up to rounding.
    """
    target, output = _log_probs(target_logits, logits)
    return jnp.sum(jnp.exp(output) * (output - target), axis=-1)


def _log_probs(target_logits: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The log-softmax of both, float32 [B, C], the target's without gradient."""
    chex.assert_equal_shape([target_logits, logits])
    target = jax.nn.log_softmax(jax.lax.stop_gradient(target_logits).astype(jnp.float32))
    return target, jax.nn.log_softmax(logits.astype(jnp.float32))


def sharpened_kl(weak_logits: jax.Array, strong_logits: jax.Array, temperature: float) -> jax.Array:
    """UDA's consistency loss, KL(softmax(z_weak / T) || softmax(z_strong)), in nats; no gradient reaches the weak side.

    Xie et al. 2020, Eq. 1 with the sharpened target of Section 3.2.

    Args:
        weak_logits: float [B, C].
        strong_logits: float [B, C].
        temperature: T > 0; under 1 it sharpens.

    Returns:
        float32 [B], >= 0 up to rounding.
    """
    return kl_divergence(weak_logits.astype(jnp.float32) / temperature, strong_logits)


def squared_error(target_logits: jax.Array, logits: jax.Array) -> jax.Array:
    """Squared Euclidean distance of softmax outputs, summed over classes; no gradient reaches the target.

    FedSiam, Eq. 4 before its mean.

    Args:
        target_logits: float [B, C].
        logits: float [B, C].

    Returns:
        float32 [B], in [0, 2].
    """
    chex.assert_equal_shape([target_logits, logits])
    target = jax.nn.softmax(jax.lax.stop_gradient(target_logits).astype(jnp.float32))
    return jnp.sum(jnp.square(jax.nn.softmax(logits.astype(jnp.float32)) - target), axis=-1)


def negative_cosine(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """-cos of the angle between an output and its target; no gradient reaches the target (BYOL's loss is 2 plus twice this).

    Args:
        outputs: float [B, F].
        targets: float [B, F].

    Returns:
        float32 [B] in [-1, 1]; 0, with a zero gradient, where either vector is 0.
    """
    chex.assert_equal_shape([outputs, targets])
    return -jnp.sum(_unit(outputs) * jax.lax.stop_gradient(_unit(targets)), axis=-1)


def _unit(vectors: jax.Array) -> jax.Array:
    """float32 [B, F] / their Euclidean lengths; zeros stay zeros."""
    vectors = vectors.astype(jnp.float32)
    squared = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jnp.where(squared > 0, jax.lax.rsqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)


def masked_mean(values: jax.Array, where: jax.Array, denominator: jax.Array | None = None) -> jax.Array:
    """Mean of `values` over `where`; 0 where nothing is selected, with a zero gradient.

    Args:
        values: float [B].
        where: bool [B]; entries outside may be NaN in value, but must be finite in gradient.
        denominator: scalar to divide by instead of the number of selected entries; 0: the result is 0.

    Returns:
        float32 scalar.
    """
    chex.assert_equal_shape([values, where])
    divisor = jnp.asarray(jnp.sum(where) if denominator is None else denominator, jnp.float32)
    total = jnp.sum(jnp.where(where, values, 0.0))
    return jnp.where(divisor > 0, total / jnp.where(divisor > 0, divisor, 1.0), 0.0)


def masked_quantile(values: jax.Array, where: jax.Array, q: float | jax.Array) -> jax.Array:
    """The q-quantile of `values` over `where`, interpolated linearly as NumPy does; infinity where nothing is selected.

    Args:
        values: float32, any shape; entries outside may be NaN.
        where: bool of the same shape.
        q: scalar in [0, 1].

    Returns:
        float32 scalar.
    """
    chex.assert_equal_shape([values, where])
    ordered = jnp.sort(jnp.where(where, values, jnp.inf), axis=None)
    last = jnp.sum(where) - 1
    position = q * last
    below = jnp.clip(jnp.floor(position).astype(jnp.int32), 0)
    low, high = ordered[below], ordered[jnp.clip(below + 1, 0, last)]
    return jnp.where(last >= 0, low + (position - below) * (high - low), jnp.inf)
