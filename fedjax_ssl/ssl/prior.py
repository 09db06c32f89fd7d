"""FedDB's debiasing (Zhu et al. 2024): a model's mean prediction on unlabeled data, taken as its prior over classes."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32

from fedjax_ssl.arrays import Array, Count, Mask, Number, Probs

STEPS, RATE, DECAY = 100, 1.0, 0.9
"""Number of gradient steps that improve the weights, their learning rate, and their weight decay."""


def mean_prediction(probs: Probs, mask: Mask) -> Float32[Array, " C"]:
    """The mean of softmax outputs [n, C] over the examples in `mask`, which FedDB calls APP-U; uniform without any."""
    count = jnp.sum(mask)
    mean = jnp.sum(jnp.where(mask[:, None], probs, 0.0), axis=0) / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, 1.0 / probs.shape[1]).astype(jnp.float32)


def debiased(probs: Probs, prior: Float[Array, " C"]) -> Float32[Array, "n C"]:
    """Softmax outputs divided by the prior of each class, and normalized: q(c) / p(c) over its sum.

    >>> print(debiased(jnp.array([[0.5, 0.5]]), jnp.array([0.75, 0.25])))
    [[0.25 0.75]]
    """
    ratios = probs / jnp.maximum(prior, 1e-12)
    return (ratios / jnp.maximum(jnp.sum(ratios, axis=1, keepdims=True), 1e-12)).astype(jnp.float32)


def weights_to_uniform(
    priors: Float[Array, "M C"], present: Bool[Array, " M"], steps: int = STEPS, rate: Number = RATE, decay: Number = DECAY
) -> Float32[Array, " M"]:
    """Weights of clients that bring the weighted mean of their priors near the uniform distribution; 0 for absent ones.

    From equal weights on, `steps` times: b <- softmax(b - rate (grad + decay b)), with the gradient of

        1/C sum_c (sum_k b_k p_k(c) - 1/C)^2
    """
    classes = priors.shape[1]
    priors = jnp.where(present[:, None], priors, 0.0)

    def step(_: Count, weights: Array) -> Array:
        gradient = 2 / classes * priors @ (weights @ priors - 1 / classes)
        return jax.nn.softmax(weights - rate * (gradient + decay * weights), where=present)

    start = jnp.where(present, 1.0 / jnp.maximum(jnp.sum(present), 1), 0.0)
    found = jax.lax.fori_loop(0, steps, step, start)
    return jnp.where(present, found, 0.0).astype(jnp.float32)
