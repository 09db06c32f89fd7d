"""FedCon: what stays with whom, who averages what, and a client that comes back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import Weights
from fedjax_ssl.method import Aggregate
from fedjax_ssl.methods.fedcon import FedConOptions, _both, _two_views
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.round import attach, gather
from tests import engine, tiny
from tests.methods.clients import Client, same, traced_round


def close(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-4, atol=1e-6), a, b))


class Run:
    """Four rounds with two of three clients each: the states before, between and after them, and the rows."""

    def __init__(self):
        quick = {"client__epochs": 0, "client__steps": 2, "server__epochs": 1, "method__target_decay": 0.9}
        # With seed 1 the cohorts are 0 and 1, 0 and 2, 0 and 1, 1 and 2: client 1 comes back after a round without it.
        self.experiment = tiny.experiment("fedcon", data__num_clients=3, cohort_size=2, seed=1, **quick)
        self.method, self.data = self.experiment.method, self.experiment.problem.data
        _, self.states, self.rows = engine.simulate(self.experiment, rounds=4)
        self.key = jax.random.key(1)
        self.cohorts = [sample(self.key, jnp.int32(r), self.experiment.problem.spec, 4) for r in range(4)]
        self.update, self.server_update = jax.jit(self.method.client_update), jax.jit(self.method.server_update)

    def own(self, number: int, k: int):
        """What client k keeps after `number` rounds."""
        return jax.tree.map(lambda x: x[k], self.states[number].clients)

    def broadcast(self, number: int):
        return self.method.broadcast(self.states[number].server, None, self.cohorts[number])[0]

    def given(self, number: int):
        """The data of a round."""
        rows = gather(self.data, *[jax.device_get(self.cohorts[number])] * 2)
        return jax.tree.map(jnp.asarray, rows)

    def again(self, number: int, k: int, own):
        """Client k's update of a round, counted from 0, with the state `own`."""
        rows = self.given(number)
        at = self.cohorts[number].ids.tolist().index(k)
        shard = attach(jax.tree.map(lambda x: x[at], rows.clients), rows.images)
        (key,) = rng.client_keys(self.key, jnp.int32(number), jnp.array([k]))
        return self.update(self.broadcast(number), (), own, shard, key)

    def server(self, state, update, *, weight=1.0, labels=None):
        """The server's work at the end of round 1 with this average of updates and the first `labels` of its labels."""
        rows = self.given(0)
        data = attach(rows.server, rows.images)
        if labels is not None:
            data = data._replace(labeled=data.labeled._replace(count=jnp.int32(labels)))
        return self.server_update(state, Aggregate(update, jnp.float32(weight)), data, jax.random.key(5))[0]


@pytest.fixture(scope="module")
def run():
    return Run()


def test_a_clients_own_state_changes_in_its_rounds_alone(run):
    took_part = set()
    for number, cohort in enumerate(run.cohorts):
        ids = np.asarray(cohort.ids).tolist()
        for k in range(3):
            before, after = run.own(number, k), run.own(number + 1, k)
            assert bool(before.seen) == (k in took_part)
            assert same(before, after) == (k not in ids)
        took_part |= set(ids)


def test_a_client_continues_what_it_kept_and_nobody_elses(run):
    assert [sorted(np.asarray(cohort.ids).tolist()) for cohort in run.cohorts] == [[0, 1], [0, 2], [0, 1], [1, 2]]
    k, back = 1, 2
    expected, kept = run.own(back + 1, k), run.own(back, k)
    got = run.again(back, k, kept).client_state
    assert close((got.head, got.target), (expected.head, expected.target))
    assert same(kept, run.own(back - 1, k))
    for other in set(range(3)) - {k}:
        assert not close(run.again(back, k, run.own(back, other)).client_state.head, expected.head)
    # Its average goes on from the one it kept, not from the backbone that it received: .81 of it after two steps.
    received = run.broadcast(back).weights.params["Dense_0"]["kernel"]
    to_kept, to_received = (
        np.linalg.norm(expected.target["Dense_0"]["kernel"] - x) for x in (kept.target["Dense_0"]["kernel"], received)
    )
    assert to_kept < to_received


def test_clients_start_from_a_common_head(run):
    assert same(run.own(0, 0).head, run.own(0, 2).head)


def test_without_labels_the_server_averages_backbones_and_keeps_classifier_and_teacher(run):
    state = run.states[1].server
    momentum = jax.tree.leaves(run.states[1].server.optimizer)
    update = run.again(1, 0, run.own(1, 0)).update
    got = run.server(state, update, labels=0)
    assert same(got.weights.params["Dense_1"], state.weights.params["Dense_1"])
    assert same(got.teacher, state.teacher)
    assert got.steps == state.steps
    # With the momentum .5 of the tiny config; kernel and bias are the leaves of both trees.
    for name, change, v in zip(("bias", "kernel"), jax.tree.leaves(update.params), momentum, strict=True):
        expected = state.weights.params["Dense_0"][name] - (0.5 * v + change)
        np.testing.assert_allclose(got.weights.params["Dense_0"][name], expected, rtol=1e-5, atol=1e-6)


def test_the_server_trains_from_the_average(run):
    state, update = run.states[1].server, run.again(1, 0, run.own(1, 0)).update
    averaged = run.server(state, update, labels=0)
    nothing = jax.tree.map(jnp.zeros_like, update)
    one, other = run.server(state, update), run.server(averaged, nothing, weight=0.0)
    assert close(one.weights, other.weights)
    assert close(one.teacher, other.teacher)
    assert not close(one.weights.params["Dense_1"], state.weights.params["Dense_1"])
    # 20 labels in batches of 10, once per round and once before the first.
    assert [int(s.server.steps) for s in run.states] == [2, 4, 6, 8, 10]


def test_views_and_dropout_masks_are_drawn_apart():
    drawn = []
    _, keys, teacher_keys = _two_views(lambda key, images: drawn.append(key), None, jax.random.key(3))
    keys = [jax.random.key_data(key).tolist() for key in (*drawn, *keys, *teacher_keys)]
    assert len(keys) == 6
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_a_step_tracks_the_mean_of_its_two_batches_statistics():
    def forward(weights, view, mask, key):
        del weights, mask
        return view + key, {"layer": {"mean": view}}

    outputs, stats = _both(forward, Weights({}, {}), [1.0, 4.0], None, [0.5, 0.25])
    assert outputs == [1.5, 4.25]
    assert stats == {"layer": {"mean": 2.5}}


def test_statistics_of_the_backbone_travel_where_they_are_tracked():
    client = Client("fedcon", network="cnn", model__norm="running")
    sent = client.trace().update
    shapes = [jax.tree.map(lambda x: x.shape, stats) for stats in (sent.stats, client.weights.stats)]
    assert shapes[0] == shapes[1] != {}
    assert set(sent.params) == set(client.weights.params) - {"Dense_0"}


def test_the_heads_size_is_an_option():
    assert FedConOptions().head_hidden == 0
    for hidden, expected in ((0, 96), (7, 7)):
        before, _, _ = traced_round(tiny.experiment("fedcon", method__head_hidden=hidden))
        assert before.clients.head["Dense_0"]["kernel"].shape == (8, 32, expected)
