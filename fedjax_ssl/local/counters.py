"""Marks in a traced program, for `fedjax_ssl.simulation.costs`: where examples pass through a network, and training steps."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from fedjax_ssl.arrays import Array, Count

FORWARD, BACKWARD, STEP = "fedjax_ssl.forward", "fedjax_ssl.backward", "fedjax_ssl.step"


@jax.custom_vjp
def count_outputs(outputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """A network's outputs [B, ...], unchanged, with marks of their forward and backward passes, which cost nothing."""
    return checkpoint_name(outputs, FORWARD)


def count_examples(mask: Bool[Array, " B"]) -> Bool[Array, " B"]:
    """The mask of a batch, unchanged, with the mark of a forward pass whose outputs nobody reads, but its statistics."""
    return checkpoint_name(mask[:, None], FORWARD)[:, 0]


def count_step(step: Count) -> Count:
    """The number of a training's step, unchanged, with the mark of a loop that may end early: a client may be out of time."""
    return checkpoint_name(step, STEP)


@jax.custom_vjp
def _count_cotangent(cotangent: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return checkpoint_name(cotangent, BACKWARD)


# The gradient of a gradient goes through the network forwards once more, along a direction.
count_outputs.defvjp(lambda x: (count_outputs(x), None), lambda _, cotangent: (_count_cotangent(cotangent),))
_count_cotangent.defvjp(lambda x: (_count_cotangent(x), None), lambda _, tangent: (count_outputs(tangent),))
