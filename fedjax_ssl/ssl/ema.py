"""Exponential moving averages of a network's weights, and what a mean teacher ramps up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from fedjax_ssl.arrays import Array, Number, Params


def update(average: Params, new: Params, decay: Number) -> Params:
    """Decay average + (1 - decay) new, leaf by leaf; decay in [0, 1] (Tarvainen and Valpola 2017; FedSiam, Eqs. 3 and 9)."""
    return jax.tree.map(lambda a, b: decay * a + (1.0 - decay) * b, average, new)


def warm_decay(step: Array, largest: Number) -> Float32[Array, ""]:
    """min(1 - 1 / (step + 1), largest): the true mean until the moving one is faster (FedSiam's alpha).

    Args:
        step: updates so far.
        largest: alpha_max, in [0, 1).
    """
    return jnp.minimum(1.0 - 1.0 / (step.astype(jnp.float32) + 1.0), largest)


def annealed_decay(step: Array, steps: Array, rate: float) -> Float32[Array, ""]:
    """1 - rate (cos(pi step / steps) + 1) / 2: rises from 1 - rate to 1, where the average no longer changes (BYOL, FedCon).

    Args:
        step: updates so far, in [0, steps].
        steps: updates in all, >= 1.
        rate: the new weights' share in the first update, in [0, 1].
    """
    progress = step.astype(jnp.float32) / steps.astype(jnp.float32)
    return 1.0 - rate * (jnp.cos(jnp.pi * progress) + 1.0) / 2.0


def ramp_up(time: Number, length: float) -> Float32[Array, ""]:
    """exp(-5 (1 - min(time, length) / length)^2): a weight that grows from .0067 to 1 (Laine and Aila 2017; FedSiam's beta_k).

    Args:
        time: >= 0, in the unit of `length`: FedSiam counts local epochs, FedCon rounds.
        length: time from which on the weight is 1, > 0.
    """
    progress = jnp.minimum(jnp.asarray(time, jnp.float32), length) / length
    return jnp.exp(-5.0 * jnp.square(1.0 - progress))
