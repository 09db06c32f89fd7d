"""Thresholds that decide which pseudo-labels are accepted."""

from typing import NamedTuple

import chex
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int

from fedjax_ssl.arrays import Array, Number


class ClientThresholds(NamedTuple):
    """A client's learning status tau_k in [1/C, 1], 0 without data, and its thresholds tau_k(c) in [0, tau_k]."""

    tau: Float32[Array, ""]
    per_class: Float32[Array, " C"]


def client_adaptive(probs: Float[Array, "n C"], mask: Bool[Array, " n"]) -> ClientThresholds:
    """Client-specific adaptive thresholds (CAT) of (FL)^2, by the global model's softmax outputs q on weak views.

    tau_k    = mean_i max_c q_i(c)                      (Eq. 7)
    pbar(c)  = mean_i q_i(c)                            (Eq. 8)
    tau_k(c) = pbar(c) / max_c' pbar(c') * tau_k        (Eq. 9)

    >>> tau, per_class = client_adaptive(jnp.array([[0.75, 0.25], [0.5, 0.5]]), jnp.array([True, True]))
    >>> float(tau), per_class.tolist()
    (0.625, [0.625, 0.375])
    """
    chex.assert_rank([probs, mask], [2, 1])
    count = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    probs = jnp.where(mask[:, None], probs, 0.0)
    tau = jnp.sum(jnp.max(probs, axis=1)) / count
    return ClientThresholds(tau, per_class(tau, jnp.sum(probs, axis=0) / count))


def per_class(tau: Number, mean_probs: Float[Array, " C"]) -> Float[Array, " C"]:
    """A threshold for each class, tau(c) = pbar(c) / max_c' pbar(c') * tau ((FL)^2, Eq. 9; FreeMatch); zeros if pbar = 0.

    >>> print(per_class(0.8, jnp.array([0.5, 0.25, 0.25])))
    [0.8 0.4 0.4]
    """
    largest = jnp.max(mean_probs)
    return mean_probs / jnp.where(largest > 0, largest, 1.0) * tau


def falling(base: Number, round: Int[Array, ""]) -> Float[Array, ""]:
    """FedTriNet's threshold q on sums of three networks' probabilities, which falls from round to round.

        q = 2.8 m for r < 10;  (1 - .02 r) 2.8 m for r < 35;  then 1.4 m

    m = `base` in [0, 1] is the mean confidence of the first phase's model, and r counts the second phase's rounds from 0.
    """
    fallen = 1.0 - 0.02 * round.astype(jnp.float32)
    factor = jnp.where(round < 10, 1.0, jnp.where(round >= 35, 0.5, fallen))
    return 2.8 * base * factor


def above(values: Float[Array, " n"], threshold: Number | Float[Array, " n"], *, strict: bool) -> Bool[Array, " n"]:
    """Whether each confidence is above its threshold: `>` if strict ((FL)^2, Eqs. 10 and 11), else `>=` (its released code).

    >>> above(jnp.array([0.5, 0.75]), 0.5, strict=True).tolist(), above(jnp.array([0.5, 0.75]), 0.5, strict=False).tolist()
    ([False, True], [True, True])
    """
    return values > threshold if strict else values >= threshold
