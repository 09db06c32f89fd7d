"""CBAFed's class-balanced thresholds (Li et al. 2023), as its released code has them: rare classes are accepted more easily."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32

from fedjax_ssl.arrays import Array, Mask, Number, Probs
from fedjax_ssl.ssl.pseudo_labels import PseudoLabels, harden

MARGIN, RARE = 0.84, 0.03
"""What is added to a class's share, and the share below which a class is rare."""


class Thresholds(NamedTuple):
    """A threshold for each class, and which classes are rare."""

    per_class: Float32[Array, " C"]
    rare: Bool[Array, " C"]


class Accepted(NamedTuple):
    """Pseudo-labels int32 [n] and their confidences, and which of them are accepted."""

    labels: PseudoLabels
    used: Mask


def class_balanced(counts: Float[Array, " C"], largest: Number = 0.95) -> Thresholds:
    """Thresholds from the numbers N(c) of labels and pseudo-labels of each class at all clients.

        p(c) = C/10 N(c) / sum N,    T(c) = min(p(c) + 0.84 - sd(p), largest),    rare: p(c) < 0.03

    sd is the sample standard deviation over classes. Without any count all thresholds are .84, and no class is rare.

    >>> print(class_balanced(jnp.array([1.0, 3.0]), 0.75).per_class)
    [0.75 0.75]
    """
    classes, total = counts.shape[0], jnp.sum(counts)
    share = classes / 10 * counts / jnp.maximum(total, 1.0)
    per_class = jnp.minimum(share + MARGIN - jnp.std(share, ddof=1), largest)
    return Thresholds(per_class, (share < RARE) & (total > 0))


def accept(probs: Probs, mask: Mask, thresholds: Thresholds, *, second: bool) -> Accepted:
    """The label of softmax outputs [n, C]: the first choice, if it exceeds its class's threshold (max q > T(argmax q)).

    With `second`, an example that is not accepted gets its second choice if that class is rare, whatever its probability.
    """
    label, confidence = harden(probs)
    first = confidence > thresholds.per_class[label]
    other = harden(jnp.where(jnp.arange(probs.shape[1]) == label[:, None], -1.0, probs))
    is_second = ~first & thresholds.rare[other.label] & second
    chosen = PseudoLabels(jnp.where(is_second, other.label, label), jnp.where(is_second, other.confidence, confidence))
    return Accepted(chosen, mask & (first | is_second))
