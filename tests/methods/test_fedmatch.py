"""FedMatch by its edge cases (no data, nobody confident, no helpers), and with labels at the clients under two strategies."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import Cohort, Shard
from fedjax_ssl.methods.fedmatch import FedMatchOptions
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy

PLAIN = {"network": "linear", "data__weak": "none"}
AT_CLIENTS = {"labels_at": "clients", "client__epochs": 1, "client__batch_size": 16}


class Client:
    """The first client of a tiny experiment with a linear network, jitted once."""

    def __init__(self, **overrides):
        self.experiment = tiny.experiment("fedmatch", **PLAIN, **overrides)
        self.method, data, spec, _ = self.experiment.problem
        self.server, self.clients = jax.jit(lambda key: self.method.init(key, spec))(jax.random.key(0))
        self.kept = jax.tree.map(lambda x: x[0], self.clients)
        self.images, self.labels = jnp.asarray(data.train.images), jnp.asarray(data.train.labels)
        self.labeled, self.unlabeled = jnp.asarray(data.labeled.index[0]), jnp.asarray(data.unlabeled.index[0])
        self.update = jax.jit(self.method.client_update)
        self.broadcast = jax.jit(self.method.broadcast)

    def __call__(self, *, labeled=None, unlabeled=None, number=0):
        shared, own = self.broadcast(self.server, self.clients, Cohort(jnp.arange(5), jnp.int32(number)))
        own = jax.tree.map(lambda x: x[0], own)
        counts = [len(self.labeled) if labeled is None else labeled, len(self.unlabeled) if unlabeled is None else unlabeled]
        shard = Shard(
            Examples(self.images, self.labeled, jnp.int32(counts[0]), self.labels[self.labeled]),
            Examples(self.images, self.unlabeled, jnp.int32(counts[1]), None),
            self.labels[self.unlabeled],
        )
        return self.update(shared, own, self.kept, shard, jax.random.key(1))


@pytest.fixture(scope="module")
def at_server():
    """Nobody is confident, and nothing else moves psi."""
    return Client(method__confidence=1.0, method__lambda_l1=0.0, method__lambda_l2=0.0, client__optimizer__weight_decay=0.0)


@pytest.fixture(scope="module")
def at_clients():
    return Client(**AT_CLIENTS)


def norm(tree) -> float:
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def finite(output) -> bool:
    return all(np.isfinite(x).all() for x in jax.tree.leaves((output.update, output.client_state, output.metrics)))


def test_without_a_confident_example_psi_stays_and_nothing_is_uploaded(at_server):
    output = at_server()
    assert norm(output.update) == 0
    assert output.weight == 1
    assert output.metrics["comm/bytes_up"].total == 0
    assert output.metrics["client/loss"].weight == 0
    assert same(output.client_state.psi, at_server.server.weights.params.psi)
    assert bool(output.client_state.seen)
    assert finite(output)


def test_a_client_without_images_takes_no_part_and_stays_new(at_server):
    output = at_server(unlabeled=0)
    assert output.weight == 0
    assert norm(output.update) == 0
    assert same(output.client_state, at_server.kept)


def test_a_helper_round_without_helpers_is_a_round_without_helpers(at_clients):
    # Nobody has been seen yet. Round 2 (number 1) is a helper round in tiny experiments.
    assert at_clients.experiment.settings.method["helper_period"] == 2
    alone, none_there = at_clients(number=0), at_clients(number=1)
    assert none_there.metrics["client/consistency_loss"].weight == 0
    assert none_there.metrics["comm/bytes_down"] == alone.metrics["comm/bytes_down"]
    assert same(alone.update, none_there.update)
    assert norm(alone.update.params.sigma) > 0
    assert norm(alone.update.params.psi) > 0


def test_with_labels_at_the_clients_one_without_labels_trains_psi_alone(at_clients):
    output = at_clients(labeled=0)
    assert output.weight == 1
    assert norm(output.update.params.sigma) == 0
    assert norm(output.update.params.psi) > 0
    assert same(output.client_state.optimizer[0], at_clients.kept.optimizer[0])
    assert finite(output)


def test_with_labels_at_the_clients_one_without_any_data_takes_no_part(at_clients):
    output = at_clients(labeled=0, unlabeled=0)
    assert output.weight == 0
    assert norm(output.update) == 0
    assert same(output.client_state, at_clients.kept)


def test_a_client_without_unlabeled_examples_learns_from_its_labels(at_clients):
    output = at_clients(unlabeled=0)
    assert output.weight == 1
    assert norm(output.update.params.sigma) > 0
    assert output.metrics["client/mask_rate"].weight == 0
    assert finite(output)


def test_examples_beyond_the_counts_change_nothing(at_clients):
    before = at_clients(labeled=20, unlabeled=30)
    labels, labeled, unlabeled = at_clients.labels, at_clients.labeled, at_clients.unlabeled
    at_clients.labeled, at_clients.unlabeled = labeled.at[20:].set(unlabeled[-1]), unlabeled.at[30:].set(labeled[-1])
    at_clients.labels = labels.at[unlabeled[-1]].add(1)
    after = at_clients(labeled=20, unlabeled=30)
    at_clients.labels, at_clients.labeled, at_clients.unlabeled = labels, labeled, unlabeled
    assert same(before.update, after.update)


def conditionals(jaxpr) -> int:
    """How many `cond`s stand in a program, within its loops and calls too."""
    inner = [sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
    return sum(eqn.primitive.name == "cond" for eqn in jaxpr.eqns) + sum(conditionals(sub) for sub in inner)


def test_helpers_cost_nothing_in_rounds_without_them(at_server):
    """Under vmap a condition that differs between clients computes both sides; this one is the cohort's."""
    method, clients, data = at_server.method, at_server.clients, at_server.experiment.problem.data
    cohort = Cohort(jnp.arange(5), jnp.int32(0))
    images = jnp.asarray(data.train.images)

    def update(server, clients, key):
        shared, own = method.broadcast(server, clients, cohort)
        kept = jax.tree.map(lambda x: x[cohort.ids], clients)

        def one(own, kept, index, count):
            unlabeled = Examples(images, index, count, None)
            labeled = Examples(images, index[:1], jnp.int32(0), jnp.zeros(1, jnp.int32))
            return method.client_update(shared, own, kept, Shard(labeled, unlabeled, index), key)

        return jax.vmap(one)(own, kept, jnp.asarray(data.unlabeled.index)[cohort.ids], 20 + cohort.ids)

    program = jax.make_jaxpr(update)(at_server.server, clients, jax.random.key(0))
    assert conditionals(program.jaxpr) == 3  # the gather, the outputs of helpers, their bytes


