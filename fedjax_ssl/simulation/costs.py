"""How many examples a client passes through networks, counted while its program runs.

`with_passes` follows a traced program's loops and branches: a loop counts as often as it runs, a branch if it is taken. What it
looks for are the marks that `fedjax_ssl.local.task.Task` sets; a method's author need not know of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.local.marks import BACKWARD, FORWARD

Value = jax.typing.ArrayLike  # of a program's variable


class Passes(NamedTuple):
    """Examples that passed forward and backward through a network, padding of batches included: int32 scalars, or numbers."""

    forward: Any = 0
    backward: Any = 0

    def plus(self, other: Passes) -> Passes:
        """Both together."""
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def arrays(self) -> Passes:
        """As int32 scalars, which loops can carry."""
        return Passes(jnp.asarray(self.forward, jnp.int32), jnp.asarray(self.backward, jnp.int32))


def with_passes(function: Callable[..., PyTree]) -> Callable[..., tuple[PyTree, Passes]]:
    """`function`, changed to return (its result, Passes). It can still be jitted, vmapped and scanned."""

    @functools.wraps(function)
    def counted(*args: PyTree) -> tuple[PyTree, Passes]:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outputs, passes = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs), passes.arrays()

    return counted


def _run(jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> tuple[list[Value], Passes]:
    """Runs a program operation by operation: (its results, its passes)."""
    values: dict[Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    total = Passes()
    for eqn in _used(jaxpr):
        inputs = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        outputs, passes = _run_equation(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
        total = total.plus(passes)
    return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars], total


def _used(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The operations whose results are used; a compiler leaves out the others, so they do not count."""
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    used = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(x in needed for x in eqn.outvars):
            used.append(eqn)
            needed.update(x for x in eqn.invars if isinstance(x, Var))
    return used[::-1]


def _run_equation(eqn: JaxprEqn, inputs: list[Value]) -> tuple[list[Value], Passes]:
    if (passes := _marked(eqn)) is not None:
        return inputs, passes
    if not any(map(_has_marks, _inner(eqn))):
        bound = eqn.primitive.get_bind_params(eqn.params)
        subfuns, params = bound if isinstance(bound, tuple) else ((), bound)  # up to JAX 0.11, and after it
        outputs = eqn.primitive.bind(*subfuns, *inputs, **params)
        return list(outputs) if eqn.primitive.multiple_results else [outputs], Passes()
    if eqn.primitive.name in _LOOPS_AND_BRANCHES:
        return _LOOPS_AND_BRANCHES[eqn.primitive.name](eqn.params, inputs)
    (inner,) = _inner(eqn)  # a call: of a jitted function, or of one with a derivative of its own
    return _run(inner.jaxpr, inner.consts, inputs)


def _marked(eqn: JaxprEqn) -> Passes | None:
    """The passes that a mark stands for; None for any other operation."""
    if eqn.primitive.name != "name":
        return None
    rows = math.prod(eqn.outvars[0].aval.shape[:-1])  # type: ignore[attr-defined]
    return {FORWARD: Passes(forward=rows), BACKWARD: Passes(backward=rows)}.get(eqn.params["name"])


def _inner(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The programs inside an operation."""
    parts = itertools.chain.from_iterable(x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [x if isinstance(x, ClosedJaxpr) else ClosedJaxpr(x, ()) for x in parts if isinstance(x, ClosedJaxpr | Jaxpr)]


def _has_marks(program: ClosedJaxpr) -> bool:
    return any(_marked(eqn) is not None or any(map(_has_marks, _inner(eqn))) for eqn in program.jaxpr.eqns)


def _scan(params: dict[str, Any], inputs: list[Value]) -> tuple[list[Value], Passes]:
    body = params["jaxpr"]
    if "ft_in" in params:  # from JAX 0.12 on
        consts, carry, xs = map(list, params["ft_in"].update(inputs).unpack())
    else:
        ends = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, xs = inputs[: ends[0]], inputs[ends[0] : ends[1]], inputs[ends[1] :]
    num_carry = len(carry)

    def step(carry: tuple[list[Value], Passes], xs: list[Value]) -> tuple[tuple[list[Value], Passes], list[Value]]:
        outputs, passes = _run(body.jaxpr, body.consts, [*consts, *carry[0], *xs])
        return (outputs[:num_carry], carry[1].plus(passes).arrays()), outputs[num_carry:]

    (carry, total), ys = jax.lax.scan(
        step, (carry, Passes().arrays()), xs, params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys], total


def _while(params: dict[str, Any], inputs: list[Value]) -> tuple[list[Value], Passes]:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def step(carry: tuple[list[Value], Passes]) -> tuple[list[Value], Passes]:
        outputs, passes = _run(body.jaxpr, body.consts, [*inputs[first:second], *carry[0]])
        return outputs, carry[1].plus(passes).arrays()

    def goes_on(carry: tuple[list[Value], Passes]) -> jax.Array:
        return jaxpr_as_fun(condition)(*inputs[:first], *carry[0])[0]

    return jax.lax.while_loop(goes_on, step, (inputs[second:], Passes().arrays()))


def _cond(params: dict[str, Any], inputs: list[Value]) -> tuple[list[Value], Passes]:
    def branch(program: ClosedJaxpr, *args: Value) -> tuple[list[Value], Passes]:
        outputs, passes = _run(program.jaxpr, program.consts, args)
        return outputs, passes.arrays()

    index, *args = inputs
    return jax.lax.switch(index, [functools.partial(branch, program) for program in params["branches"]], *args)


_LOOPS_AND_BRANCHES = {"scan": _scan, "while": _while, "cond": _cond}
