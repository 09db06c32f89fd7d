"""Methods and networks with dropout and without batch norm: who gets a dropout key, and that a round runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.experiment import build
from fedjax_ssl.local.task import Task, dropout_key
from fedjax_ssl.method import Cohort, Shard
from fedjax_ssl.methods import METHODS, SERVER_ALONE, local, server
from fedjax_ssl.methods.fl2 import FL2Options, Labeling, client_gradient
from fedjax_ssl.models import MODELS, norm
from fedjax_ssl.models.layers import dropout
from tests import tiny


@pytest.fixture
def passes(monkeypatch):
    """The dropout keys of all passes in training mode that are traced or run."""
    keys = []

    def record(name):
        original = getattr(Task, name)

        def recorded(self, weights, images, mask, key=None):
            keys.append(key)
            return original(self, weights, images, mask, key)

        monkeypatch.setattr(Task, name, recorded)

    record("train_logits")
    record("train_features")
    return keys


def client_shard(experiment):
    data = experiment.problem.data
    images, labels = jnp.asarray(data.train.images), jnp.asarray(data.train.labels)
    index = jnp.asarray(data.unlabeled.index[0])
    unlabeled = Examples(images, index, jnp.int32(len(index)), None)
    return Shard(Examples(images, index[:1], jnp.int32(0), labels[:1]), unlabeled, labels[index])


@pytest.mark.parametrize("name", METHODS)
def test_every_training_pass_of_a_client_has_a_dropout_key(passes, name):
    experiment = tiny.experiment(name)
    method, _, spec, _ = experiment.problem

    def update(key):
        state, clients = method.init(key, spec)
        shared, own = method.broadcast(state, clients, Cohort(jnp.arange(5), jnp.int32(0)))
        first = [jax.tree.map(lambda x: x[0], tree) for tree in (own, clients)]
        return method.client_update(shared, *first, client_shard(experiment), key).update

    jax.eval_shape(update, jax.random.key(0))
    assert all(key is not None for key in passes)
    assert bool(passes) == (name not in SERVER_ALONE)  # whose clients do not train


def task_of(experiment):
    settings = experiment.settings
    _, dataset, views = build._data(settings, None)
    return build._task(settings, views, dataset.num_classes, "cpu")


def first_batch():
    return Batch(jnp.arange(4), jnp.ones(4, bool))


@pytest.mark.parametrize("consistency", ["sacr", "sam", "none"])
def test_all_passes_of_a_step_share_one_dropout_key(passes, consistency):
    experiment = tiny.experiment("fl2")
    shard, task = client_shard(experiment), task_of(experiment)
    mask = shard.unlabeled.mask
    gradient = client_gradient(
        task, FL2Options(consistency=consistency), shard, Labeling(shard.truth, mask, mask, jnp.ones(()))
    )
    weights = task.init(jax.random.key(0), (8, 8, 1))

    @jax.jit
    def keys_of_a_step(key):  # XLA drops the step itself
        gradient(weights, first_batch(), key)
        return [jax.random.key_data(key) for key in passes]

    keys = keys_of_a_step(jax.random.key(7))
    assert len(keys) == (1 if consistency == "none" else 2)
    for key in keys:
        np.testing.assert_array_equal(key, jax.random.key_data(dropout_key(jax.random.key(7))))


def test_each_supervised_step_drops_by_its_own_key_and_collecting_statistics_by_none(passes):
    experiment = tiny.experiment("supervised")
    shard, task = client_shard(experiment), task_of(experiment)
    examples = shard.unlabeled._replace(labels=shard.truth)
    weights = task.init(jax.random.key(0), (8, 8, 1))
    gradient = local.supervised_gradient(task, examples)
    for step in (0, 1):
        gradient(weights, first_batch(), jax.random.fold_in(jax.random.key(3), step))
    one, two = (jax.random.key_data(key) for key in passes)
    assert not np.array_equal(one, two)
    passes.clear()
    settings = server.StaticNorm("labeled", "examples", 4, 4)
    jax.eval_shape(lambda: server._collect(task, settings, weights, examples, 4, norm.start({})))
    assert passes == [None]


class DroppingMLP(nn.Module):
    num_classes: int
    conv: Any
    hidden: int = 32

    @nn.compact
    def __call__(self, images, mask=None, train=False, features_only=False):
        x = nn.relu(nn.Dense(self.hidden)(images.reshape(images.shape[0], -1)))
        x = dropout(self, x, 0.5)
        return x if features_only else nn.Dense(self.num_classes)(x)


def test_a_step_drops_where_the_network_does(monkeypatch):
    monkeypatch.setitem(MODELS, "mlp", DroppingMLP)
    experiment = tiny.experiment("supervised")
    shard, task = client_shard(experiment), task_of(experiment)
    weights = task.init(jax.random.key(0), (8, 8, 1))
    gradient = local.supervised_gradient(task, shard.unlabeled._replace(labels=shard.truth))
    steps = [gradient(weights, first_batch(), jax.random.key(0)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *steps)
    monkeypatch.setattr(local, "dropout_key", lambda key: None)
    whole = gradient(weights, first_batch(), jax.random.key(0))
    silent = [np.sum(np.all(step.grad["Dense_1"]["kernel"] == 0, axis=1)) for step in (steps[0], whole)]
    assert silent[0] > silent[1]  # hidden units that all four examples drop or that ReLU silences


@pytest.mark.parametrize("name", METHODS)
def test_a_network_with_dropout_and_without_batch_norm_has_no_statistics_pass(monkeypatch, name):
    monkeypatch.setitem(MODELS, "mlp", DroppingMLP)
    monkeypatch.setattr(server, "_collect", None)  # there is nothing to collect: the pass must not be there
    simulator = tiny.experiment(name).simulator
    state, _, _ = simulator._round.eval_shape(simulator.template(0), simulator._data)
    assert not jax.tree.leaves(state.server.weights.stats)


def test_a_round_of_a_network_with_dropout_is_finite(monkeypatch):
    monkeypatch.setitem(MODELS, "mlp", DroppingMLP)
    experiment = tiny.experiment("fixmatch")
    state, metrics = experiment.simulator.round(experiment.start()[0])
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.server.weights))
