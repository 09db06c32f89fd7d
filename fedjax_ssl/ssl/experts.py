"""Pseudo-labels by the surer of two experts (FedLabel), and how much the other one's opinion counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

LEAST_ENTROPY = 1e-5
"""Added to an entropy before its inverse is taken, in nats (FLUTE's)."""


class Decision(NamedTuple):
    """What two experts decide on a batch.

    Attributes:
        label: int32 [B], argmax s*, where s* are the outputs of the expert that is surer of the example, s- the other's.
        confidence: float32 [B], max s*.
        local: bool [B], whether s* is the local expert's.
        agreed: bool [B], whether argmax s- is the label, too.
        ratio: float32 [B] in [0, 1], h(s-) / h(s*).
        other: float32 [B, C], the logits of s-.
    """

    label: jax.Array
    confidence: jax.Array
    local: jax.Array
    agreed: jax.Array
    ratio: jax.Array
    other: jax.Array


def variance(probs: jax.Array) -> jax.Array:
    """h(s) = 1/(C - 1) sum_c (s_c - 1/C)^2: 0 for a uniform output, 1/C for a certain one (FedLabel, Section 4).

    Args:
        probs: float32 [B, C], outputs s, which add up to 1.

    Returns:
        float32 [B].
    """
    return jnp.var(probs, axis=-1, ddof=1)


def inverse_entropy(probs: jax.Array) -> jax.Array:
    """h(s) = 1 / (-sum_c s_c log s_c + 1e-5), the entropy in nats, 0 log 0 = 0 (FedLabel; the constant is FLUTE's).

    Args:
        probs: float32 [B, C].

    Returns:
        float32 [B] > 0.
    """
    return 1.0 / (jnp.sum(jax.scipy.special.entr(probs), axis=-1) + LEAST_ENTROPY)


MEASURES: dict[str, Callable[[jax.Array], jax.Array]] = {"variance": variance, "entropy": inverse_entropy}
"""How sure an output is: h, by name."""


def decide(global_logits: jax.Array, local_logits: jax.Array, measure: str) -> Decision:
    """The surer expert's label of each example (FedLabel, Eqs. 3 and 4): s* is the output of larger h.

    Where both are equally sure it is the global expert's, as in FLUTE. h is of probabilities.

    Args:
        global_logits: float [B, C], the global model's outputs.
        local_logits: float [B, C], the local model's.
        measure: a key of MEASURES.
    """
    chex.assert_equal_shape([global_logits, local_logits])
    probs = [jax.nn.softmax(logits.astype(jnp.float32)) for logits in (global_logits, local_logits)]
    of_global, of_local = map(MEASURES[measure], probs)
    local = of_local > of_global
    best = jnp.where(local[:, None], probs[1], probs[0])
    other = jnp.where(local[:, None], global_logits, local_logits)
    label = jnp.argmax(best, axis=-1).astype(jnp.int32)
    largest, smallest = jnp.maximum(of_global, of_local), jnp.minimum(of_global, of_local)
    # Two uniform outputs have no variance; they are equally sure.
    ratio = jnp.where(largest > 0, smallest / jnp.where(largest > 0, largest, 1.0), 1.0)
    return Decision(label, jnp.max(best, axis=-1), local, jnp.argmax(other, axis=-1) == label, ratio, other)
