"""Networks with dropout and without batch norm: who drops by which key, and that a round runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_ssl import local
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import dropout_key, objectives, server
from fedjax_ssl.methods.fl2 import FL2Options, Labeling, client_gradient
from fedjax_ssl.models import MODELS, norm
from fedjax_ssl.models.layers import dropout
from fedjax_ssl.models.registry import Model
from tests import tiny
from tests.methods.clients import Client, recorded_passes, traced_round

BATCH = Batch(jnp.arange(4), jnp.ones(4, bool))


@pytest.mark.parametrize("case", tiny.params(fast=tiny.FEW))
def test_every_training_pass_of_a_client_has_a_dropout_key(monkeypatch, case):
    method, labels_at = case
    client = Client(method, labels_at=labels_at)
    passes = recorded_passes(monkeypatch)
    client.trace()
    assert all(key is not None for _, _, key in passes)
    assert bool(passes) == client.method.requires.clients


@pytest.mark.parametrize("consistency", ["sacr", "sam", "none"])
def test_all_passes_of_a_step_share_one_dropout_key(monkeypatch, consistency):
    client, passes = Client("fl2"), recorded_passes(monkeypatch)
    client_data = client.client_data()
    mask = client_data.unlabeled.mask
    labeling = Labeling(client_data.true_labels, mask, mask, jnp.ones(()), jnp.ones(len(mask)), jnp.ones(10))
    gradient = client_gradient(client.task, FL2Options(consistency=consistency), client_data, labeling)

    @jax.jit
    def keys_of_a_step(key):  # XLA drops the step itself
        gradient(client.weights, BATCH, key)
        return [jax.random.key_data(key) for _, _, key in passes]

    keys = keys_of_a_step(jax.random.key(7))
    assert len(keys) == (1 if consistency == "none" else 2)
    for key in keys:
        np.testing.assert_array_equal(key, jax.random.key_data(dropout_key(jax.random.key(7))))


def test_each_supervised_step_drops_by_its_own_key_and_collecting_statistics_by_none(monkeypatch):
    client, passes = Client("fedavg"), recorded_passes(monkeypatch)
    task, examples = client.task, client.client_data().labeled
    gradient = local.supervised_gradient(task, examples)
    for step in (0, 1):
        gradient(client.weights, BATCH, jax.random.fold_in(jax.random.key(3), step))
    one, two = (jax.random.key_data(key) for _, _, key in passes)
    assert not np.array_equal(one, two)
    passes.clear()
    settings = server.StaticNorm("labeled", "examples", 4, 4)
    jax.eval_shape(lambda: server._collect(task, settings, client.weights, examples, 4, norm.start({})))
    assert [key for _, _, key in passes] == [None]


class DroppingMLP(nn.Module):
    num_classes: int
    hidden: int = 32

    @nn.compact
    def __call__(self, images, mask=None, train=False, features_only=False):
        x = nn.relu(nn.Dense(self.hidden)(images.reshape(images.shape[0], -1)))
        x = dropout(self, x, 0.5)
        return x if features_only else nn.Dense(self.num_classes)(x)


@pytest.fixture
def dropping(monkeypatch):
    monkeypatch.setitem(MODELS, "mlp", Model(DroppingMLP))


def test_a_step_drops_where_the_network_does(monkeypatch, dropping):
    client = Client("fedavg")
    gradient = local.supervised_gradient(client.task, client.client_data().labeled)
    steps = [gradient(client.weights, BATCH, jax.random.key(0)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *steps)
    monkeypatch.setattr(objectives, "dropout_key", lambda key: None)
    whole = gradient(client.weights, BATCH, jax.random.key(0))
    silent = [np.sum(np.all(step.grad["Dense_1"]["kernel"] == 0, axis=1)) for step in (steps[0], whole)]
    assert silent[0] > silent[1]  # hidden units that all four examples drop or that ReLU silences


@pytest.mark.parametrize("name", ["fl2", "fedcon", "fedsiam_d", "fedtrinet", "fixmatch_central"])
def test_a_network_with_dropout_and_without_batch_norm_has_no_statistics_pass(monkeypatch, dropping, name):
    monkeypatch.setattr(server, "_collect", None)  # there is nothing to collect: the pass must not be there
    _, state, _ = traced_round(tiny.experiment(name))
    assert not jax.tree.leaves(state.server.weights.stats)


def test_each_step_of_a_training_has_its_own_key():
    def step(drawn, batch, key):
        return drawn.at[batch.step].set(jax.random.bits(key)), {}

    schedule = batching.shuffled(jax.random.key(0), jnp.ones(6, bool), 2, epochs=1)
    trained = local.train(jnp.zeros(3, jnp.uint32), step, schedule, jax.random.key(1))
    expected = [int(jax.random.bits(jax.random.fold_in(jax.random.key(1), s))) for s in range(3)]
    assert trained.carry.tolist() == expected
    assert len(set(expected)) == 3
