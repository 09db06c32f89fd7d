"""Data on the host: what is fetched for a round, and when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.federated import pack
from fedjax_ssl.method import Cohort
from fedjax_ssl.simulation import source
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from fedjax_ssl.simulation.source import capacity, gather_images
from tests import tiny, toy

HOST = {"on_host": True}


def numbers(state):
    return float(state.server["w"]), np.asarray(state.clients).tolist()


def test_a_restored_state_fetches_its_own_round():
    host, state, _ = toy.run(toy.problem(**HOST), Execution(), 1)
    saved = jax.tree.map(np.array, (state.server, state.clients, state.round))
    state, _ = host.round(state)
    once = float(state.server["w"])
    state, _ = host.round(state)
    again, _ = host.round(state._replace(server=saved[0], clients=saved[1], round=saved[2]))
    assert float(again.server["w"]) == once


COHORT, FOLLOWING = (Cohort(np.array(ids, np.int32), np.int32(0)) for ids in ([4, 0], [2, 4]))


def test_only_real_rows_are_fetched_and_every_index_finds_its_image():
    data = toy.data()
    size = capacity(data, 2, reads_next=True)
    assert size == 2 + (5 + 4) + (5 + 4)  # the server's two, and the two largest clients twice
    gathered = gather_images(data, COHORT, FOLLOWING, size, reads_next=True)
    assert gathered.images.shape == (size, 1, 1, 1)
    for examples, ids in ((gathered.clients.unlabeled, COHORT.ids), (gathered.server.next_cohort, FOLLOWING.ids)):
        for row, k in enumerate(ids):
            count = int(examples.count[row])
            assert count == toy.SIZES[k]
            np.testing.assert_array_equal(gathered.images[examples.index[row, :count]].ravel(), 10 * (k + 1))
    assert (gathered.server.labeled.index[:2] < size).all()
    np.testing.assert_array_equal(gathered.images[gathered.server.labeled.index].ravel(), 0)
    assert np.count_nonzero(gathered.images) == 5 + 3 + 4 + 5
    assert gathered.server.unlabeled.count == 0
    assert gathered.server.true_labels.size == gathered.server.unlabeled.index.size == 1  # and not as long as the pool


def test_what_the_server_does_not_read_of_the_next_cohort_is_not_fetched():
    data, method = toy.data(), toy.method()
    size = capacity(data, 2, reads_next=False)
    assert size == 2 + (5 + 4)
    gathered = gather_images(data, COHORT, FOLLOWING, size, reads_next=False)
    assert gathered.server.next_cohort is None
    assert np.count_nonzero(gathered.images) == 5 + 3
    sparing = method._replace(requires=method.requires._replace(next_cohort=False))
    _, state, _ = toy.run(toy.problem(made=sparing, **HOST), Execution(), 3)
    assert numbers(state) == numbers(toy.run(toy.problem(), Execution(), 3)[1])


@pytest.mark.parametrize(
    ("method", "norm", "sbn_data", "reads"),
    [
        ("fl2", "static", "cohort", (True, False)),
        ("fl2", "static", "labeled", (False, False)),
        ("fl2", "static", "all", (False, True)),
        ("fl2", "batch", "cohort", (False, False)),
        ("freematch_central", "running", "cohort", (False, True)),
        ("fedtrinet", "batch", "cohort", (True, False)),
    ],
)
def test_servers_say_whether_they_read_the_next_cohort_and_the_whole_pool(method, norm, sbn_data, reads):
    requires = tiny.experiment(method, network="cnn", model__norm=norm, server__static_norm__data=sbn_data).method.requires
    assert (requires.next_cohort, requires.pool) == reads


def test_there_is_room_for_labeled_and_unlabeled_examples_of_both_cohorts():
    rows = [np.arange(k, k + n) for k, n in enumerate((1, 2, 3))]
    data = toy.data()._replace(
        labeled=pack(rows), unlabeled=pack(rows[::-1]), client_data=pack([np.arange(n) for n in (4, 6, 5)])
    )
    assert capacity(data, 2, reads_next=True) == (4 + 4) + (6 + 5) + 2


def test_the_next_round_is_fetched_while_the_device_is_at_work(monkeypatch):
    host, state, _ = toy.run(toy.problem(**HOST), Execution(), 1)
    order = []

    def noted(name, function):
        def call(*args, **options):
            order.append(name)
            return function(*args, **options)

        return call

    class Written(np.ndarray):
        __setitem__ = noted("write back", np.ndarray.__setitem__)  # waits for the device

    program = host._round
    monkeypatch.setattr(type(program), "__call__", noted("round", type(program).__call__))
    monkeypatch.setattr(source, "gather_images", noted("gather", source.gather_images))
    host.round(state._replace(clients=state.clients.view(Written)))
    assert order == ["round", "gather", "write back"]


def test_client_states_are_made_where_jax_has_no_cpu(without_cpu):
    assert source.cpu() is None
    _, state, _ = toy.run(toy.problem(**HOST), Execution(), 2)
    assert numbers(state) == numbers(toy.run(toy.problem(), Execution(), 2)[1])


def test_cohorts_are_drawn_for_many_rounds_at_once_and_are_those_of_each(monkeypatch):
    monkeypatch.setattr(source, "DRAWN", 4)
    problem = toy.problem(3, seeds=(7,), **HOST)
    host = Simulator(problem, Execution())
    drawn, draw = [], host._source._draw
    monkeypatch.setattr(host._source, "_draw", lambda rounds: drawn.append(int(rounds[0])) or draw(rounds))
    state, taken = host.initialize(), []
    for _ in range(9):
        before = state.clients.copy()
        state, _ = host.round(state)
        taken.append(np.flatnonzero(state.clients - before).tolist())
    key = jax.random.key(7)
    assert taken == [sorted(sample(key, jnp.int32(r), problem.spec, 9).ids.tolist()) for r in range(9)]
    assert drawn == [0, 4, 8]
