"""Marks in a traced program where examples pass through a network, for `fedjax_ssl.simulation.costs` to count."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from fedjax_ssl.arrays import Array

FORWARD, BACKWARD = "fedjax_ssl.forward", "fedjax_ssl.backward"


@jax.custom_vjp
def mark(outputs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """A network's outputs [B, ...], unchanged, with marks of their forward and backward passes, which cost nothing."""
    return checkpoint_name(outputs, FORWARD)


def mark_examples(mask: Bool[Array, " B"]) -> Bool[Array, " B"]:
    """The mask of a batch, unchanged, with the mark of a forward pass whose outputs nobody reads, but its statistics."""
    return checkpoint_name(mask[:, None], FORWARD)[:, 0]


@jax.custom_vjp
def _mark_cotangent(cotangent: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return checkpoint_name(cotangent, BACKWARD)


# The gradient of a gradient goes through the network forwards once more, along a direction.
mark.defvjp(lambda x: (mark(x), None), lambda _, cotangent: (_mark_cotangent(cotangent),))
_mark_cotangent.defvjp(lambda x: (_mark_cotangent(x), None), lambda _, tangent: (mark(tangent),))
