"""Passes through networks, as they are counted: what is differentiated, how often, and what is behind a condition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_ssl.methods.passes import Passes

from fedjax_ssl.methods import passes

ROWS, IMAGES, WEIGHTS = 5, jnp.arange(15.0).reshape(5, 3), jnp.ones((3, 2))


def network(w):
    return passes.mark(IMAGES @ w)


def loss(w, scale=1.0):
    return jnp.sum(scale * network(w) ** 2)


def both_ways(w):
    outputs, pullback = jax.vjp(network, w)
    return pullback(outputs), pullback(2 * outputs)


def along(w):
    outputs, pullback = jax.vjp(network, w)
    return passes.tangent(pullback, outputs, w)


def look_ahead(w):
    """A gradient through a gradient step: back through the outer network, and through the inner's way back."""
    return jax.grad(lambda scale: loss(w - jax.grad(loss)(w, scale)))(1.0)


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (network, 1, 0),
        (jax.grad(loss), 1, 1),
        (both_ways, 1, 2),
        (lambda w: jax.grad(lambda v: jnp.sum(jax.lax.stop_gradient(network(v)) * v.sum()))(w), 1, 0),
        (lambda w: jax.vmap(jax.grad(loss))(w[None]), 1, 1),
        (look_ahead, 2, 3),
        (along, 2, 0),
        (lambda w: passes.map(network, jnp.stack([w, w, w])), 3, 0),
        (lambda w: jax.lax.fori_loop(0, 9, lambda _, w: w - jax.grad(loss)(w), w), 1, 1),
    ],
    ids=["forward", "gradient", "two pullbacks", "stopped", "vmap", "look-ahead", "tangent", "map", "loop"],
)
def test_what_is_counted(function, forward, backward):
    for _ in range(2):  # what was traced once is counted again
        shapes, got = passes.count(function, WEIGHTS)
        assert got == Passes(forward * ROWS, backward * ROWS)
    expected = jax.eval_shape(function, WEIGHTS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


@pytest.mark.parametrize("chosen", [True, False])
def test_of_a_condition_the_branch_that_is_taken_counts(chosen):
    def update(chosen, w):
        def step(w):
            outputs, pullback = jax.vjp(network, w)
            return passes.cond(chosen, lambda: pullback(network(w))[0], lambda: w * outputs.sum())

        return passes.count(step, w)[1].times(3), step(w)

    got, result = jax.jit(update)(chosen, WEIGHTS)
    assert tuple(map(int, got)) == ((6 * ROWS, 3 * ROWS) if chosen else (3 * ROWS, 0))
    outputs = np.asarray(IMAGES @ WEIGHTS)
    np.testing.assert_allclose(result, IMAGES.T @ outputs if chosen else WEIGHTS * outputs.sum(), rtol=1e-6)


def test_outside_of_a_count_nothing_changes():
    np.testing.assert_allclose(along(WEIGHTS), network(WEIGHTS), rtol=1e-6)
    np.testing.assert_array_equal(passes.map(network, WEIGHTS[None])[0], IMAGES @ WEIGHTS)
    assert "custom_vjp" not in str(jax.make_jaxpr(jax.grad(loss))(WEIGHTS))
