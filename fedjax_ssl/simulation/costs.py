"""How many examples a client passes through networks, counted while its program runs.

`with_passes` follows a traced program's loops and branches: a loop counts as often as it runs, a branch if it is taken. It
finds the counters that a Task and `local.train` set; a method's author need not know of them. As it counts while the program
runs, it can also end a training when an allowance is used up.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.local.counters import BACKWARD, FORWARD, STEP
from fedjax_ssl.metrics import Sum, whole

Value = jax.typing.ArrayLike  # of a program's variable
Left = jax.Array | None  # forward passes that training steps may still take, float32 scalar; < 0: none; None: any number


class Passes(NamedTuple):
    """Examples that passed forward and backward through a network, padding of batches included: integers, or each a Sum."""

    forward: Any = 0
    backward: Any = 0

    @property
    def as_forward(self) -> Any:
        """Forward and backward passes as a number of forward passes; by its arithmetic, a backward pass counts as two."""
        total = _plus(_plus(self.forward, self.backward), self.backward)
        return total.number if isinstance(total, Sum) else total

    def plus(self, other: Self) -> Self:
        """The sum of two Passes."""
        return self._replace(forward=_plus(self.forward, other.forward), backward=_plus(self.backward, other.backward))

    def arrays(self) -> Self:
        """As Sums, which loops can carry."""
        return self._replace(forward=_sum(self.forward), backward=_sum(self.backward))


def _sum(number: Any) -> Sum:
    return number if isinstance(number, Sum) else whole(number)


def _plus(first: Any, second: Any) -> Any:
    known = [isinstance(number, int) for number in (first, second)]
    if all(known):
        return first + second
    if known[1] and not second:  # as with most operations: a sum of nothing would only take time to compile
        return first
    return second if known[0] and not first else _sum(first).plus(_sum(second))


def with_passes(
    function: Callable[..., PyTree], allowance: Callable[[PyTree, Passes], jax.Array] | None = None
) -> Callable[..., tuple[PyTree, Passes]]:
    """`function`, changed to return (its result, Passes). It can still be jitted, vmapped and scanned.

    An `allowance` limits the cost of all steps of the function's trainings (`local.train`), in forward passes as
    `Passes.as_forward` counts them: a training ends before the step that would exceed the limit. `allowance` computes this
    limit, a float32 scalar, from the result and the passes that the function would have if its trainings took no step.
    """

    @functools.wraps(function)
    def counted(*args: PyTree) -> tuple[PyTree, Passes]:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)

        def run(left: Left) -> tuple[PyTree, Passes]:
            outputs, passes, _ = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), left)
            return jax.tree.unflatten(jax.tree.structure(shapes), outputs), passes.arrays()

        return run(None if allowance is None else allowance(*run(jnp.float32(-1))))

    return counted


def _run(jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value], left: Left) -> tuple[list[Value], Passes, Left]:
    """Runs a program operation by operation: (its results, its passes, what is left of the allowance)."""
    values: dict[Var, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    total = Passes()
    for eqn in _used(jaxpr):
        inputs = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
        outputs, passes, left = _run_equation(eqn, inputs, left)
        values.update(zip(eqn.outvars, outputs, strict=True))
        total = total.plus(passes)
    return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars], total, left


def _used(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The operations whose results are used; others are not counted, since a compiler removes them."""
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    used = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(x in needed for x in eqn.outvars):
            used.append(eqn)
            needed.update(x for x in eqn.invars if isinstance(x, Var))
    return used[::-1]


def _run_equation(eqn: JaxprEqn, inputs: list[Value], left: Left) -> tuple[list[Value], Passes, Left]:
    if (passes := _marked(eqn)) is not None:
        return inputs, passes, left
    if not any(map(_has_marks, _inner(eqn))):
        bound = eqn.primitive.get_bind_params(eqn.params)
        subfuns, params = bound if isinstance(bound, tuple) else ((), bound)  # up to JAX 0.11, and after it
        outputs = eqn.primitive.bind(*subfuns, *inputs, **params)
        return list(outputs) if eqn.primitive.multiple_results else [outputs], Passes(), left
    if eqn.primitive.name in _LOOPS_AND_BRANCHES:
        return _LOOPS_AND_BRANCHES[eqn.primitive.name](eqn, inputs, left)
    (inner,) = _inner(eqn)  # a call: of a jitted function, or of one with a derivative of its own
    return _run(inner.jaxpr, inner.consts, inputs, left)


