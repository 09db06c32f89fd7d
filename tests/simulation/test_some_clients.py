"""Labels at some clients: who has them, who takes part, and what clients without labels do otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import common
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Broadcast
from fedjax_ssl.method import ClientData, ClientOutput, DataSpec, Method
from fedjax_ssl.methods import METHODS
from fedjax_ssl.metrics import Sum
from fedjax_ssl.simulation.cohort import draw, sample
from fedjax_ssl.wrappers.kinds import Kinds, with_kinds
from tests import engine, tiny, toy
from tests.traced import digest

THERE = (
    *("fedavg", "fedavg_pp", "fedprox", "fixmatch", "freematch", "uda", "fedsem", "fedmatch"),
    *common.LABELS_AT_SOME_CLIENTS,
)
"""The methods that run in this scenario."""
WHERE = {"labels_at": "some_clients", "data__labeled_clients": (0.25,), "client__batch_size": 8}


def rows_of(table):
    return [set(np.asarray(row)[:count].tolist()) for row, count in zip(table.index, table.count, strict=True)]


@pytest.mark.parametrize("labeled", [(0.25,), (2,), (0, 1)])
def test_one_partition_covers_all_and_then_some_clients_are_labeled_whole(labeled):
    data = tiny.experiment("fixmatch", **WHERE | {"data__labeled_clients": labeled}).problem.data
    whole = tiny.experiment("fixmatch", labels_at="clients", data__labeled_fraction=(1.0,)).problem.data
    mine, others, every = rows_of(data.labeled), rows_of(data.unlabeled), rows_of(whole.labeled)
    assert mine == [*every[:2], *[set()] * 6]
    assert others == [set(), set(), *every[2:]]


def test_the_clients_that_have_labels_may_be_named():
    data = tiny.experiment("fixmatch", **WHERE | {"data__labeled_clients": (1, 6, 3)}).problem.data
    assert np.flatnonzero(data.labeled.count).tolist() == [1, 3, 6]
    assert np.flatnonzero(data.unlabeled.count).tolist() == [0, 2, 4, 5, 7]


def test_with_revealed_labels_all_clients_have_them():
    data = tiny.experiment("fedavg", **WHERE, data__reveal_labels=True).problem.data
    assert (np.asarray(data.labeled.count) > 0).all()
    assert not np.asarray(data.unlabeled.count).any()


def test_a_round_has_as_many_labeled_clients_as_are_asked_for_each_as_often_as_others_of_its_kind():
    data, rounds = toy.data(), 4000
    labeled = data.labeled._replace(count=np.array([3, 0, 4, 0, 5, 0, 0], np.int32))
    spec = DataSpec((1,), 2, 7, 4, labeled_cohort=1)
    many = jax.jit(jax.vmap(lambda r: draw(jax.random.key(0), r, spec, None, None, data._replace(labeled=labeled)).ids))
    ids = np.asarray(many(jnp.arange(rounds, dtype=jnp.int32)))
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert np.isin(ids[:, 0], [0, 2, 4]).all()
    assert np.isin(ids[:, 1:], [1, 3, 5, 6]).all()
    shares = np.bincount(ids.ravel(), minlength=7) / rounds
    # One of three labeled clients, and three of four others; five standard errors.
    np.testing.assert_allclose(shares[[0, 2, 4]], 1 / 3, atol=5 * np.sqrt(2 / 9 / rounds))
    np.testing.assert_allclose(shares[[1, 3, 5, 6]], 3 / 4, atol=5 * np.sqrt(3 / 16 / rounds))


def client_of(kinds, labeled, unlabeled, round):
    """What a client returns whose update is the learning rate that it has, and its weight the number of its examples."""

    def client_update(shared, per_client, state, data, key):
        count = data.labeled.count + data.unlabeled.count
        return ClientOutput(
            shared.learning_rate, count * 1.0, state + count, {"comm/bytes_down": Sum(jnp.int32(4), jnp.int32(3))}
        )

    method = with_kinds(Method(init=None, broadcast=None, client_update=client_update, server_update=None, predict={}), kinds)
    index = jnp.zeros(9, jnp.int32)
    parts = [Examples(None, index, jnp.int32(count), index) for count in (labeled, unlabeled)]
    return method.client_update(Broadcast(None, 0.5, jnp.int32(round)), (), 7, ClientData(*parts, index), jax.random.key(0))


@pytest.mark.parametrize("place", ["server", "clients"])
def test_settings_of_clients_without_labels_change_no_program_where_labels_are_elsewhere(place):
    """There, too, a client may happen to have no label."""
    own = {"labels_at": place, "data__labels_first": False} if place == "clients" else {"labels_at": place}
    plain = tiny.config("fixmatch", network="linear", **own)
    kinds = {"client__unlabeled_epochs": 1, "client__unlabeled_rate": 2.0, "client__unlabeled_wait": 2}
    assert digest(tiny.config("fixmatch", network="linear", **own, **kinds)) == digest(plain)


def test_clients_without_labels_rest_in_the_first_rounds_and_have_a_learning_rate_of_their_own():
    kinds = Kinds(unlabeled_rate=0.25, wait=2)
    found = {
        (kind, round): client_of(kinds, *counts, round)
        for kind, counts in {"labeled": (5, 0), "unlabeled": (0, 6)}.items()
        for round in (1, 2)
    }
    seen = {key: (one.update, one.weight, one.client_state, *one.metrics["comm/bytes_down"]) for key, one in found.items()}
    assert {key: tuple(map(float, one)) for key, one in seen.items()} == {
        ("labeled", 1): (0.5, 5, 12, 4, 3), ("labeled", 2): (0.5, 5, 12, 4, 3),
        ("unlabeled", 1): (0.125, 0, 7, 0, 0), ("unlabeled", 2): (0.125, 6, 13, 4, 3),
    }  # fmt: skip


def images_of_clients(**options):
    """How many images each client of a round trained on, by its id, and how many it has."""
    experiment = tiny.experiment("fixmatch", **WHERE, **tiny.confident("fixmatch"), cohort_size=8, **options)

    def noted(method):
        def broadcast(server, clients, cohort):
            shared, _ = method.broadcast(server, clients, cohort)
            return shared, cohort.ids

        def client_update(shared, number, state, data, key):
            output = method.client_update(shared, (), state, data, key)
            images = {
                f"client/of_{k}": Sum(jnp.where(number == k, output.metrics["perf/client_images"][0], 0)) for k in range(8)
            }
            return output._replace(metrics={**output.metrics, **images})

        return method._replace(broadcast=broadcast, client_update=client_update)

    *_, rows = engine.simulate(experiment, "scan", changed=noted)
    return [rows[0][f"client/of_{k}"] for k in range(8)], experiment.problem.data


@pytest.mark.ci
def test_epochs_of_clients_without_labels_are_their_own():
    images, data = images_of_clients(client__epochs=1, client__unlabeled_epochs=3)
    counts = np.asarray(data.labeled.count) + 3 * np.asarray(data.unlabeled.count)
    assert images == counts.tolist()


@pytest.mark.slow
def test_a_round_without_a_labeled_client_is_a_round():
    """FedAvg, which trains on labels alone, keeps its model; FixMatch goes on with pseudo-labels."""
    for method, moves in (("fedavg", False), ("fixmatch", True)):
        options = {**tiny.confident(method), "server__optimizer__momentum": 0.0}
        experiment = tiny.experiment(method, **WHERE | {"data__labeled_clients": (7,)}, **options, cohort_size=1)

        key = next(k for k in range(99) if sample(jax.random.key(k), jnp.int32(0), experiment.problem.spec, None).ids[0] == 7)
        experiment = tiny.experiment(method, **WHERE | {"data__labeled_clients": (7,)}, **options, cohort_size=1, seed=key)
        _, states, rows = engine.simulate(experiment, "scan")
        assert (engine.distance(states[0].server.weights.params, states[1].server.weights.params) > 0) == moves
        assert rows[0]["client/participants"] == int(moves)


@pytest.mark.slow
@pytest.mark.parametrize("method", THERE)
def test_every_strategy_computes_the_same(method):
    experiment = tiny.experiment(method, **WHERE, **tiny.confident(method), labeled_cohort=1)
    _, expected, rows = engine.simulate(experiment, "scan", rounds=2)
    _, got, others = engine.simulate(experiment, "sharded_chunked", rounds=2)
    assert rows[-1]["client/participants"] == others[-1]["client/participants"] > 0
    assert engine.distance(expected[-1].server, got[-1].server) < 1e-4
    assert engine.distance(expected[-1].clients, got[-1].clients) < 1e-4


@pytest.mark.parametrize("method", sorted({*METHODS} - {*THERE, *tiny.WITHOUT_CLIENTS}))
def test_other_methods_are_refused_in_one_line(method):
    with pytest.raises(
        ValueError, match=rf"^data.labels_at: got some_clients with method.name={method}, accepted: (server|clients)"
    ):
        tiny.experiment(method, **WHERE)


WRONG = {
    "data.labeled_clients: got 8 of 8 clients, accepted: a share of clients": {"data__labeled_clients": (8,)},
    "data.labeled_clients: got 0.01 of 8 clients, accepted: ": {"data__labeled_clients": (0.01,)},
    "data.labeled_clients: got 1, 1 of 8 clients, accepted: ": {"data__labeled_clients": (1, 1)},
    "data.labeled_clients: got nothing of 8 clients, accepted: ": {"data__labeled_clients": ()},
    "labeled_cohort: got 3 of cohort_size=5, where 2 clients have labels, accepted: 0, or 1 to 2": {"labeled_cohort": 3},
    "labeled_cohort: got 1 with system.participation=weighted, accepted: 0": {
        "labeled_cohort": 1, "system__participation": "weighted",
    },
    "client.unlabeled_epochs: got 2 with client.steps, accepted: 0": {
        "client__unlabeled_epochs": 2, "client__epochs": 0, "client__steps": 4,
    },
    "data.labeled_partition: got 'iid' with data.labels_at=some_clients, accepted: ''": {"data__labeled_partition": "iid"},
}  # fmt: skip


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_is_one_line(line):
    with pytest.raises(ValueError) as error:
        tiny.experiment("fixmatch", **WHERE | WRONG[line])
    assert str(error.value).startswith(line)


def test_settings_of_this_scenario_change_nothing_elsewhere_and_are_named():
    own = {"labeled_cohort": 1, "client__unlabeled_epochs": 2, "client__unlabeled_rate": 2.0, "client__unlabeled_wait": 1}
    here = tiny.experiment("fixmatch", **WHERE, **own).unread
    there = tiny.experiment("fixmatch", labels_at="clients", **own).unread
    keys = {key.replace("__", ".") for key in own} | {"data.labeled_clients"}
    assert not keys & here.keys()
    assert keys <= there.keys()
    assert {"data.num_labels", "data.labeled_fraction", "data.label_selection", "data.exclude_labeled"} <= here.keys()
