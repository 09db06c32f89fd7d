"""The strategies on a problem that can be computed by hand: means, states, padding, clients that are left out, traces."""

import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.metrics import Mean, Sum
from fedjax_ssl.simulation import round as round_module
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from tests import engine, toy

pytestmark = pytest.mark.reliability

WAYS = [
    *((name, False, (0,)) for name in toy.EXECUTIONS),
    ("vmap", True, (0,)),
    ("sharded", True, (0,)),
    ("chunked", False, (4, 5)),
]
"""Strategies, whether the data stay on the host, and the seeds of runs."""
REASONS = ("NaN or infinity in the update", "NaN or infinity in the weight", "a negative weight",
           "NaN or infinity in the client state", "NaN or infinity in a metric")  # fmt: skip
"""What is wrong with clients 0 to 4, of nine."""


def with_bad_clients(base):
    """The method with five clients that are wrong in five ways, and a second state that is no whole number."""

    def init(key, spec):
        server, counts = base.init(key, spec)
        return server, (counts, jnp.zeros(spec.num_clients))

    def client_update(shared, per_client, state, client_data, key):
        def spoiled(client, value, x):
            return jnp.where(per_client == client, value, x)

        output = base.client_update(shared, per_client, state[0], client_data, key)
        loss = output.metrics["client/loss"]
        return output._replace(
            update={"w": spoiled(0, jnp.nan, output.update["w"])},
            weight=spoiled(1, jnp.inf, spoiled(2, -1.0, output.weight)),
            client_state=(output.client_state, spoiled(3, -jnp.inf, state[1] + 1)),
            metrics={**output.metrics, "client/loss": Mean(spoiled(4, jnp.nan, loss.total), loss.weight)},
        )

    return base._replace(init=init, client_update=client_update)


@pytest.mark.parametrize(
    ("name", "on_host", "seeds", "aggregator"),
    [
        *(pytest.param(*way, "sum", marks=pytest.mark.ci if way[0] in ("scan", "sharded_chunked") else ()) for way in WAYS),
        ("vmap", False, (0,), "stack"),
        pytest.param("sharded", True, (0,), "stack", marks=pytest.mark.slow),
    ],
)
def test_three_rounds_with_bad_clients_are_what_a_python_loop_computes(name, on_host, seeds, aggregator, caplog):
    traces, sizes, labels = [], (*toy.SIZES, 3, 2), [f"run {seed}" for seed in seeds]
    made = engine.with_outputs(with_bad_clients(toy.method(aggregator=aggregator)), lambda output: traces.append(1) or output)
    problem = toy.problem(7, made=made, sizes=sizes, on_host=on_host, seeds=seeds)
    simulator, rows = Simulator(problem, toy.EXECUTIONS[name]), []
    state = simulator.initialize()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            state, (of_runs,) = simulator.dispatch(state, labels)
            rows.append(of_runs)
    assert len(traces) == 1
    finals = [simulator.split(state)]
    if not on_host:  # and in one dispatch
        several = Simulator(problem, toy.EXECUTIONS[name]._replace(rounds=3))
        together, found = several.dispatch(several.initialize(), labels)
        assert [[row.pop(round_module.FAULT) for row in of_runs] for of_runs in (*found, *rows)]
        assert found == [[pytest.approx(row) for row in of_runs] for of_runs in rows]
        finals.append(several.split(together))
    for run, (seed, label) in enumerate(zip(seeds, labels, strict=True)):
        w, taken = 0.0, np.zeros(len(sizes))
        for number in range(3):
            cohort = sample(jax.random.key(seed), jnp.int32(number), problem.spec, 9).ids.tolist()
            bad, used = ([k for k in cohort if (k < 5) == is_bad] for is_bad in (True, False))
            row = rows[number][run]
            assert (row["client/non_finite"], row["client/participants"]) == (len(bad), len(used))
            assert row["comm/bytes_up"] == 7 * 4  # bad clients send theirs, too
            assert row["client/loss"] == pytest.approx(w + np.mean([10 * (k + 1) for k in used]))
            said = [line for line in caplog.messages if line.startswith(f"{label}, round {number + 1}: ")]
            assert said[: len(bad)] == [f"{label}, round {number + 1}: client {k} was left out: {REASONS[k]}" for k in bad]
            w += sum(sizes[k] * 10 * (k + 1) for k in used) / sum(sizes[k] for k in used)
            taken[used] += 1
        for final in finals:
            np.testing.assert_allclose(final[run].server["w"], w, rtol=1e-6)
            for counts in final[run].clients:
                np.testing.assert_array_equal(counts, taken)  # a client that is left out keeps its old state
            assert int(final[run].round) == 3


