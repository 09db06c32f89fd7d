"""The learning rate over the rounds of a run."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Shaped

from fedjax_ssl.arrays import Array, Number, Scalar
from fedjax_ssl.local.optimizers import is_on

READ_ROUNDS = ("cosine", "cosine_7_16")
"""The schedules that depend on the number of all rounds."""


def schedule(
    name: str, rate: Number, rounds: int, *, factor: Number = 0.1, every: int = 100, warmup: Number = 0.0
) -> Callable[..., Scalar]:
    """The learning rate at time t in [0, R] of R `rounds`, for a training that lasts from t to t + length, by default a round.

        lr min(1, (t + length) / W) f(max(t - W, 0), R - W),  or lr f(t, R) without warm-up (W = 0)

        constant: 1                                  step: factor^floor(t / every)
        cosine: (1 + cos(pi t / R)) / 2              exponential: factor^(t / every)
        cosine_7_16: cos(7/16 pi t / R)

    These are f(t, R); cosine is from (FL)^2, Table 4, cosine_7_16 from Sohn et al. 2020, Section 2.4. The first training has a
    rate above 0, and the schedule begins with the full rate after W rounds.
    """

    def scheduled(t: Shaped[Array, ""], rounds: Number) -> Scalar:
        if name == "constant":
            return jnp.float32(rate)
        if name == "step":
            return rate * jnp.power(factor, (t // every).astype(jnp.float32))
        if name == "exponential":
            return rate * jnp.power(factor, t.astype(jnp.float32) / every)
        if name == "cosine_7_16":
            return rate * jnp.cos(7 / 16 * jnp.pi * t.astype(jnp.float32) / rounds)
        return rate / 2 * (1 + jnp.cos(jnp.pi * t.astype(jnp.float32) / rounds))

    def learning_rate(t: Shaped[Array, ""], length: float = 1.0) -> Scalar:
        if not is_on(warmup):
            return scheduled(t, rounds)
        rest = jnp.maximum(rounds - warmup, 1e-6)  # not read before the warm-up ends, so it may not divide by 0
        return jnp.minimum((t + length) / warmup, 1.0) * scheduled(jnp.maximum(t - warmup, 0.0), rest)

    return learning_rate
