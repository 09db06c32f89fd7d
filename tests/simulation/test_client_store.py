"""Data on the host: what is fetched for a round, for which run, and when."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.federated import pack
from fedjax_ssl.simulation import client_store
from fedjax_ssl.simulation.client_store import HostSimulator, capacity, gather_images
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy


def run(simulator, seed: int, rounds: int):
    state, _ = simulator.initialize(seed)
    for _ in range(rounds):
        state, _ = simulator.round(state)
    return float(state.server["w"]), np.asarray(state.clients).tolist()


def test_a_second_run_with_another_seed_fetches_its_own_cohorts():
    execution = toy.executions()["vmap"]
    host = HostSimulator(toy.problem(), execution, 4)
    for seed, rounds in ((0, 2), (1, 3), (0, 3)):
        assert run(host, seed, rounds) == run(Simulator(toy.problem(), execution, 4), seed, rounds)


def test_a_restored_state_fetches_its_own_round():
    host = HostSimulator(toy.problem(), toy.executions()["vmap"], 4)
    state, _ = host.initialize(0)
    state, _ = host.round(state)
    kept = jax.tree.map(np.array, (state.server, state.clients, state.round))
    state, _ = host.round(state)
    once = float(state.server["w"])
    state, _ = host.round(state)
    again, _ = host.round(state._replace(server=kept[0], clients=kept[1], round=kept[2]))
    assert float(again.server["w"]) == once


def test_only_real_rows_are_fetched_and_every_index_finds_its_image():
    data = toy.data()
    cohort, following = (client_store.Cohort(np.array(ids, np.int32), np.int32(0)) for ids in ([4, 0], [2, 4]))
    size = capacity(data, 2, reads_next=True)
    assert size == 2 + (5 + 4) + (5 + 4)  # the server's two, and the two largest clients twice
    gathered = gather_images(data, cohort, following, size, reads_next=True)
    assert gathered.images.shape == (size, 1, 1, 1)
    for examples, ids in ((gathered.clients.unlabeled, cohort.ids), (gathered.server.next_cohort, following.ids)):
        for row, k in enumerate(ids):
            count = int(examples.count[row])
            assert count == toy.SIZES[k]
            found = gathered.images[examples.index[row, :count]].ravel()
            np.testing.assert_array_equal(found, 10 * (k + 1))
    assert (gathered.server.labeled.index[:2] < size).all()
    np.testing.assert_array_equal(gathered.images[gathered.server.labeled.index].ravel(), 0)
    assert np.count_nonzero(gathered.images) == 5 + 3 + 4 + 5
    assert gathered.server.unlabeled.count == 0
    assert gathered.server.truth.size == gathered.server.unlabeled.index.size == 1  # and not as long as the pool


def test_what_the_server_does_not_read_of_the_next_cohort_is_not_fetched():
    data = toy.data()
    cohort, following = (client_store.Cohort(np.array(ids, np.int32), np.int32(0)) for ids in ([4, 0], [2, 4]))
    size = capacity(data, 2, reads_next=False)
    assert size == 2 + (5 + 4)
    gathered = gather_images(data, cohort, following, size, reads_next=False)
    assert gathered.server.next_cohort is None
    assert np.count_nonzero(gathered.images) == 5 + 3
    execution = toy.executions()["vmap"]
    problem = toy.problem()
    sparing = problem._replace(method=problem.method._replace(next_cohort=False))
    assert run(HostSimulator(sparing, execution, 4), 0, 3) == run(Simulator(problem, execution, 4), 0, 3)


@pytest.mark.parametrize(
    ("method", "overrides", "reads"),
    [
        ("fl2", {"model__norm": "static"}, True),
        ("fl2", {"model__norm": "static", "server__sbn_data": "labeled"}, False),
        ("fl2", {"model__norm": "batch"}, False),
        ("supervised", {"model__norm": "static"}, True),
        ("fedtrinet", {"model__norm": "batch"}, True),
        ("feddure", {"model__norm": "running"}, False),
    ],
)
def test_servers_say_whether_they_read_the_next_cohort(method, overrides, reads):
    where = "clients" if method in ("feddure", "fedtrinet") else "server"
    assert tiny.experiment(method, network="cnn", labels_at=where, **overrides).problem.method.next_cohort == reads


def test_there_is_room_for_labeled_and_unlabeled_examples_of_both_cohorts():
    rows = [np.arange(k, k + n) for k, n in enumerate((1, 2, 3))]
    data = toy.data()._replace(
        labeled=pack(rows), unlabeled=pack(rows[::-1]), client_data=pack([np.arange(n) for n in (4, 6, 5)])
    )
    assert capacity(data, 2, reads_next=True) == (4 + 4) + (6 + 5) + 2


def test_the_next_round_is_fetched_while_the_device_is_at_work(monkeypatch):
    host = HostSimulator(toy.problem(), toy.executions()["vmap"], 4)
    state, _ = host.initialize(0)
    state, _ = host.round(state)
    order = []

    def noted(name, function):
        def call(*args, **options):
            order.append(name)
            return function(*args, **options)

        return call

    class Kept(np.ndarray):
        __setitem__ = noted("write back", np.ndarray.__setitem__)  # waits for the device, as `report` does

    round_ = noted("round", host._round)
    round_.has_room = True
    monkeypatch.setattr(host, "_round", round_)
    monkeypatch.setattr(client_store, "gather_images", noted("gather", client_store.gather_images))
    monkeypatch.setattr(client_store, "report", noted("report", client_store.report))
    host.round(state._replace(clients=state.clients.view(Kept)))
    assert order == ["round", "gather", "write back", "report"]


def test_a_round_needs_its_program_and_the_next_cohorts_images():
    host = HostSimulator(toy.problem(), toy.executions()["vmap"], 4)
    state, _ = host.initialize(0)
    assert host.memory_bytes == 0
    host.round(state)
    images = sum(x.nbytes for x in jax.tree.leaves(host._ahead.data))
    assert images > 0
    assert host.memory_bytes == host._round.memory_bytes + images


def test_the_next_cohorts_images_are_there_while_it_is_found_out_what_fits(monkeypatch):
    host, happened = HostSimulator(toy.problem(), Execution(0, shrinks=True), 4), []
    gather, fit = HostSimulator._gather, client_store.in_chunks_that_fit

    def noted_fit(*args):
        happened.append("fit")
        return fit(*args)

    def noted_gather(self, run, number, *cohorts):
        happened.append(number)
        return gather(self, run, number, *cohorts)

    monkeypatch.setattr(client_store, "in_chunks_that_fit", noted_fit)
    monkeypatch.setattr(HostSimulator, "_gather", noted_gather)
    run(host, 0, 3)
    assert happened == [0, 0, 1, "fit", 2, 3]  # before round 1 for the server's preparation


def test_of_client_states_only_one_leaf_is_there_twice():
    leaves = [jnp.full(size, float(size)) for size in (2, 3, 4)]
    there = [weakref.ref(leaf) for leaf in leaves]
    for number, copy in enumerate(client_store.copied_one_by_one(leaves)):
        np.testing.assert_array_equal(copy, np.full(number + 2, number + 2.0))
        assert copy.flags.writeable
        assert [one() is not None for one in there] == [later > number for later in range(3)]
    assert leaves == []


def test_client_states_are_made_where_jax_has_no_cpu(without_cpu):
    assert client_store.cpu() is None
    host = HostSimulator(toy.problem(), toy.executions()["vmap"], 4)
    assert run(host, 0, 2) == run(Simulator(toy.problem(), toy.executions()["vmap"], 4), 0, 2)


def test_cohorts_are_drawn_for_many_rounds_at_once_and_are_those_of_each(monkeypatch):
    monkeypatch.setattr(client_store, "DRAWN", 4)
    host = HostSimulator(toy.problem(3), toy.executions()["vmap"], 4)
    drawn, draw = [], host._cohorts

    def counted(key, first):
        drawn.append(int(first))
        return draw(key, first)

    monkeypatch.setattr(host, "_cohorts", counted)
    host.initialize(0)
    state, _ = host.initialize(7)
    taken = []
    for _ in range(9):
        before = state.clients.copy()
        state, _ = host.round(state)
        taken.append(np.flatnonzero(state.clients - before).tolist())
    key = jax.random.key(7)
    assert taken == [sorted(sample(key, jnp.int32(r), len(toy.SIZES), 3).ids.tolist()) for r in range(9)]
    assert drawn == [0, 0, 4, 8]  # of each run its own; two rounds ahead
