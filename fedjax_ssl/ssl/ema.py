"""Exponential moving averages of a network's weights, and the schedules of their decay and of a loss weight."""

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from fedjax_ssl.arrays import Array, Number, Params


def update(average: Params, new: Params, decay: Number) -> Params:
    """The moving average decay average + (1 - decay) new (Tarvainen and Valpola 2017; FedSiam, Eqs. 3 and 9).

    >>> update({"w": jnp.array([1.0])}, {"w": jnp.array([3.0])}, 0.5)["w"].tolist()
    [2.0]
    """
    return jax.tree.map(lambda a, b: decay * a + (1.0 - decay) * b, average, new)


def warm_decay(step: Array, largest: Number) -> Float32[Array, ""]:
    """A decay that grows with the number of updates so far, min(1 - 1 / (step + 1), largest) (FedSiam's alpha).

    >>> [float(warm_decay(jnp.array(step), 0.875)) for step in (0, 1, 3, 100)]
    [0.0, 0.5, 0.75, 0.875]
    """
    return jnp.minimum(1.0 - 1.0 / (step.astype(jnp.float32) + 1.0), largest)


def annealed_decay(step: Array, steps: Array, rate: float) -> Float32[Array, ""]:
    """A decay that rises from 1 - rate to 1 over `steps` updates, 1 - rate (cos(pi step / steps) + 1) / 2 (BYOL, FedCon)."""
    progress = step.astype(jnp.float32) / steps.astype(jnp.float32)
    return 1.0 - rate * (jnp.cos(jnp.pi * progress) + 1.0) / 2.0


def ramp_up(time: Number, length: float) -> Float32[Array, ""]:
    """A weight that grows to 1, exp(-5 (1 - min(time, length) / length)^2) (Laine and Aila 2017; FedSiam's beta_k).

    `time` >= 0 and `length` > 0 have the same unit: local epochs in FedSiam, rounds in FedCon.

    >>> [round(float(ramp_up(time, 10)), 3) for time in (0, 5, 10, 20)]
    [0.007, 0.287, 1.0, 1.0]
    """
    progress = jnp.minimum(jnp.asarray(time, jnp.float32), length) / length
    return jnp.exp(-5.0 * jnp.square(1.0 - progress))
