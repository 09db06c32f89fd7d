"""Passes through networks, counted in programs: what is differentiated, how often a loop runs, and which branch is taken."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import train
from fedjax_ssl.local.counters import count_outputs
from fedjax_ssl.simulation.costs import with_passes

ROWS, IMAGES, WEIGHTS, KEY = 5, jnp.arange(15.0).reshape(5, 3), jnp.ones((3, 2)), jax.random.key(0)


def network(w):
    return count_outputs(IMAGES @ w)


def loss(w, scale=1.0):
    return jnp.sum(scale * network(w) ** 2)


def step(w):
    return w - 1e-3 * jax.grad(loss)(w)


def both_ways(w):
    outputs, pullback = jax.vjp(network, w)
    return pullback(outputs), pullback(2 * outputs)


def along(w):
    """How the outputs change along w, as the transpose of the way back."""
    outputs, pullback = jax.vjp(network, w)
    _, derivative = jax.vjp(pullback, outputs)
    return derivative((w,))


def scanned(w):
    """The sum of the losses at w, w/2, w/4 and w/8."""
    return jax.lax.scan(lambda carry, _: ((carry[0] + loss(carry[1]), carry[1] / 2), None), (0.0, w), length=4)[0][0]


PROGRAMS = {
    "forward": (network, 1, 0),
    "gradient": (jax.grad(loss), 1, 1),
    "jitted": (jax.jit(jax.grad(loss)), 1, 1),
    "rematerialized": (jax.value_and_grad(jax.checkpoint(loss)), 2, 1),
    "two pullbacks": (both_ways, 1, 2),
    "stopped": (jax.grad(lambda w: jnp.sum(jax.lax.stop_gradient(network(w)) * w.sum())), 1, 0),
    "not used": (lambda w: (network(w), w)[1], 0, 0),
    "the third of three": (lambda w: jax.lax.switch(jnp.int32(2), [lambda w: w, step, lambda w: step(step(w))], w), 2, 2),
    # A gradient through a gradient step: the inner's way back, reversed, is a pass forward along a direction.
    "look-ahead": (lambda w: jax.grad(lambda scale: loss(w - jax.grad(loss)(w, scale)))(1.0), 3, 2),
    # 2 X'X w, as the loss is quadratic: once forwards and once back, as the outputs do not enter it.
    "Hessian times a vector": (lambda w: jax.grad(lambda v: jnp.vdot(jax.grad(loss)(v), w))(w), 1, 1),
    "tangent": (along, 1, 0),  # the outputs themselves are not needed
    "vmap": (lambda w: jax.vmap(jax.grad(loss))(jnp.stack([w, w, w])), 3, 3),
    "map": (lambda w: jax.lax.map(network, jnp.stack([w, w, w])), 3, 0),
    "scan": (lambda w: jax.lax.scan(lambda w, _: (step(w), network(w)), w, length=4), 8, 4),
    "loop": (lambda w: jax.lax.fori_loop(0, 9, lambda _, w: step(w), w), 9, 9),
    "gradient of a scan": (jax.grad(scanned), 4, 4),
    "nested loops": (lambda w: jax.lax.fori_loop(0, 3, lambda i, w: jax.lax.fori_loop(0, i, lambda _, w: step(w), w), w), 3, 3),
}


@pytest.mark.parametrize(("function", "forward", "backward"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_is_counted(function, forward, backward):
    for program in (with_passes(function), jax.jit(with_passes(function))):
        got, passes = program(WEIGHTS)
        assert tuple(map(int, passes)) == (forward * ROWS, backward * ROWS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, function(WEIGHTS))


def test_a_loop_counts_as_often_as_it_runs_and_a_branch_where_it_is_taken():
    def update(number, chosen, w):
        def one(_, w):
            outputs, pullback = jax.vjp(network, w)
            return w + 1e-3 * jax.lax.cond(chosen, lambda: pullback(network(w))[0], lambda: w * outputs.sum())

        return jax.lax.while_loop(lambda carry: carry[0] < number, lambda c: (c[0] + 1, one(*c)), (0, w))

    program = jax.jit(jax.vmap(with_passes(update), (0, 0, None)))  # clients side by side, each with its own count
    numbers, chosen = jnp.array([0, 1, 3, 3]), jnp.array([True, True, True, False])
    (_, got), passes = program(numbers, chosen, WEIGHTS)
    assert passes.forward.number.tolist() == [0, 2 * ROWS, 6 * ROWS, 3 * ROWS]
    assert passes.backward.number.tolist() == [0, ROWS, 3 * ROWS, 0]
    for i in range(4):
        np.testing.assert_allclose(got[i], update(numbers[i], chosen[i], WEIGHTS)[1], rtol=1e-5)


class Steps(NamedTuple):
    """A schedule of one batch again and again."""

    steps: int | jax.Array

    def take(self, step):
        return Batch(jnp.arange(ROWS), jnp.ones(ROWS, bool))


def trained(w, steps):
    """The weights after some gradient steps, each of 3 ROWS forward passes' worth, and how many steps there were."""
    after = train((w, jnp.int32(0)), lambda carry, batch, key: ((step(carry[0]), carry[1] + 1), {}), Steps(steps), KEY)
    return after.carry


