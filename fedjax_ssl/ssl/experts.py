"""Pseudo-labels by the more certain of two experts (FedLabel), and how much the other one counts."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

from fedjax_ssl.arrays import Array, Logits, PerExample, Probs


class Decision(NamedTuple):
    """What two experts decide on a batch: per example, s* is the output of the more certain one and s- that of the other."""

    label: Int32[Array, " B"]  # argmax s*
    confidence: PerExample  # max s*
    local: Bool[Array, " B"]  # whether s* is the local expert's
    agreed: Bool[Array, " B"]  # whether argmax s- is the label
    ratio: PerExample  # h(s-) / h(s*), in [0, 1]
    other: Logits  # of s-


def variance(probs: Probs) -> PerExample:
    """The certainty h(s) = 1/(C - 1) sum_c (s_c - 1/C)^2, from 0 if uniform to 1/C (FedLabel, Section 4).

    >>> variance(jnp.array([[0.5, 0.5], [1.0, 0.0]])).tolist()
    [0.0, 0.5]
    """
    return jnp.var(probs, axis=-1, ddof=1)


def inverse_entropy(probs: Probs) -> PerExample:
    """The certainty h(s) = 1 / (-sum_c s_c log s_c + 1e-5), the entropy in nats (FedLabel; the constant is FLUTE's)."""
    return 1.0 / (jnp.sum(jax.scipy.special.entr(probs), axis=-1) + 1e-5)


MEASURES: dict[str, Callable[[Probs], PerExample]] = {"variance": variance, "entropy": inverse_entropy}  # h, by name


def decide(global_logits: Logits, local_logits: Logits, measure: str) -> Decision:
    """The label of each example by the expert of larger h (FedLabel, Eqs. 3 and 4); the global expert wins a tie."""
    chex.assert_equal_shape([global_logits, local_logits])
    probs = [jax.nn.softmax(logits.astype(jnp.float32)) for logits in (global_logits, local_logits)]
    of_global, of_local = map(MEASURES[measure], probs)
    local = of_local > of_global
    best = jnp.where(local[:, None], probs[1], probs[0])
    other = jnp.where(local[:, None], global_logits, local_logits)
    label = jnp.argmax(best, axis=-1).astype(jnp.int32)
    largest, smallest = jnp.maximum(of_global, of_local), jnp.minimum(of_global, of_local)
    # Two uniform outputs have no variance, and are equally certain.
    ratio = jnp.where(largest > 0, smallest / jnp.where(largest > 0, largest, 1.0), 1.0)
    return Decision(label, jnp.max(best, axis=-1), local, jnp.argmax(other, axis=-1) == label, ratio, other)