@pytest.mark.parametrize(("name", "on_host"), [("vmap", False), ("sharded", False), ("scan", True)])
def test_where_a_client_stops_the_run_the_state_is_the_one_before_the_round(name, on_host):
    made, sizes = with_bad_clients(toy.method()), (*toy.SIZES, 3, 2)
    problem = toy.problem(2, made=made, sizes=sizes, on_host=on_host, seeds=(15,))._replace(stop=True)
    simulator = Simulator(problem, toy.EXECUTIONS[name])
    state, rows = simulator.initialize(), []
    for _ in range(2):  # of the clients 6, 8 and 7
        state, row = simulator.round(state)
        rows.append(row)
    assert [row["client/non_finite"] for row in rows] == [0, 0]
    before = engine.copied(state)
    for _ in range(2):  # of the clients 5 and 4, and the same round again
        state, row = simulator.round(state)
        assert row[round_module.FAULT] == {4: 1 << round_module.FAULTS.index("a metric")}
        assert engine.same_bits(state, before)
    assert int(state.round) == 2


def of_uploads(count) -> dict:
    """A client's metrics of what it sends and receives."""
    names = ("comm/bytes_up", "comm/bytes_down")
    return {"client/upload_fraction": Mean(count, jnp.ones(())), **{name: Sum(jnp.int32(4)) for name in names}}


@pytest.mark.parametrize("name", ["vmap", "chunked", "sharded"])
def test_a_client_of_weight_0_books_no_upload_wherever_it_is_counted(name):
    base, idle = toy.method(), 4  # in round 1's cohort

    def client_update(shared, per_client, state, client_data, key):
        output = base.client_update(shared, per_client, state, client_data, key)
        weight = jnp.where(per_client == idle, 0.0, output.weight)
        return output._replace(weight=weight, metrics={**output.metrics, **of_uploads(output.weight)})

    def server_update(server, aggregate, data, key):
        server, metrics = base.server_update(server, aggregate, data, key)
        of_all = {"client/upload_bytes": Sum(jnp.arange(5)), "client/upload_rounds": Sum(jnp.int32(1))}
        return server, {**metrics, **of_all}

    problem = toy.problem(made=base._replace(client_update=client_update, server_update=server_update))
    cohort = sample(jax.random.key(0), jnp.int32(0), problem.spec, 9).ids.tolist()
    _, state, (row,) = toy.run(problem, toy.EXECUTIONS[name], 1)
    assert idle in cohort
    assert (row["client/participants"], row["client/non_finite"]) == (4, 0)
    assert (row["comm/bytes_up"], row["comm/bytes_down"]) == (4 * 4, 5 * 4)
    assert row["client/upload_fraction"] == pytest.approx(np.mean([toy.SIZES[k] for k in cohort if k != idle]))
    assert row["client/upload_bytes"] == 0 + 1 + 2 + 3 + 4 - cohort.index(idle)
    assert row["client/upload_rounds"] == 1
    assert state.clients[idle] == 1  # its state is what it says


def test_a_round_in_which_nobody_takes_part_says_so(caplog):
    idle = engine.with_outputs(toy.method(), lambda output: output._replace(weight=jnp.zeros(())))
    with caplog.at_level(logging.WARNING):
        _, _, (row,) = toy.run(toy.problem(made=idle), Execution(), 1)
    assert row["client/participants"] == 0
    assert "round 1: no client took part" in caplog.text
    without = idle._replace(requires=idle.requires._replace(clients=False))
    caplog.clear()
    _, _, (row,) = toy.run(toy.problem(made=without), Execution(), 1)
    assert "client/participants" not in row
    assert not caplog.text


