"""Training signal annealing (TSA) of UDA: labeled examples train while their probability is below a rising threshold."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Bool

from fedjax_ssl.arrays import Array, Labels, Logits, Number, Scalar


def threshold(schedule: str, progress: Number, num_classes: int) -> Scalar:
    """TSA's threshold at `progress` t/T, from about 1/C to about 1 (Xie et al. 2020, Section 3.2, and its released code).

    eta_t = a_t (1 - 1/C) + 1/C
    a_t   = t/T (linear), exp(5 (t/T - 1)) (exp), 1 - exp(-5 t/T) (log)

    >>> [float(threshold("linear", progress, num_classes=2)) for progress in (0.0, 0.5, 1.0)]
    [0.5, 0.75, 1.0]
    """
    progress = jnp.asarray(progress, jnp.float32)
    a = {
        "linear": lambda: progress,
        "exp": lambda: jnp.exp(5.0 * (progress - 1.0)),
        "log": lambda: 1.0 - jnp.exp(-5.0 * progress),
    }[schedule]()
    return a * (1.0 - 1.0 / num_classes) + 1.0 / num_classes


def selected(logits: Logits, labels: Labels, eta: Number) -> Bool[Array, " B"]:
    """Which labeled examples train: those whose correct class has a probability of at most the threshold `eta`."""
    chex.assert_rank([logits, labels], [2, 1])
    probs = jax.nn.softmax(jax.lax.stop_gradient(logits).astype(jnp.float32))
    return jnp.take_along_axis(probs, labels[:, None], axis=1)[:, 0] <= eta