def _marked(eqn: JaxprEqn) -> Passes | None:
    """The passes that a counter stands for; None for any other operation."""
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


Carry = tuple[list[Value], Passes, Left]  # a loop's own carry, the passes so far, and what is left of the allowance


def _iteration(body: ClosedJaxpr, fixed: Sequence[Value], carry: Carry, xs: Sequence[Value] = ()) -> tuple[Carry, list[Value]]:
    """One iteration of a loop: its carry, and its other results. A step of a training is undone where it is not allowed."""
    values, passes, left = carry
    is_step = left is not None and _is_step(body)
    outputs, more, after = _run(body.jaxpr, body.consts, [*fixed, *values, *xs], None if is_step else left)
    new, ys = outputs[: len(values)], outputs[len(values) :]
    if is_step:
        after = left - more.as_forward
        fits = after >= 0
        new = [jnp.where(fits, x, old) for x, old in zip(new, values, strict=True)]
        more, after = jax.tree.map(lambda x: jnp.where(fits, x, 0), more.arrays()), jnp.where(fits, after, -1.0)
    return (new, passes.plus(more).arrays(), after), ys


def _is_step(body: ClosedJaxpr) -> bool:
    """Whether a loop's body is a step of `local.train`."""
    return any(eqn.primitive.name == "name" and eqn.params["name"] == STEP for eqn in body.jaxpr.eqns)


def _scan(eqn: JaxprEqn, inputs: list[Value], left: Left) -> Carry:
    params, body = eqn.params, eqn.params["jaxpr"]
    # Inputs are constants, carry and slices, outputs carry and slices; outside of the body, slices have an axis more.
    num_carry = _same_rank(body.jaxpr.outvars, eqn.outvars)
    num_unsliced = _same_rank(body.jaxpr.invars, eqn.invars)
    consts, carry = inputs[: num_unsliced - num_carry], inputs[num_unsliced - num_carry : num_unsliced]
    xs = inputs[num_unsliced:]

    def step(carry: Carry, xs: list[Value]) -> tuple[Carry, list[Value]]:
        return _iteration(body, consts, carry, xs)

    (carry, total, left), ys = jax.lax.scan(
        step, (carry, Passes().arrays(), left), xs, params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys], total, left


def _same_rank(inner: Sequence[Any], outer: Sequence[Any]) -> int:
    """How many variables have as many axes inside of a loop's body as outside."""
    return sum(x.aval.ndim == y.aval.ndim for x, y in zip(inner, outer, strict=True))


def _while(eqn: JaxprEqn, inputs: list[Value], left: Left) -> Carry:
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def goes_on(carry: Carry) -> jax.Array:
        more = jaxpr_as_fun(condition)(*inputs[:first], *carry[0])[0]
        return more if carry[2] is None or not _is_step(body) else more & (carry[2] >= 0)

    def step(carry: Carry) -> Carry:
        return _iteration(body, inputs[first:second], carry)[0]

    return jax.lax.while_loop(goes_on, step, (inputs[second:], Passes().arrays(), left))


def _cond(eqn: JaxprEqn, inputs: list[Value], left: Left) -> Carry:
    def branch(program: ClosedJaxpr, left: Left, *args: Value) -> Carry:
        outputs, passes, left = _run(program.jaxpr, program.consts, args, left)
        return outputs, passes.arrays(), left

    index, *args = inputs
    return jax.lax.switch(index, [functools.partial(branch, program) for program in eqn.params["branches"]], left, *args)


_LOOPS_AND_BRANCHES = {"scan": _scan, "while": _while, "cond": _cond}