@pytest.mark.parametrize("all_states", [False, True])
def test_client_states_are_spread_over_the_devices_unless_the_method_reads_all(all_states):
    def states_of(devices):
        base = toy.method()

        def init(key, spec):
            server, counts = base.init(key, spec)
            return server, (counts, jnp.arange(2.0 * spec.num_clients).reshape(-1, 2), counts > 0)

        def update(shared, per_client, state, client_data, key):
            count, numbers, seen = state
            output = base.client_update(shared, per_client, count, client_data, key)
            return output._replace(client_state=(output.client_state, numbers * 1.5 - 1, ~seen))

        requires = base.requires._replace(all_states=all_states)
        problem = toy.problem(sizes=(*toy.SIZES, 3), made=base._replace(init=init, client_update=update, requires=requires))
        return toy.run(problem, Execution(1, devices=devices), 3)[1].clients

    one, spread = states_of(1), states_of(4)
    for a, b in zip(one, spread, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
        assert {piece.data.shape[0] for piece in b.addressable_shards} == ({8} if all_states else {2})
    assert one[0].sum() == 15


def test_a_state_of_another_shape_is_an_error_and_not_a_second_compilation():
    simulator, state, _ = toy.run(toy.problem(), Execution(), 1)
    with pytest.raises(TypeError, match="float32"):
        simulator.round(state._replace(server={"w": jnp.zeros(2)}))


@pytest.mark.parametrize("name", ["vmap", "sharded"])
def test_the_template_is_the_state(name):
    simulator = Simulator(toy.problem(), toy.EXECUTIONS[name])
    template, state = simulator.template(), simulator.initialize()
    same = jax.tree.map(lambda t, x: (t.shape, t.dtype) == (x.shape, x.dtype) and t.sharding == x.sharding, template, state)
    assert jax.tree.all(same)


@pytest.mark.parametrize(("name", "batch_size"), [("vmap", 3), ("sharded", 3), ("sharded", 1)])
def test_evaluation_counts_every_test_image_once(name, batch_size):
    # 4 images: in batches of 3 on one device; on 4 devices, two of which have none; one on each.
    given = []

    def scores(*outputs):
        given.append(outputs)
        return {"known": 0.5, "unknown": float("nan")}

    simulator = Simulator(toy.problem()._replace(scores=scores), toy.EXECUTIONS[name]._replace(batch_size=batch_size))
    # w = 0: the logits are (pixel, 0), so that class 0 wins, also at the tie of a black pixel.
    labels = np.asarray(toy.data().test.labels)
    pixels = np.asarray(toy.data().test.images, np.float64).ravel()
    (got,) = simulator.evaluate(simulator.initialize())
    assert got["eval/accuracy"] == pytest.approx(np.mean(labels == 0))
    losses = np.log1p(np.exp(-np.where(labels == 0, pixels, -pixels)))
    assert got["eval/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert got.keys() == {"eval/accuracy", "eval/loss", "eval/known"}
    ((outputs, of_scores),) = given
    np.testing.assert_array_equal(outputs, np.stack([pixels, 0 * pixels], 1))
    np.testing.assert_array_equal(of_scores, labels)


def test_every_other_prediction_is_an_accuracy_with_its_name():
    method = toy.method()

    def parity(server, images, mask):  # of the position, which the labels follow
        return jax.nn.one_hot(jnp.arange(len(images)) % 2, 2)

    two = method._replace(predict={**method.predict, "parity": parity})
    simulator = Simulator(toy.problem(made=two), Execution())
    (got,) = simulator.evaluate(simulator.initialize())
    assert got.keys() == {"eval/accuracy", "eval/accuracy_parity", "eval/loss"}
    assert (got["eval/accuracy"], got["eval/accuracy_parity"]) == (0.5, 1)


@functools.cache
def alone(seed: int) -> tuple[list, list]:
    """The states after 0, 1 and 2 rounds of a run of its own, and the rows, evaluated."""
    return engine.simulate(types.SimpleNamespace(problem=toy.problem(seeds=(seed,))), "vmap", rounds=2)[1:]


@pytest.mark.parametrize(("rounds", "layout"), [(2, {}), (1, {"runs_at_once": 2, "devices": 2})])
def test_several_runs_that_are_vmapped_are_each_what_it_is_alone(rounds, layout):
    seeds = (0, 4, 5)
    problem = toy.problem(seeds=seeds)._replace(scores=lambda logits, _: {"last": logits[-1, 1]})
    simulator = Simulator(problem, Execution(0, rounds=rounds, vmap_runs=True, **layout))
    state, found = simulator.dispatch(simulator.initialize(), ["a", "b", "c"])
    accuracies = simulator.evaluate(state)
    outputs = [row.pop("eval/last") for row in accuracies]
    for number, (seed, own) in enumerate(zip(seeds, simulator.split(state), strict=True)):
        states, rows = alone(seed)
        expected, own = engine.on_host(states[rounds]), engine.on_host(own)
        np.testing.assert_allclose(own.server["w"], expected.server["w"], rtol=1e-6)
        assert outputs[number] == pytest.approx(own.server["w"] * toy.data().test.images[-1].item(), rel=1e-6)
        np.testing.assert_array_equal(own.clients, expected.clients)
        np.testing.assert_array_equal(own.key, expected.key)
        for row, of_all in zip(rows[:rounds], found, strict=True):
            assert row == pytest.approx(row | of_all[number])
        assert rows[rounds - 1] == pytest.approx(found[-1][number] | accuracies[number])
    again, _ = simulator.dispatch(simulator.join(simulator.split(state)), ["a", "b", "c"])
    assert int(again.round[0]) == 2 * rounds


BIG, LARGE = np.arange(1000, dtype=np.float32), np.full(10, 3.4e38, np.float32)  # of which a sum is infinite


@pytest.mark.parametrize(
    ("leaves", "finite"),
    [
        ((BIG, np.float32(3), LARGE, np.array([True, False]), np.arange(3), np.zeros((0, 3), np.float32)), True),
        ((), True),
        ((BIG, np.float32(np.nan)), False),
        ((np.r_[np.float32(-np.inf), BIG],), False),
        ((np.r_[BIG, np.float32(np.inf)], np.int32(1)), False),
        ((jnp.array([1, jnp.nan, 2], jnp.bfloat16), BIG), False),
    ],
)
def test_all_numbers_are_finite_or_not(leaves, finite):
    assert bool(jax.jit(round_module._all_finite)((*leaves, jax.random.key(0)))) == finite
