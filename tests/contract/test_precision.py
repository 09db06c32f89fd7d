"""A round of `execution.dtype=bfloat16`: convolutions multiply bfloat16, all else is float32. Read off the traced programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal

from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny
from tests.jaxprs import equations, products

# What clients keep, batch norm, gradients of gradients, and moving averages that clients track.
CASES = [("fl2", "static", "gpu"), ("fl2", "static", "xla"), ("feddure", "static", "xla"), ("fedsiam_mt", "running", "gpu")]
LOSSY = ("exp", "log", "log1p", "logistic", "rsqrt", "sqrt", "div", "erf", "integer_pow", "square", "cumsum")


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def traced(request):
    """The program of a run's start, its first round and an evaluation; its results' shapes."""
    method, norm, conv = request.param
    options = {"execution__dtype": "bfloat16", "execution__conv": conv, "model__norm": norm}
    simulator = Simulator(tiny.experiment(method, network="cnn", **options).problem, Execution(chunk_size=1))
    initialize, rounds, evaluation = (p._jitted for p in (simulator._initialize, simulator._round, simulator._evaluate))

    def run(key, inputs, pools):
        first, prepared = initialize(inputs, key, pools)
        state, _, metrics = rounds(first, inputs, pools)
        return first, state, (prepared, metrics, evaluation(state.server, inputs, pools)[0])

    key = jax.random.key(0)
    program, shapes = jax.make_jaxpr(run, return_shape=True)(key, simulator._inputs, simulator._pools)
    return program.jaxpr, shapes


def floats(tree):
    return {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


def test_states_and_metrics_are_float32(traced):
    _, (first, state, metrics) = traced
    assert all(floats(kept) for kept in (state.server.weights.params, state.server.weights.stats, state.clients))
    for tree in (first, state, metrics):
        assert floats(tree) == {jnp.dtype("float32")}
    assert {"client/loss", "eval/loss"} <= {name for part in metrics for name in part}


def test_convolutions_multiply_bfloat16(traced):
    program, _ = traced
    of_images = [eqn for eqn in products(program) if eqn.invars[0].aval.ndim == 4]
    assert len(of_images) > 20
    assert {factor.aval.dtype for eqn in of_images for factor in eqn.invars} == {jnp.dtype("bfloat16")}


def test_losses_statistics_and_steps_are_computed_in_float32(traced):
    low = [eqn for eqn in equations(traced[0]) if any(is_low(x) for x in eqn.invars)]
    assert not {eqn.primitive.name for eqn in low} & set(LOSSY)
    sums = [eqn for eqn in low if eqn.primitive.name == "reduce_sum"]
    assert all(eqn.invars[0].aval.size == eqn.outvars[0].aval.size for eqn in sums)  # of one number each


def test_nothing_but_what_is_convolved_is_rounded(traced):
    rounded = [
        x
        for eqn in equations(traced[0])
        if eqn.primitive.name == "convert_element_type"
        and not isinstance(eqn.invars[0], Literal)
        and eqn.invars[0].aval.dtype == jnp.float32  # not the zeros of a padding
        for x in eqn.outvars
        if is_low(x)
    ]
    assert rounded
    assert all(x.aval.ndim > 1 for x in rounded)  # no scale, bias, mean, variance, loss or metric


def is_low(x):
    return getattr(x.aval, "dtype", None) == jnp.bfloat16
