"""What a client computes: examples that pass through networks, counted in its traced program.

`with_passes` rewrites a function so that it also returns how many examples went forwards and backwards through a network. It
follows the program's loops and branches: a loop counts as often as it really runs, a branch if it is taken. The marks that it
looks for are set by `fedjax_ssl.local.task.Task`; a method's author need not know of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fedjax_ssl.local.marks import BACKWARD, FORWARD

PyTree = Any


class Passes(NamedTuple):
    """Examples that passed through a network, padding of batches included: int32 scalars, or numbers.

    Attributes:
        forward: through a whole network, or its features. A gradient of a gradient takes one more, along a direction.
        backward: back through it, for a gradient.
    """

    forward: Any = 0
    backward: Any = 0

    def plus(self, other: Passes) -> Passes:
        """Both together."""
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def times(self, number: Any) -> Passes:
        """The same so many times."""
        return Passes(self.forward * number, self.backward * number)

    def arrays(self) -> Passes:
        """As int32 scalars, which loops can carry."""
        return Passes(jnp.asarray(self.forward, jnp.int32), jnp.asarray(self.backward, jnp.int32))


def with_passes(function: Callable[..., PyTree]) -> Callable[..., tuple[Any, Passes]]:
    """`function` as one that returns (its result, Passes); it may be jitted, vmapped and scanned as `function` may."""

    @functools.wraps(function)
    def counted(*args: PyTree) -> tuple[PyTree, Passes]:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outputs, passes = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs), passes.arrays()

    return counted


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Passes]:
    """The program's results, operation by operation, and its passes."""
    values: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    total = Passes()
    for eqn in _used(jaxpr):
        inputs = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        outputs, passes = _run_equation(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
        total = total.plus(passes)
    return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars], total


def _used(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The operations whose results are used: a compiler leaves out the others, such as the value of a linear function."""
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    used = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(x in needed for x in eqn.outvars):
            used.append(eqn)
            needed.update(x for x in eqn.invars if isinstance(x, Var))
    return used[::-1]


def _run_equation(eqn: JaxprEqn, inputs: list[Any]) -> tuple[list[Any], Passes]:
    if eqn.primitive.name == "name" and (passes := _marked(eqn)) is not None:
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
    """The passes that a mark stands for; None: it is no mark of ours."""
    shape = eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
    rows = math.prod(shape[:-1])
    return {FORWARD: Passes(forward=rows), BACKWARD: Passes(backward=rows)}.get(eqn.params["name"])


def _inner(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The programs inside of an operation."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr):
                found.append(part)
            elif isinstance(part, Jaxpr):
                found.append(ClosedJaxpr(part, ()))
    return found


def _has_marks(program: ClosedJaxpr) -> bool:
    equations = program.jaxpr.eqns
    return any(eqn.primitive.name == "name" and _marked(eqn) is not None for eqn in equations) or any(
        _has_marks(inner) for eqn in equations for inner in _inner(eqn)
    )


def _scan(params: dict[str, Any], inputs: list[Any]) -> tuple[list[Any], Passes]:
    body = params["jaxpr"]
    if "ft_in" in params:  # from JAX 0.12 on
        consts, carry, xs = map(list, params["ft_in"].update(inputs).unpack())
    else:
        ends = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, xs = inputs[: ends[0]], inputs[ends[0] : ends[1]], inputs[ends[1] :]
    num_carry = len(carry)

    def step(carry: tuple[list[Any], Passes], xs: list[Any]) -> tuple[tuple[list[Any], Passes], list[Any]]:
        outputs, passes = _run(body.jaxpr, body.consts, [*consts, *carry[0], *xs])
        return (outputs[:num_carry], carry[1].plus(passes).arrays()), outputs[num_carry:]

    (carry, total), ys = jax.lax.scan(
        step, (carry, Passes().arrays()), xs, params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys], total


def _while(params: dict[str, Any], inputs: list[Any]) -> tuple[list[Any], Passes]:
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def step(carry: tuple[list[Any], Passes]) -> tuple[list[Any], Passes]:
        outputs, passes = _run(body.jaxpr, body.consts, [*inputs[first:second], *carry[0]])
        return outputs, carry[1].plus(passes).arrays()

    def goes_on(carry: tuple[list[Any], Passes]) -> Any:
        return jaxpr_as_fun(condition)(*inputs[:first], *carry[0])[0]

    return jax.lax.while_loop(goes_on, step, (inputs[second:], Passes().arrays()))


def _cond(params: dict[str, Any], inputs: list[Any]) -> tuple[list[Any], Passes]:
    def branch(program: ClosedJaxpr) -> Callable[..., tuple[list[Any], Passes]]:
        def run(*args: Any) -> tuple[list[Any], Passes]:
            outputs, passes = _run(program.jaxpr, program.consts, args)
            return outputs, passes.arrays()

        return run

    index, *args = inputs
    return jax.lax.switch(index, [branch(program) for program in params["branches"]], *args)


_LOOPS_AND_BRANCHES: dict[str, Callable[[dict[str, Any], list[Any]], tuple[list[Any], Passes]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
