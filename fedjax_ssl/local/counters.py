"""Counters of forward passes, backward passes and training steps in a traced program.

Each is an identity with a name. `fedjax_ssl.simulation.costs` finds the names, and counts; elsewhere they cost nothing.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from fedjax_ssl.arrays import Array, Count

FORWARD, BACKWARD, STEP = "fedjax_ssl.forward", "fedjax_ssl.backward", "fedjax_ssl.step"


@jax.custom_vjp
def count_outputs(outputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns a network's outputs [B, ...]; their forward pass, and their backward pass if there is one, are counted."""
    return checkpoint_name(outputs, FORWARD)


def count_examples(mask: Bool[Array, " B"]) -> Bool[Array, " B"]:
    """Returns the mask of a batch, and counts a forward pass of which only the batch-norm statistics are read."""
    return checkpoint_name(mask[:, None], FORWARD)[:, 0]


def count_step(step: Count) -> Count:
    """Returns the index of a training's step, and marks the loop as one that may end early, where a client has no time left."""
    return checkpoint_name(step, STEP)


@jax.custom_vjp
def _count_cotangent(cotangent: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return checkpoint_name(cotangent, BACKWARD)


# The gradient of a gradient goes through the network forwards once more, along a direction.
count_outputs.defvjp(lambda x: (count_outputs(x), None), lambda _, cotangent: (_count_cotangent(cotangent),))
_count_cotangent.defvjp(lambda x: (_count_cotangent(x), None), lambda _, tangent: (count_outputs(tangent),))
