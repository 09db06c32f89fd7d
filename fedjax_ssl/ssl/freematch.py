"""FreeMatch (Wang et al. 2023): thresholds that follow the model's confidence, and a fairness term over classes.

Both read moving averages over batches of unlabeled data. q_b is the softmax output on the weak view of example b.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Float32

from fedjax_ssl.arrays import Array, Logits, Mask, Probs, Scalar
from fedjax_ssl.ssl import ema, losses, thresholds


class Status(NamedTuple):
    """Moving averages over batches: of confidence tau_t, of softmax outputs p_t, and of the shares h_t of pseudo-labels."""

    tau: Float32[Array, ""]
    probs: Float32[Array, " C"]
    histogram: Float32[Array, " C"]


def start(num_classes: int) -> Status:
    """The status before the first batch: tau_0 = p_0(c) = h_0(c) = 1 / C."""
    uniform = jnp.full((num_classes,), 1.0 / num_classes)
    return Status(uniform[0], uniform, uniform)


def update(status: Status, probs: Probs, mask: Mask, *, decay: float, largest: float = 1.0) -> Status:
    """The status after one more batch of B real examples (self-adaptive thresholding, SAT).

        tau_t = lambda tau_{t-1} + (1 - lambda) 1/B sum_b max_c q_b(c)
        p_t   = lambda p_{t-1}   + (1 - lambda) 1/B sum_b q_b
        h_t   = lambda h_{t-1}   + (1 - lambda) Hist(argmax_c q_b(c)) / B

    `decay` is lambda, and tau_t is at most `largest`. Without examples the status stays. No gradient flows through it.
    """
    chex.assert_rank([probs, mask], [2, 1])
    probs = jax.lax.stop_gradient(probs)
    count = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    of_batch = losses.masked_mean(jnp.max(probs, axis=1), mask)
    mean_probs = jnp.sum(jnp.where(mask[:, None], probs, 0.0), axis=0) / count
    new = ema.update(status, Status(of_batch, mean_probs, _counts(probs, mask) / count), decay)
    new = new._replace(tau=jnp.minimum(new.tau, largest))
    return jax.tree.map(lambda x, y: jnp.where(jnp.any(mask), x, y), new, status)


def class_thresholds(status: Status) -> Float32[Array, " C"]:
    """The thresholds tau_t(c) = p_t(c) / max_c' p_t(c') * tau_t of the classes."""
    return thresholds.per_class(status.tau, status.probs)


def fairness_loss(logits: Logits, accepted: Mask, status: Status) -> Scalar:
    """The loss of self-adaptive fairness (SAF), over the strong views of accepted examples.

        L_f = sum_c a_c log(b_c + 1e-12),  a = SumNorm(p_t / h_t),  b = SumNorm(pbar / hbar),  with 1 / 0 := 0

    pbar is the mean softmax output, and hbar is the histogram of the examples' most probable classes. L_f = -H(a, b) <= 0 has
    the sign of the paper and of its code. The gradient flows through pbar alone. Without accepted examples, both the gradient
    and L_f are 0.
    """
    chex.assert_rank([logits, accepted], [2, 1])
    probs = jax.nn.softmax(logits.astype(jnp.float32))
    # SumNorm cancels the denominators of means and shares.
    total = jnp.sum(jnp.where(accepted[:, None], probs, 0.0), axis=0)
    target = _sum_norm(status.probs * _reciprocal(status.histogram))
    output = _sum_norm(total * _reciprocal(_counts(probs, accepted)))
    loss = jnp.sum(jax.lax.stop_gradient(target) * jnp.log(output + 1e-12))
    return jnp.where(jnp.any(accepted), loss, 0.0)


def _counts(probs: Probs, mask: Mask) -> Float32[Array, " C"]:
    """The number of examples in `mask` whose largest probability is that of each class."""
    largest = jax.nn.one_hot(jnp.argmax(probs, axis=1), probs.shape[1])
    return jnp.sum(jnp.where(mask[:, None], largest, 0.0), axis=0)


def _reciprocal(x: Array) -> Array:
    """1 / x, and 0 where that is infinite."""
    inverse = 1.0 / x
    return jnp.where(jnp.isfinite(inverse), inverse, 0.0)


def _sum_norm(x: Array) -> Array:
    """Entries divided by their sum; zeros where the sum is 0."""
    total = jnp.sum(x)
    return x / jnp.where(total > 0, total, 1.0)
