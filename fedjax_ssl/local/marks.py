"""Marks in a traced program that say where examples pass through a network, for `fedjax_ssl.simulation.costs` to count.

`Task` marks its networks' outputs. A mark is an identity with a name: it costs nothing in the compiled program.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

FORWARD, BACKWARD = "fedjax_ssl.forward", "fedjax_ssl.backward"


@jax.custom_vjp
def mark(outputs: jax.Array) -> jax.Array:
    """A network's outputs [B, ...], unchanged: their forward pass is marked, and so is each backward pass of their gradient."""
    return checkpoint_name(outputs, FORWARD)


@jax.custom_vjp
def _mark_cotangent(cotangent: jax.Array) -> jax.Array:
    return checkpoint_name(cotangent, BACKWARD)


# The gradient of a gradient goes through the network forwards again: as a directional derivative, for example.
mark.defvjp(lambda x: (mark(x), None), lambda _, cotangent: (_mark_cotangent(cotangent),))
_mark_cotangent.defvjp(lambda x: (_mark_cotangent(x), None), lambda _, tangent: (mark(tangent),))
