"""FixMatch and FreeMatch on pooled data by their edge cases: no unlabeled data, batch norm, evaluation, batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.experiment.arguments import server_of
from fedjax_ssl.local import Weights
from fedjax_ssl.local.server import with_statistics
from fedjax_ssl.method import Aggregate
from fedjax_ssl.methods.central import step_inputs
from tests import tiny
from tests.methods.clients import flat, recorded_passes, same, server_data, task_of

NAMES = ("freematch_central", "fixmatch_central")


class Server:
    def __init__(self, name, network="linear", **overrides):
        overrides = {"server__training__epochs": 0, "server__training__steps": 3, "method__mu": 2, **overrides}
        self.experiment = tiny.experiment(name, network=network, **overrides)
        self.method, problem = self.experiment.method, self.experiment.problem
        self.data = server_data(self.experiment, range(5))
        self.start = jax.jit(lambda key: self.method.init(key, problem.spec)[0])
        self.update = lambda state, data: self.method.server_update(state, Aggregate((), 0.0), data, jax.random.key(1))
        self.round = jax.jit(self.update)

    @functools.cached_property
    def state(self):
        return self.start(jax.random.key(0))

    def shapes(self):
        before = jax.eval_shape(self.start, jax.random.key(0))
        return before, jax.eval_shape(self.update, before, self.data)[0]


@pytest.mark.ci
def test_freematch_without_unlabeled_data_trains_on_labels_and_keeps_its_status():
    server = Server("freematch_central")
    without_pool = server.data._replace(unlabeled=server.data.unlabeled._replace(count=jnp.int32(0)))
    state, metrics = server.round(server.state, without_pool)
    assert np.isfinite(metrics["server/loss"].total)
    assert metrics["server/mask_rate"].weight == 0
    assert not same(state.weights, server.state.weights)
    assert np.isfinite(flat(state)).all()
    assert same(state.status, server.state.status)
    state, metrics = server.round(server.state, server.data)
    assert 0.1 < state.status.tau < 1
    assert 0 < metrics["server/mask_rate"].total <= metrics["server/mask_rate"].weight == 3 * 2 * 10


@pytest.mark.ci
def test_the_running_statistics_are_tracked_at_every_step_and_tested_with_the_average():
    server = Server("fixmatch_central", network="cnn", model__norm="running", model__norm_momentum=0.25)
    start = server.state
    shifted = start._replace(weights=start.weights._replace(stats=jax.tree.map(lambda x: x + 1, start.weights.stats)))
    one, other = (server.round(state, server.data)[0] for state in (start, shifted))
    # Training normalizes by the batch, so that what it adds to the statistics does not depend on them.
    np.testing.assert_allclose(flat(other.weights.stats) - flat(one.weights.stats), 0.75**3, rtol=1e-4)
    assert same(one.average, other.average)

    predict = jax.jit(server.method.predict["global"])
    images, mask = server.data.labeled.images[:4], jnp.ones(4, bool)
    of_one, of_other, of_live = (
        predict(state, images, mask) for state in (one, other, one._replace(average=one.weights.params))
    )
    assert not np.allclose(of_one, of_other)
    assert not np.allclose(of_one, of_live)
    spoiled = one._replace(weights=one.weights._replace(params=jax.tree.map(jnp.zeros_like, one.weights.params)))
    assert same(predict(spoiled, images, mask), of_one)


@pytest.mark.ci
def test_static_statistics_are_those_of_the_evaluated_average():
    server = Server("fixmatch_central", network="cnn", server__static_norm__data="labeled")
    task, static_norm = task_of(server.experiment), server_of(server.experiment.settings).static_norm
    collect = jax.jit(lambda weights: with_statistics(task, static_norm, weights, server.data).stats)
    state, _ = server.round(server.state, server.data)
    got, stats = flat(state.weights.stats), server.state.weights.stats
    np.testing.assert_allclose(got, flat(collect(Weights(state.average, stats))), rtol=1e-4, atol=1e-6)
    assert not np.allclose(got, flat(collect(Weights(state.weights.params, stats))), rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_with_batch_norm_one_pass_sees_labeled_weak_and_strong_views_with_a_dropout_key(monkeypatch, name):
    passes = recorded_passes(monkeypatch)
    Server(name, network="cnn", model__norm="batch", server__training__batch_size=5).shapes()
    ((size, _, key),) = passes
    assert size == 5 + 2 * 2 * 5
    assert key is not None


def test_epochs_are_those_of_the_labeled_data():
    server = Server(
        "fixmatch_central", server__training__epochs=2, server__training__steps=0, server__training__batch_size=8
    )  # 20 labels
    training = server_of(server.experiment.settings).training
    inputs = jax.eval_shape(lambda: step_inputs(training, 2, server.data, jax.random.split(jax.random.key(0))))
    assert inputs.labeled.positions.shape == (2 * 3, 8)
    assert inputs.unlabeled.positions.shape == (2 * 3, 16)


def test_the_optimizer_is_kept_where_it_persists():
    (kept, kept_after), (fresh, fresh_after) = (
        Server("fixmatch_central", server__training__optimizer__persistent=persistent).shapes() for persistent in (True, False)
    )
    assert jax.tree.leaves(kept.optimizer)
    assert kept == kept_after
    assert fresh.optimizer == fresh_after.optimizer == ()
