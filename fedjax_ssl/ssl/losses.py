"""Losses per example, and the masked mean that reduces them; masked quantiles."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32

from fedjax_ssl.arrays import Array, Labels, Logits, Mask, Number, PerExample, Scalar


def cross_entropy(logits: Logits, labels: Labels) -> PerExample:
    """Cross-entropy of hard labels: -log softmax(logits)[label], in nats ((FL)^2, Eqs. 2-4 before their mean)."""
    chex.assert_rank([logits, labels], [2, 1])
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]


def kl_divergence(target_logits: Logits, logits: Logits) -> PerExample:
    """KL(softmax(target_logits) || softmax(logits)), in nats; no gradient reaches the target.

    (FL)^2, Eq. 13: the target is the clean model's output Q, the other side the perturbed model's Q*. FedSiam, Eq. 5 before
    its mean: the target is the target network's output. FedLabel, Eq. 6 in the usual order: the target is the other expert's.
    """
    target, output = _log_probs(target_logits, logits)
    return jnp.sum(jnp.exp(target) * (target - output), axis=-1)


def reverse_kl(target_logits: Logits, logits: Logits) -> PerExample:
    """KL(softmax(logits) || softmax(target_logits)), in nats; no gradient reaches the target (FedLabel, Eq. 6 as printed)."""
    target, output = _log_probs(target_logits, logits)
    return jnp.sum(jnp.exp(output) * (output - target), axis=-1)


def _log_probs(target_logits: Logits, logits: Logits) -> tuple[Float32[Array, "B C"], Float32[Array, "B C"]]:
    """The log-softmax of both, the target's without gradient."""
    chex.assert_equal_shape([target_logits, logits])
    target = jax.nn.log_softmax(jax.lax.stop_gradient(target_logits).astype(jnp.float32))
    return target, jax.nn.log_softmax(logits.astype(jnp.float32))


def sharpened_kl(weak_logits: Logits, strong_logits: Logits, temperature: float) -> PerExample:
    """UDA's consistency loss, KL(softmax(z_weak / T) || softmax(z_strong)), in nats; no gradient reaches the weak side.

    Xie et al. 2020, Eq. 1 with the target of Section 3.2, which a temperature T < 1 sharpens.
    """
    return kl_divergence(weak_logits.astype(jnp.float32) / temperature, strong_logits)


def squared_error(target_logits: Logits, logits: Logits) -> PerExample:
    """Squared Euclidean distance of softmax outputs, in [0, 2]; no gradient reaches the target (FedSiam, Eq. 4)."""
    chex.assert_equal_shape([target_logits, logits])
    target = jax.nn.softmax(jax.lax.stop_gradient(target_logits).astype(jnp.float32))
    return jnp.sum(jnp.square(jax.nn.softmax(logits.astype(jnp.float32)) - target), axis=-1)


def negative_cosine(outputs: Float[Array, "B F"], targets: Float[Array, "B F"]) -> PerExample:
    """-cos of the angle between an output and its target; no gradient reaches the target (BYOL's loss is 2 plus twice this).

    It is 0, with a zero gradient, where either vector is 0.
    """
    chex.assert_equal_shape([outputs, targets])
    return -jnp.sum(_unit(outputs) * jax.lax.stop_gradient(_unit(targets)), axis=-1)


def _unit(vectors: Float[Array, "B F"]) -> Float32[Array, "B F"]:
    """Vectors divided by their Euclidean lengths; zeros stay zeros."""
    vectors = vectors.astype(jnp.float32)
    squared = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jnp.where(squared > 0, jax.lax.rsqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)


def masked_mean(values: Float[Array, " B"], where: Mask, denominator: Number | None = None) -> Scalar:
    """Mean of `values` over `where`; 0 where nothing is selected, with a zero gradient.

    Args:
        values: entries outside of `where` may be NaN, but their gradients must be finite.
        where: which entries count.
        denominator: divides in place of the number of selected entries; if it is 0, so is the result.
    """
    chex.assert_equal_shape([values, where])
    divisor = jnp.asarray(jnp.sum(where) if denominator is None else denominator, jnp.float32)
    total = jnp.sum(jnp.where(where, values, 0.0))
    return jnp.where(divisor > 0, total / jnp.where(divisor > 0, divisor, 1.0), 0.0)


def masked_quantile(values: Float[Array, "*shape"], where: Bool[Array, "*shape"], q: Number) -> Scalar:
    """The q-quantile of `values` over `where`, q in [0, 1], interpolated linearly as NumPy does; infinity if none is selected.

    Entries outside of `where` may be NaN.
    """
    chex.assert_equal_shape([values, where])
    ordered = jnp.sort(jnp.where(where, values, jnp.inf), axis=None)
    last = jnp.sum(where) - 1
    position = q * last
    below = jnp.clip(jnp.floor(position).astype(jnp.int32), 0)
    low, high = ordered[below], ordered[jnp.clip(below + 1, 0, last)]
    return jnp.where(last >= 0, low + (position - below) * (high - low), jnp.inf)
