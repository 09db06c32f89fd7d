"""FedCon: what its server averages and trains, what travels, and what is drawn apart."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import Weights
from fedjax_ssl.method import Aggregate
from fedjax_ssl.methods.fedcon import FedConOptions, _both, _two_views
from tests import tiny
from tests.methods.clients import Client, same, server_data, traced_round


def close(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-4, atol=1e-6), a, b))


class Run(Client):
    def __init__(self):
        super().__init__("fedcon", client__epochs=0, client__steps=2, server__training__epochs=1, method__target_decay=0.9)
        self.change = self().update
        self.server_update = jax.jit(self.method.server_update)
        # A later round's state: with momentum, and a teacher that is not the model.
        self.state = self.at_end(self.server, self.change)

    def at_end(self, state, update, *, weight=1.0, labels=None):
        """The server's state after this average of updates, with the first `labels` of its labels."""
        data = server_data(self.experiment, [0, 1])
        if labels is not None:
            data = data._replace(labeled=data.labeled._replace(count=jnp.int32(labels)))
        return self.server_update(state, Aggregate(update, jnp.float32(weight)), data, jax.random.key(5))[0]


@pytest.fixture(scope="module")
def run():
    return Run()


@pytest.mark.ci
def test_without_labels_the_server_averages_backbones_and_keeps_classifier_and_teacher(run):
    got, state = run.at_end(run.state, run.change, labels=0), run.state
    assert same(got.weights.params["Dense_1"], state.weights.params["Dense_1"])
    assert same(got.extra.params, state.extra.params)
    assert got.extra.steps == state.extra.steps
    # With the momentum .5 of the tiny config; kernel and bias are the leaves of both trees.
    momentum = jax.tree.leaves(state.optimizer)
    assert all(np.any(v) for v in momentum)
    for name, change, v in zip(("bias", "kernel"), jax.tree.leaves(run.change.params), momentum, strict=True):
        expected = state.weights.params["Dense_0"][name] - (0.5 * v + change)
        np.testing.assert_allclose(got.weights.params["Dense_0"][name], expected, rtol=1e-5, atol=1e-6)


def test_the_server_trains_from_the_average(run):
    averaged = run.at_end(run.state, run.change, labels=0)
    lost = jax.tree.map(lambda x: x * jnp.nan, run.change)  # of a round without clients
    one, other = run.at_end(run.state, run.change), run.at_end(averaged, lost, weight=0.0)
    assert close(one.weights, other.weights)
    assert close(one.extra.params, other.extra.params)
    assert not close(one.weights.params["Dense_1"], run.state.weights.params["Dense_1"])
    assert [int(state.extra.steps) for state in (run.server, run.state, one)] == [0, 2, 4]  # 20 labels in batches of 10


def test_views_and_dropout_masks_are_drawn_apart():
    drawn = []
    _, keys, teacher_keys = _two_views(lambda key, images: drawn.append(key), None, jax.random.key(3))
    keys = [jax.random.key_data(key).tolist() for key in (*drawn, *keys, *teacher_keys)]
    assert len(keys) == 6
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_a_step_tracks_the_mean_of_its_two_batches_statistics():
    def forward(weights, view, mask, key):
        return view + key, {"layer": {"mean": view}}

    assert _both(forward, Weights({}, {}), [1.0, 4.0], None, [0.5, 0.25]) == ([1.5, 4.25], {"layer": {"mean": 2.5}})


def test_statistics_of_the_backbone_travel_where_they_are_tracked():
    client = Client("fedcon", network="cnn", model__norm="running")
    sent = client.trace().update
    shapes = [jax.tree.map(lambda x: x.shape, stats) for stats in (sent.stats, client.weights.stats)]
    assert shapes[0] == shapes[1] != {}
    assert set(sent.params) == set(client.weights.params) - {"Dense_0"}


def test_clients_start_from_a_common_head_whose_size_is_an_option(run):
    assert same(run.kept.head, jax.tree.map(lambda x: x[2], run.clients.head))
    assert FedConOptions().head_hidden == 0
    for hidden, expected in ((0, 96), (7, 7)):
        before, _, _ = traced_round(tiny.experiment("fedcon", method__head_hidden=hidden))
        assert before.clients.head["Dense_0"]["kernel"].shape == (8, 32, expected)
