"""Whole numbers that an int32 does not hold: sums of bytes, of examples and of passes, exact at the bounds of the settings."""

import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local.counters import count_outputs
from fedjax_ssl.local.training import train
from fedjax_ssl.metrics import Sum, add, added, reduce, values, whole
from fedjax_ssl.options import MANY
from fedjax_ssl.simulation.costs import with_passes
from tests import tiny
from tests.methods.clients import Client, finite, norm, traced_round

NUMBERS = [0, 1, 2**30 - 1, 2**30, MANY, 2**31, 23 * 4 * 23_401_012, 10**7 * 10**6, 2**59 - 1]


@pytest.mark.parametrize("first", NUMBERS)
def test_a_sum_is_exact_below_2_to_the_60(first):
    plus = jax.jit(lambda a, b: a.plus(b))
    for second in NUMBERS:
        assert int(whole(second)) == second
        assert int(plus(whole(first), whole(second))) == first + second
    if first <= MANY:
        assert int(plus(Sum(jnp.int32(first)), Sum(jnp.int32(MANY)))) == first + MANY
    assert float(whole(first).number) == np.float32(first)


def test_many_numbers_of_clients_and_rounds_add_up():
    of_client = added(jnp.full(1000, MANY))
    assert int(of_client) == 1000 * MANY
    of_cohort = jax.tree.map(lambda *x: jnp.stack(x), *[of_client] * 100)
    assert values(of_cohort).tolist() == [1000 * MANY] * 100
    assert reduce({"comm/bytes_down": of_cohort, "client/id": Sum(jnp.arange(3))}) == {
        "comm/bytes_down": 100_000 * MANY,
        "client/id": 3,
    }


def test_sums_of_numbers_that_are_not_whole_stay_float32():
    total = add(
        {"a": Sum(jnp.float32(0.5)), "b": Sum(jnp.array([MANY, 1]))}, {"a": Sum(jnp.float32(0.25)), "b": Sum(jnp.array([1, 1]))}
    )
    assert (float(values(total["a"])), values(total["b"]).tolist()) == (0.75, [2**31, 2])


class Batches(NamedTuple):
    """Four batches of as many examples as an int32 holds."""

    steps: int = 4

    @property
    def real(self):
        return jnp.int32(MANY)

    def take(self, step):
        return self


def test_a_training_counts_more_examples_than_an_int32_holds():
    trained = jax.jit(
        lambda: train(jnp.zeros(()), lambda carry, batch, key: (carry, {"n": Sum(batch.real)}), Batches(), jax.random.key(0))
    )()
    assert int(trained.images) == int(trained.metrics["n"]) == 4 * MANY


def test_passes_are_counted_beyond_an_int32():
    rows, times = 2**20, 5_000

    def program(x):
        return jax.lax.fori_loop(0, times, lambda _, x: x + count_outputs(jnp.broadcast_to(x, (rows, 1)))[0, 0], x)

    _, passes = jax.jit(with_passes(program))(jnp.zeros(()))
    assert int(passes.forward) == rows * times > MANY
    assert float(passes.as_forward) == rows * times


def test_counts_of_a_runs_rounds_do_not_wrap_around_at_the_bounds():
    alpha = importlib.import_module("fedjax_ssl.methods.fedtrinet").alpha
    assert float(alpha(jnp.int32(MANY), jnp.int32(10_000))) == pytest.approx(0.15)
    client = Client("fedsiam_mt", labels_at="clients", network="linear")
    many = client.kept._replace(steps=jnp.int32(MANY // 2), epochs=jnp.int32(MANY // 2))
    output = client(kept=many)
    assert finite(output)
    assert (int(output.client_state.steps), int(output.client_state.epochs)) == (MANY // 2, MANY // 2)
    alpha_max = client.experiment.settings.method.alpha_max
    followed = alpha_max ** float(output.metrics["perf/client_images"].total / 8)  # the target hardly moves
    online, target = (norm(getattr(output.update.params, name)) for name in ("online", "target"))
    assert target < (1 - followed) * online * 1.1


BOUNDS = {
    "fedsiam_d": {"method__target_delay": MANY, "method__pi_rounds": 3.0},
    "fedcon": {"method__ramp_rounds": MANY, "server__training__pretrain": 10_000},
    "fedtrinet": {"method__labeled_rounds": float(MANY - 1)},
    "fedsem": {"method__labeled_rounds": float(MANY - 1)},
    "fedlabel": {"method__burn_in": float(MANY - 1), "method__unlabeled_steps": 10_000_000},
    "fedmatch": {"method__helpers": MANY, "method__helper_period": MANY},
}
"""Settings that count rounds, steps or clients, at their bounds."""


@pytest.mark.parametrize("method", [pytest.param(name, marks=() if name == "fedmatch" else pytest.mark.ci) for name in BOUNDS])
def test_a_round_is_traced_with_its_counts_at_their_bounds(method):
    experiment = tiny.experiment(method, network="mlp", rounds=MANY, **BOUNDS[method])
    before, after, _ = traced_round(experiment)
    assert jax.tree.structure(before) == jax.tree.structure(after)
