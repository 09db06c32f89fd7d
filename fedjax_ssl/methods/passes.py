"""How many examples pass through networks, counted while a program is traced: the cost of a method as its code really has it.

`Task` marks what its networks return. `count` traces a function once more, without running it, and adds up the rows of all
marked outputs, and again those of their gradients as often as one is taken. Outside of `count` a mark is nothing at all.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.metrics import Metrics, Sum

PyTree = Any
_counting: contextvars.ContextVar[_Count | None] = contextvars.ContextVar("counting", default=None)


class Passes(NamedTuple):
    """Examples that passed through a network, padding of batches included; numbers, or int32 scalars.

    Attributes:
        forward: through a whole network, or its features.
        backward: back through it, for a gradient. A gradient of a gradient goes back through both the passes of the inner one.
    """

    forward: Any = 0
    backward: Any = 0

    def times(self, number: Any) -> Passes:
        """The same so many times."""
        return Passes(self.forward * number, self.backward * number)

    def plus(self, other: Passes) -> Passes:
        """Both."""
        return Passes(self.forward + other.forward, self.backward + other.backward)


def total(parts: Iterable[Passes]) -> Passes:
    """All of them."""
    return functools.reduce(Passes.plus, parts, Passes())


class _Count:
    """What is being counted: passes so far, each `times` over, and for each `cond` its predicate and what the branches take."""

    def __init__(self, times: int = 1) -> None:
        self.times = times
        self.forward = self.backward = 0
        self.choices: list[tuple[jax.Array, _Count, _Count]] = []

    def total(self) -> Passes:
        total = Passes(self.forward, self.backward)
        for chosen, *branches in self.choices:
            yes, no = (branch.total() for branch in branches)
            total = total.plus(Passes(*(jnp.where(chosen, x, y) for x, y in zip(yes, no, strict=True))))
        return total


def _counted(function: Callable, *args: Any, times: int = 1) -> tuple[PyTree, _Count]:
    counting = _Count(times)
    token = _counting.set(counting)
    try:
        return function(*args), counting
    finally:
        _counting.reset(token)


def count(function: Callable, *args: Any) -> tuple[PyTree, Passes]:
    """The shapes of `function(*args)`, as by `jax.eval_shape`, and the passes of one call.

    The body of a loop is counted once, and both branches of a `jax.lax.cond` are; `map` and `cond` know better.
    """
    # A function of its own, so that it is traced afresh and not looked up.
    shapes, counting = _counted(jax.eval_shape, lambda *args: function(*args), *args)
    return shapes, counting.total()


def cond(chosen: jax.Array, yes: Callable[[], PyTree], no: Callable[[], PyTree]) -> PyTree:
    """`jax.lax.cond`, counted as the branch that is taken. `chosen` must be known outside of what is counted."""
    counting = _counting.get()
    if counting is None:
        return jax.lax.cond(chosen, yes, no)
    (shapes, of_yes), (_, of_no) = (_counted(branch, times=counting.times) for branch in (yes, no))
    counting.choices.append((chosen, of_yes, of_no))
    return shapes


def map(function: Callable[[PyTree], PyTree], xs: PyTree) -> PyTree:
    """`jax.lax.map`, counted as often as there are rows in `xs`."""
    counting = _counting.get()
    if counting is None:
        return jax.lax.map(function, xs)
    times, counting.times = counting.times, counting.times * len(jax.tree.leaves(xs)[0])
    results = jax.lax.map(function, xs)
    counting.times = times
    return results


def mark(outputs: jax.Array) -> jax.Array:
    """A network's outputs [B, ...], as they are; `count` sees them."""
    counting = _counting.get()
    if counting is None:
        return outputs
    rows = outputs.shape[0]
    counting.forward += counting.times * rows

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        if current := _counting.get():
            current.backward += current.times * rows
        return (same(cotangent),)

    # Both directions are marked again, so that a gradient of the gradient is counted too.
    same.defvjp(lambda x: (same(x), None), backward)
    return same(outputs)


def tangent(pullback: Callable[[jax.Array], tuple[PyTree]], outputs: jax.Array, direction: PyTree) -> jax.Array:
    """J v: how a network's outputs change along a direction in parameter space, from their pullback c -> J^T c.

    The pullback is linear, and its transpose is J: the forward pass that made it is shared, and the network needs no rule but
    that of reverse mode, the only one that `hybrid` convolutions have. It is about the work of one or two forward passes, and
    counts as one.

    Args:
        pullback: what `jax.vjp` gave for a network's parameters.
        outputs: float [B, ...], of the same network.
        direction: v, a pytree like the parameters.

    Returns:
        Like `outputs`.
    """
    if counting := _counting.get():
        counting.forward += counting.times * outputs.shape[0]
        return jnp.zeros_like(outputs)
    _, transposed = jax.vjp(pullback, jnp.zeros_like(outputs))
    return transposed((direction,))[0]


def metrics(passes: Passes) -> Metrics:
    """As metrics of a client: `cost/forward_passes` and `cost/backward_passes`."""
    return {
        "cost/forward_passes": Sum(jnp.asarray(passes.forward, jnp.int32)),
        "cost/backward_passes": Sum(jnp.asarray(passes.backward, jnp.int32)),
    }