def client(w, steps, number=9):
    """ROWS forward before and after two trainings, the second of 2 steps."""
    before = network(w).sum()
    w, done = trained(w, steps)
    w, more = jax.lax.cond(number > 0, lambda: trained(w, 2), lambda: (w, jnp.int32(0)))
    return w, done, more, before + network(w).sum()


@pytest.mark.parametrize("is_traced", [False, True])  # a loop of a known length is a scan, others are a while
@pytest.mark.parametrize(
    ("allowed", "done", "more"), [(74, 4, 0), (75, 5, 0), (104, 5, 1), (105, 5, 2), (9e9, 5, 2), (14, 0, 0), (-5, 0, 0)]
)
def test_a_training_takes_no_step_that_is_not_allowed(allowed, done, more, is_traced):
    seen = []

    def allowance(outputs, passes):
        seen.append((outputs[1], passes))
        return jnp.float32(allowed)

    def program(steps):
        return with_passes(lambda w: client(w, steps), allowance)(WEIGHTS)

    (w, *counted, _), passes = jax.jit(program)(jnp.int32(5)) if is_traced else program(5)
    assert tuple(map(int, counted)) == (done, more)
    assert tuple(map(int, passes)) == ((2 + done + more) * ROWS, (done + more) * ROWS)
    expected, _ = trained(WEIGHTS, done + more)
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    if not is_traced:
        ((without, of_rest),) = seen
        assert (int(without), int(of_rest.forward), int(of_rest.backward)) == (0, 2 * ROWS, 0)


def test_each_of_several_clients_ends_its_training_in_its_own_time():
    def program(allowed, steps, number):
        return with_passes(lambda w: client(w, steps, number), lambda *_: allowed)(WEIGHTS)

    allowed, steps, number = jnp.float32([1000, 50, 1000, 0]), jnp.int32([4, 4, 0, 4]), jnp.array([1, 1, 0, 1])
    (_, done, more, _), passes = jax.jit(jax.vmap(program))(allowed, steps, number)
    assert (done.tolist(), more.tolist()) == ([4, 3, 0, 0], [2, 0, 0, 0])
    assert passes.backward.number.tolist() == [6 * ROWS, 3 * ROWS, 0, 0]


def test_loops_inside_of_a_step_and_other_loops_run_to_their_end():
    def of_two(w, batch, key):  # a step that is a training of two steps
        return trained(w, 2)[0], {}

    nested = with_passes(lambda w: train(w, of_two, Steps(3), KEY).carry, lambda *_: jnp.float32(80))
    plain = with_passes(lambda w: jax.lax.fori_loop(0, 9, lambda _, w: step(w), w), lambda *_: jnp.float32(0))
    assert int(nested(WEIGHTS)[1].backward) == 4 * ROWS  # two whole steps of 30, though five inner ones would fit
    assert int(plain(WEIGHTS)[1].backward) == 9 * ROWS


def test_marks_change_nothing_that_is_computed():
    def unmarked(w):
        return jnp.sum((IMAGES @ w) ** 2)

    for of_marked, of_unmarked in ((loss, unmarked), (jax.grad(loss), jax.grad(unmarked))):
        marked, plain = (jax.jit(f).lower(WEIGHTS).compile().cost_analysis() for f in (of_marked, of_unmarked))
        assert marked["flops"] == plain["flops"]
        np.testing.assert_array_equal(of_marked(WEIGHTS), of_unmarked(WEIGHTS))
