"""Local steps as a loop, or with all that there can be written out; and how many there can be."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

MOST_UNROLLED = 64
"""Local steps that may be written out: programs grow, and take longer to compile, in proportion."""

State = TypeVar("State")


class Schedule(Protocol):
    """How many steps there are, as `batching.Schedule` says it."""

    @property
    def steps(self) -> Any:
        """The holder's: an int32 scalar, or a number."""

    @property
    def max_steps(self) -> int:
        """The most there can be of any client."""


_seen: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("steps", default=None)


def repeat(
    schedule: Schedule,
    step: Callable[[jax.Array, State], State],
    start: State,
    *,
    unrolled: bool,
) -> State:
    """`start` after the schedule's steps: in a loop as long as the holder's own, or with all that there can be written out.

    The latter computes the steps of the largest holder for each, and keeps the holder's own. It needs no loop, in which a CPU
    has only a slow form of the gradients of XLA's convolution, and for each pass of which a GPU asks its host.

    Raises:
        ValueError: more than MOST_UNROLLED steps would be written out.
    """
    seen = _seen.get()
    if seen is not None:
        seen.append(schedule.max_steps)
    if seen is not None or not unrolled:
        return jax.lax.fori_loop(0, schedule.steps, step, start)
    assert schedule.max_steps > 0
    if schedule.max_steps > MOST_UNROLLED:
        raise ValueError(f"got {schedule.max_steps} steps to write out, accepted: at most {MOST_UNROLLED}")
    state = start
    for s in range(schedule.max_steps):
        new = step(jnp.int32(s), state)
        state = jax.tree.map(lambda x, old, s=s: jnp.where(s < schedule.steps, x, old), new, state)
    return state


def most(function: Callable, *args: object) -> int:
    """The most steps that one `repeat` in `function(*args)` can have, 0 where there is none; traced with all steps in loops."""
    seen: list[int] = []
    token = _seen.set(seen)
    try:
        jax.eval_shape(function, *args)
    finally:
        _seen.reset(token)
    return max(seen, default=0)
