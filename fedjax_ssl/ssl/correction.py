"""SAGE's pseudo-labels (Liu et al. 2025): the local and the global model's label, mixed by how far their confidences are apart.

Equations are those of the authors' released code; the paper's text was not at hand.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Float, Float32

from fedjax_ssl.arrays import Array, Logits, Mask, Number, PerExample, Probs

KAPPA = 13.862943611198906
"""ln 2 / 0.05: a difference of 0.05 between the confidences halves the weight of the local label."""


class SoftTargets(NamedTuple):
    """Targets that sum to 1, without gradient, and which of the examples count."""

    probs: Float32[Array, "B C"]
    used: Mask


def local_weight(local: Float[Array, " *B"], other: Float[Array, " *B"], kappa: Number = KAPPA) -> Float32[Array, " *B"]:
    """The weight lambda = exp(-kappa |c_l - c_g|) of the local model's label, by both models' confidences.

    >>> print(local_weight(jnp.array([0.9, 0.9, 0.9]), jnp.array([0.9, 0.85, 0.6])).round(3))
    [1.    0.5   0.016]
    """
    difference = jnp.clip(jnp.abs(local - other), 1e-6, 1.0)
    return jnp.exp(-kappa * difference)


def soft_targets(local: Probs, other: Probs, mask: Mask, threshold: Number, kappa: Number = KAPPA) -> SoftTargets:
    """Targets from the softmax outputs [B, C] of the local and the global model on the same weak views.

        y* = lambda onehot(y_l) + (1 - lambda) onehot(y_g)  where c_l >= threshold;  onehot(y_g) elsewhere

    y and c are the label and the confidence of each model. An example counts if c_l or c_g reaches the threshold.
    """
    local, other = map(jax.lax.stop_gradient, (local, other))
    confidences = jnp.max(local, axis=1), jnp.max(other, axis=1)
    labels = (jax.nn.one_hot(jnp.argmax(probs, axis=1), probs.shape[1]) for probs in (local, other))
    of_local, of_other = labels
    weight = jnp.where(confidences[0] >= threshold, local_weight(*confidences, kappa), 0.0)[:, None]
    used = mask & ((confidences[0] >= threshold) | (confidences[1] >= threshold))
    return SoftTargets(weight * of_local + (1 - weight) * of_other, used)


def divergence(targets: Probs, logits: Logits) -> PerExample:
    """KL(targets || softmax(logits)), in nats, for targets that may be 0.

    >>> print(divergence(jnp.array([[1.0, 0.0], [0.5, 0.5]]), jnp.zeros((2, 2))).round(3))
    [0.693 0.   ]
    """
    return jnp.sum(xlogy(targets, targets) - targets * jax.nn.log_softmax(logits.astype(jnp.float32)), axis=-1)