# --- rounds ------------------------------------------------------------------------------------------------------------


@functools.cache
def rounds(strategy: str):
    """Three rounds with labels at the clients, the second with helpers; every prediction is confident."""
    experiment = tiny.experiment("fedmatch", method__confidence=0.0, **PLAIN, **AT_CLIENTS)
    simulator = Simulator(experiment.problem, toy.executions()[strategy], 250)
    state, _ = simulator.initialize(0)
    rows = []
    for _ in range(3):
        state, row = simulator.round(state)
        rows.append(row)
    return jax.device_get(state._replace(key=())), rows


def test_helpers_come_in_their_rounds_and_are_paid_for():
    state, rows = rounds("vmap")
    assert ["client/consistency_loss" in row for row in rows] == [False, True, False]
    assert rows[1]["client/consistency_loss"] > 0
    assert rows[1]["comm/bytes_down"] > rows[0]["comm/bytes_down"]  # a new client's is the most without helpers
    assert state.clients.seen.any()
    assert not same(state.clients.psi, jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), state.clients.psi))


def test_strategies_agree_with_labels_at_the_clients():
    (expected, rows), (got, got_rows) = rounds("vmap"), rounds("sharded_chunked")
    for key in ("diagnostics/pseudo_label_accuracy", "comm/bytes_up", "comm/bytes_down"):
        assert [row[key] for row in rows] == [row[key] for row in got_rows]
    for part in ("server", "clients"):
        a, b = (np.concatenate([np.ravel(x).astype(float) for x in jax.tree.leaves(getattr(s, part))]) for s in (expected, got))
        assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(a)


@pytest.mark.parametrize(("mode", "overrides"), [("running", AT_CLIENTS), ("static", {})])
def test_a_round_with_batch_norm_keeps_the_states_structure(mode, overrides):
    simulator = tiny.experiment("fedmatch", network="cnn", model__norm=mode, execution__conv="cpu", **overrides).simulator
    before = simulator.template(0)
    after, _, metrics = simulator._round.eval_shape(before, simulator._data)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert ("client/unlabeled_loss" in metrics) == ("server/loss" not in metrics) == bool(overrides)


def test_revealed_labels_train_sigma_at_the_clients_and_at_the_server():
    simulator = tiny.experiment("fedmatch", network="linear", data__reveal_labels=True).simulator
    before = simulator.template(0)
    after, _, metrics = simulator._round.eval_shape(before, simulator._data)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert {"client/loss", "client/unlabeled_loss", "server/loss"} <= set(metrics)


@pytest.mark.parametrize(
    ("key", "got", "accepted"),
    [("confidence", 1.5, "in [0, 1]"), ("helpers", 0, ">= 1"), ("helper_period", 0, ">= 1"), ("lambda_l2", -1.0, ">= 0")],
)
def test_wrong_options_are_named(key, got, accepted):
    with pytest.raises(ValueError) as error:
        FedMatchOptions(**{key: got})
    assert f"method.{key}: got {got}" in str(error.value)
    assert accepted in str(error.value)
