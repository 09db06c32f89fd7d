"""How much arithmetic a function does, counted in its traced program: the same number on every backend.

XLA's own count is not: a CUDA device gives none before a program is compiled, and none of what libraries compute after that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


class Arithmetic(NamedTuple):
    """What convolutions and matrix products do.

    Attributes:
        flops: floating-point operations, two for each multiplication of two entries; those with the zeros of a padding, or
            between the entries of a dilated array, are not among them.
        bytes: of operands and results, each read or written once by each operation.
    """

    flops: int = 0
    bytes: int = 0

    def times(self, number: int) -> Arithmetic:
        """The same so many times."""
        return Arithmetic(self.flops * number, self.bytes * number)

    def plus(self, other: Arithmetic) -> Arithmetic:
        """Both."""
        return Arithmetic(self.flops + other.flops, self.bytes + other.bytes)


def count(function: Callable, *args: Any) -> Arithmetic:
    """The convolutions and matrix products of `function(*args)`, which is traced and not run.

    The body of a `scan` counts as often as it runs, of `lax.cond` the branch with the most to do, a `shard_map` over all of its
    devices. That of a `while` counts once, as the trace does not tell how often it runs: a `fori_loop` becomes one where its
    bounds are arrays. What is traced and then not used counts too. All else (sums, activations, batch norm) does not count.

    Args:
        function: of arrays.
        *args: pytrees of arrays, or of `jax.ShapeDtypeStruct`.
    """
    return _of(jax.make_jaxpr(function)(*args).jaxpr)


def _of(jaxpr: Jaxpr) -> Arithmetic:
    return _sum(map(_of_equation, jaxpr.eqns))


def _sum(parts: Iterable[Arithmetic]) -> Arithmetic:
    return functools.reduce(Arithmetic.plus, parts, Arithmetic())


def _of_equation(equation: JaxprEqn) -> Arithmetic:
    name, params = equation.primitive.name, equation.params
    if name in _FLOPS:
        operands, (result,) = [x.aval for x in equation.invars], [x.aval for x in equation.outvars]
        return Arithmetic(_FLOPS[name](*operands, result, params), sum(map(_bytes, (*operands, result))))
    inner = [_of(jaxpr) for value in params.values() for jaxpr in _jaxprs(value)]
    if name == "cond":
        return max(inner)
    devices = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"]) if name == "shard_map" else 1
    return _sum(inner).times(params["length"] if name == "scan" else devices)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    """The programs in a parameter of an operation: of a loop's body, of branches, of a function that is called."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _jaxprs(part)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _product(left: Any, right: Any, result: Any, params: dict[str, Any]) -> int:
    """`dot_general`: a sum over the contracted axes for each entry of the result."""
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * math.prod(result.shape) * math.prod(left.shape[axis] for axis in contracted)


def _convolution(left: Any, right: Any, result: Any, params: dict[str, Any]) -> int:
    """`conv_general_dilated`: for each image, feature and channel of the feature's group, each place of the kernel it meets."""
    of_left, of_right, of_result = params["dimension_numbers"]
    met = 1
    for d, (low, _) in enumerate(params["padding"]):
        size, kernel, places = left.shape[of_left[2 + d]], right.shape[of_right[2 + d]], result.shape[of_result[2 + d]]
        spread = params["lhs_dilation"][d]
        starts = np.arange(places)[:, None] * params["window_strides"][d] - low
        at = starts + np.arange(kernel) * params["rhs_dilation"][d]
        met *= int(np.sum((at >= 0) & (at % spread == 0) & (at <= (size - 1) * spread)))
    images, features = (result.shape[axis] for axis in of_result[:2])
    return 2 * images * features * right.shape[of_right[1]] * met


_FLOPS: dict[str, Callable[..., int]] = {"dot_general": _product, "conv_general_dilated": _convolution}
