"""Pseudo-labels, and how good they are."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.metrics import Mean, Metrics


class PseudoLabels(NamedTuple):
    """Hard pseudo-labels of a set of examples.

    Attributes:
        label: int32 [n], argmax_c q_i(c).
        confidence: float32 [n], max_c q_i(c).
    """

    label: jax.Array
    confidence: jax.Array


def harden(probs: jax.Array) -> PseudoLabels:
    """Hard pseudo-labels of softmax outputs [n, C]; the lowest class wins a tie."""
    return PseudoLabels(jnp.argmax(probs, axis=-1).astype(jnp.int32), jnp.max(probs, axis=-1))


def diagnostics(label: jax.Array, truth: jax.Array, accepted: jax.Array, mask: jax.Array) -> Metrics:
    """The pseudo-label diagnostics of (FL)^2's Figure 3.

    label ratio = accepted / all; pseudo-label accuracy = correct / accepted; correct (wrong) ratio = accepted and correct
    (wrong) / all; correct-wrong ratio = correct / wrong. Summed over a cohort, then divided.

    Args:
        label: int32 [n], pseudo-labels.
        truth: int32 [n], true labels.
        accepted: bool [n], which pseudo-labels train.
        mask: bool [n], which rows are real examples.

    Returns:
        Metrics under `diagnostics/`; fractions in [0, 1] but for `correct_wrong_ratio`, >= 0, which has no value where
        nothing is wrong.
    """
    accepted = accepted & mask
    total, used = (jnp.sum(m, dtype=jnp.float32) for m in (mask, accepted))
    correct = jnp.sum(accepted & (label == truth), dtype=jnp.float32)
    wrong = used - correct
    return {
        "diagnostics/label_ratio": Mean(used, total),
        "diagnostics/pseudo_label_accuracy": Mean(correct, used),
        "diagnostics/correct_ratio": Mean(correct, total),
        "diagnostics/wrong_ratio": Mean(wrong, total),
        "diagnostics/correct_wrong_ratio": Mean(correct, wrong),
    }
