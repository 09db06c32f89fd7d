"""Hard pseudo-labels of softmax outputs, and diagnostics of their quality."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Int32

from fedjax_ssl.arrays import Array
from fedjax_ssl.metrics import Mean, Metrics, PerClient


class PseudoLabels(NamedTuple):
    """Hard pseudo-labels argmax_c q_i(c) of n examples, and their confidences max_c q_i(c)."""

    label: Int32[Array, " n"]
    confidence: Float[Array, " n"]


def harden(probs: Float[Array, "n C"]) -> PseudoLabels:
    """Hard pseudo-labels of softmax outputs; the lowest class wins a tie.

    >>> label, confidence = harden(jnp.array([[0.25, 0.75], [0.5, 0.5]]))
    >>> label.tolist(), confidence.tolist()
    ([1, 0], [0.75, 0.5])
    """
    return PseudoLabels(jnp.argmax(probs, axis=-1).astype(jnp.int32), jnp.max(probs, axis=-1))


def examples(
    label: Int[Array, " n"], accepted: Bool[Array, " n"], confidence: Float[Array, " n"] | None = None
) -> dict[str, PerClient]:
    """A client's pseudo-labels of a round, as `Experiment.inspect` shows them; no round has them in its program."""
    found = {"example/pseudo_label": PerClient(label), "example/accepted": PerClient(accepted)}
    return found if confidence is None else {**found, "example/confidence": PerClient(confidence)}


def diagnostics(
    label: Int[Array, " n"], true_labels: Int[Array, " n"], accepted: Bool[Array, " n"], mask: Bool[Array, " n"]
) -> Metrics:
    """Metrics of the quality of accepted pseudo-labels ((FL)^2, Figure 3), summed over a cohort and then divided.

    label ratio = accepted / all; pseudo-label accuracy = correct / accepted; correct (wrong) ratio = accepted and correct
    (wrong) / all; correct-wrong ratio = correct / wrong, without a value if none is wrong. Examples of unknown class
    (true label -1) do not count.
    """
    mask = mask & (true_labels >= 0)
    accepted = accepted & mask
    total, used = (jnp.sum(m, dtype=jnp.float32) for m in (mask, accepted))
    correct = jnp.sum(accepted & (label == true_labels), dtype=jnp.float32)
    wrong = used - correct
    return {
        "diagnostics/label_ratio": Mean(used, total),
        "diagnostics/pseudo_label_accuracy": Mean(correct, used),
        "diagnostics/correct_ratio": Mean(correct, total),
        "diagnostics/wrong_ratio": Mean(wrong, total),
        "diagnostics/correct_wrong_ratio": Mean(correct, wrong),
    }
