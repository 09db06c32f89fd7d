"""FedMatch by its edge cases: nobody confident, no helpers, and rounds with labels at the clients."""

import importlib

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl.local import Broadcast, Weights
from fedjax_ssl.method import Cohort
from fedjax_ssl.models.decomposed import Parts
from fedjax_ssl.options import MANY
from tests import tiny
from tests.jaxprs import equations
from tests.methods.clients import Client, finite, norm, same, traced_round

PLAIN = {"network": "linear", "data__weak": "none"}
AT_CLIENTS = {"labels_at": "clients", "client__epochs": 1, "client__batch_size": 16}


@pytest.fixture(scope="module")
def at_server():
    """Nobody is confident, and nothing else changes psi."""
    still = {"method__lambda_l1": 0.0, "method__lambda_l2": 0.0, "client__optimizer__weight_decay": 0.0}
    return Client("fedmatch", method__confidence=1.0, **PLAIN, **still)


@pytest.fixture(scope="module")
def at_clients():
    return Client("fedmatch", **PLAIN, **AT_CLIENTS)


def test_without_a_confident_example_psi_stays_and_nothing_is_uploaded(at_server):
    output = at_server()
    assert norm(output.update) == 0
    assert output.weight == 1
    assert output.metrics["comm/bytes_up"].total == 0
    assert output.metrics["client/loss"].weight == 0
    assert same(output.client_state.psi, at_server.weights.params.psi)
    assert bool(output.client_state.seen)
    assert finite(output)


@pytest.mark.ci
def test_a_helper_round_without_helpers_is_a_round_without_helpers(at_clients):
    # Nobody has been seen yet. Round 2 (number 1) is a helper round in tiny experiments.
    assert at_clients.experiment.settings.method.helper_period == 2
    alone, none_there = at_clients(round=0), at_clients(round=1)
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


def test_helpers_cost_nothing_in_rounds_without_them(at_server):
    """Under vmap a condition that differs between clients computes both sides; this one is the cohort's."""
    method, cohort = at_server.method, Cohort(jnp.arange(5), jnp.int32(0))
    client_data = at_server.client_data()

    def update(server, clients, key):
        shared, per_client = method.broadcast(server, clients, cohort)
        kept = jax.tree.map(lambda x: x[cohort.ids], clients)

        def one(per_client, kept, count):
            unlabeled = client_data.unlabeled._replace(count=count)
            return method.client_update(shared, per_client, kept, client_data._replace(unlabeled=unlabeled), key)

        return jax.vmap(one)(per_client, kept, 20 + cohort.ids)

    program = jax.make_jaxpr(update)(at_server.server, at_server.clients, jax.random.key(0))
    conditions = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "cond"]
    assert len(conditions) == 3  # the gather, the outputs of helpers, their bytes


@pytest.mark.parametrize(("mode", "overrides"), [("running", AT_CLIENTS), ("static", {})])
def test_a_round_with_batch_norm_keeps_the_states_structure(mode, overrides):
    before, after, metrics = traced_round(tiny.experiment("fedmatch", network="cnn", model__norm=mode, **overrides))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert ("client/unlabeled_loss" in metrics) == ("server/loss" not in metrics) == bool(overrides)


def test_revealed_labels_train_sigma_at_the_clients_and_at_the_server():
    before, after, metrics = traced_round(tiny.experiment("fedmatch", network="linear", data__reveal_labels=True))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert {"client/loss", "client/unlabeled_loss", "server/loss"} <= set(metrics)


def test_the_bytes_of_many_helpers_are_more_than_an_int32_holds():
    """The psi of 23 helpers that all differ, each of as many parameters as (FL)^2's network for CIFAR-100 has."""
    module, size, count = importlib.import_module("fedjax_ssl.methods.fedmatch"), 23_401_012, 23

    def received(x):
        psi = {"w": jnp.broadcast_to(x, (size,))}  # which the compiler never stores
        shared = Broadcast(Weights(Parts(psi, psi), ()), x, extra=jnp.array(True))
        helpers = module.Helpers({"w": jnp.broadcast_to(x + 1, (count, size))}, jnp.ones(count, bool))
        return module.bytes_down(shared, helpers, module.FedMatchClientState(jnp.array(False), x, psi, ()))

    assert int(jax.jit(received)(jnp.float32(1))) == 4 * size * (2 + count) > MANY
