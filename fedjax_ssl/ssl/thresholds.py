"""Thresholds that decide which pseudo-labels are accepted."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class ClientThresholds(NamedTuple):
    """A client's adaptive thresholds.

    Attributes:
        tau: float32 scalar in [1/C, 1], tau_k: the client's learning status (Eq. 7); 0 where the client has no data.
        per_class: float32 [C] in [0, tau], tau_k(c) (Eq. 9).
    """

    tau: jax.Array
    per_class: jax.Array


def client_adaptive(probs: jax.Array, mask: jax.Array) -> ClientThresholds:
    """Client-specific adaptive thresholds (CAT) of (FL)^2.

        tau_k    = mean_i max_c q_i(c)                      (Eq. 7)
        pbar(c)  = mean_i q_i(c)                            (Eq. 8)
        tau_k(c) = pbar(c) / max_c' pbar(c') * tau_k        (Eq. 9)

    Args:
        probs: float32 [n, C], the global model's softmax outputs q_i on weakly augmented unlabeled images.
        mask: bool [n], which rows are real examples.

    Returns:
        ClientThresholds.
    """
    chex.assert_rank([probs, mask], [2, 1])
    count = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    probs = jnp.where(mask[:, None], probs, 0.0)
    tau = jnp.sum(jnp.max(probs, axis=1)) / count
    mean_probs = jnp.sum(probs, axis=0) / count
    return ClientThresholds(tau, per_class(tau, mean_probs))


def per_class(tau: jax.Array, mean_probs: jax.Array) -> jax.Array:
    """A threshold for each class, tau(c) = pbar(c) / max_c' pbar(c') * tau ((FL)^2, Eq. 9; FreeMatch).

    Args:
        tau: float32 scalar, the threshold of the class that leads pbar.
        mean_probs: float32 [C] >= 0, pbar.

    Returns:
        float32 [C] in [0, tau]; zeros where pbar is 0.
    """
    largest = jnp.max(mean_probs)
    return mean_probs / jnp.where(largest > 0, largest, 1.0) * tau


def falling(base: jax.Array, round: jax.Array, *, protected: bool) -> jax.Array:
    """FedTriNet's threshold q on sums of three networks' probabilities, which falls from round to round.

        q = 2.8 m for r < 10;  (1 - .02 r) 2.8 m for r < 35;  then 1.4 m, or as before if not `protected`

    Args:
        base: float32 scalar in [0, 1], m: the mean confidence of the first phase's model.
        round: int32 scalar, r: rounds of the second phase before this one.
        protected: whether q rises to 1.4 m once it has fallen to .84 m at r = 35.

    Returns:
        float32 scalar; <= 0 without protection from r = 50 on, where everything passes.
    """
    fallen = 1.0 - 0.02 * round.astype(jnp.float32)
    factor = jnp.where(round < 10, 1.0, jnp.where(protected & (round >= 35), 0.5, fallen))
    return 2.8 * base * factor


def passes(values: jax.Array, threshold: jax.Array | float, *, strict: bool) -> jax.Array:
    """Whether a confidence passes its threshold.

    Args:
        values: float32 [n], confidences in [0, 1].
        threshold: scalar or [n].
        strict: `>` ((FL)^2, Eqs. 10 and 11) instead of `>=` (its released code).

    Returns:
        bool [n].
    """
    return values > threshold if strict else values >= threshold
