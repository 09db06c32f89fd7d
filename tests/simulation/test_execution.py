"""The strategies on a problem that can be computed by hand: means, states, padding, broken clients, traces."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.method import ClientOutput
from fedjax_ssl.metrics import mean
from fedjax_ssl.simulation import round as round_module
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import dealt, run_cohort
from fedjax_ssl.simulation.separate import SeparateSimulator
from fedjax_ssl.simulation.simulator import Simulator
from tests import toy

STRATEGIES = ("vmap", "scan", "chunked", "sharded", "sharded_chunked")
SIMULATORS = [*((Simulator, name) for name in STRATEGIES), (SeparateSimulator, "scan"), (SeparateSimulator, "sharded")]


def expected(rounds: int, cohort_size: int, bad_client: int = -1) -> tuple[float, np.ndarray]:
    """The model and the participation counts after `rounds`, in plain Python."""
    w, taken = 0.0, np.zeros(len(toy.SIZES), np.int32)
    for r in range(rounds):
        ids = np.asarray(sample(jax.random.key(0), jnp.int32(r), len(toy.SIZES), cohort_size).ids)
        used = [k for k in ids if k != bad_client]
        total = sum(toy.SIZES[k] for k in used)
        w += sum(toy.SIZES[k] * 10 * (k + 1) for k in used) / total
        taken[used] += 1
    return w, taken


@pytest.mark.parametrize("aggregator", ["sum", "stack"])
@pytest.mark.parametrize(("simulator_class", "name"), SIMULATORS)
def test_three_rounds_are_what_a_python_loop_computes(simulator_class, name, aggregator):
    simulator = simulator_class(toy.problem(aggregator=aggregator), toy.executions()[name], 4)
    state, _ = simulator.initialize(0)
    for _ in range(3):
        state, metrics = simulator.round(state)
    w, taken = expected(3, 5)
    np.testing.assert_allclose(state.server["w"], w, rtol=1e-6)
    np.testing.assert_array_equal(state.clients, taken)
    assert metrics["comm/bytes_up"] == 5 * 4
    assert metrics["client/non_finite"] == 0
    assert int(state.round) == 3


@pytest.mark.parametrize(("simulator_class", "name"), SIMULATORS)
def test_a_client_that_returns_nan_is_left_out_and_named(simulator_class, name, caplog):
    cohort = np.asarray(sample(jax.random.key(0), jnp.int32(0), len(toy.SIZES), 5).ids)
    bad = int(cohort[2])
    simulator = simulator_class(toy.problem(bad_client=bad), toy.executions()[name], 4)
    state, _ = simulator.initialize(0)
    with caplog.at_level(logging.WARNING):
        state, metrics = simulator.round(state)
    w, taken = expected(1, 5, bad)
    np.testing.assert_allclose(state.server["w"], w, rtol=1e-6)
    np.testing.assert_array_equal(state.clients, taken)  # it keeps its old state
    assert metrics["client/non_finite"] == 1
    assert np.isfinite(metrics["client/loss"])
    assert f"client(s) {bad} " in caplog.text


def test_the_host_simulator_gives_the_same_bits():
    results = []
    for simulator_class in (Simulator, HostSimulator):
        simulator = simulator_class(toy.problem(), toy.executions()["vmap"], 4)
        state, _ = simulator.initialize(0)
        rows = []
        for _ in range(4):
            state, metrics = simulator.round(state)
            rows.append(metrics | simulator.evaluate(state))
        results.append((float(state.server["w"]), np.asarray(state.clients).tolist(), rows))
    assert results[0] == results[1]


def test_clients_are_traced_once_a_run():
    problem = toy.problem()
    traces = []

    def counted(*args):
        traces.append(1)
        return toy.method().client_update(*args)

    for name, execution in toy.executions().items():
        traces.clear()
        simulator = Simulator(problem._replace(method=problem.method._replace(client_update=counted)), execution, 4)
        state, _ = simulator.initialize(0)
        for _ in range(3):
            state, _ = simulator.round(state)
        assert len(traces) == 1, name


def test_a_state_of_another_shape_is_an_error_and_not_a_second_compilation():
    simulator = Simulator(toy.problem(), toy.executions()["vmap"], 4)
    state, _ = simulator.initialize(0)
    state, _ = simulator.round(state)
    with pytest.raises(TypeError, match="float32"):
        simulator.round(state._replace(server={"w": jnp.zeros(2)}))


def test_the_template_is_the_state():
    for execution in (toy.executions()["vmap"], toy.executions()["sharded"]):
        simulator = Simulator(toy.problem(), execution, 4)
        template = simulator.template(0)
        state, _ = simulator.initialize(0)
        same = jax.tree.map(lambda t, x: (t.shape, t.dtype) == (x.shape, x.dtype) and t.sharding == x.sharding, template, state)
        assert jax.tree.all(same)


@pytest.mark.parametrize(("name", "batch_size"), [("vmap", 3), ("sharded", 3), ("sharded", 1)])
def test_evaluation_counts_every_test_image_once(name, batch_size):
    # 4 images: in batches of 3 on one device; on 4 devices, two of which have none; one on each.
    simulator = Simulator(toy.problem(), toy.executions()[name], batch_size)
    state, _ = simulator.initialize(0)
    # w = 0: the logits are (pixel, 0), so that class 0 wins, also at the tie of a black pixel.
    labels = np.asarray(toy.data().test.labels)
    pixels = np.asarray(toy.data().test.images, np.float64).ravel()
    got = simulator.evaluate(state)
    assert got["eval/accuracy"] == pytest.approx(np.mean(labels == 0))
    losses = np.log1p(np.exp(-np.where(labels == 0, pixels, -pixels)))
    assert got["eval/loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.parametrize(("size", "chunk", "devices"), [(10, 1, 2), (9, 2, 2), (7, 3, 1), (1, 1, 4), (16, 2, 4)])
def test_clients_are_dealt_to_chunks_and_devices_by_how_much_they_have_to_do(size, chunk, devices):
    ranks = dealt(size, chunk, devices)
    assert sorted(ranks) == list(range(len(ranks)))  # each once
    assert len(ranks) - size < chunk * devices
    work = np.r_[np.sort(np.random.default_rng(0).integers(1, 100, size))[::-1], np.zeros(len(ranks) - size, int)]
    of_chunks = work[ranks].reshape(devices, -1, chunk)
    assert np.all(of_chunks[:, :, :1] >= of_chunks)  # in a chunk there are neighbors, the longest first
    longest = of_chunks[:, :, 0].sum(axis=1)
    assert longest.max() - longest.min() <= work[0]
    if (size, chunk, devices) == (10, 1, 2):
        np.testing.assert_array_equal(ranks.reshape(2, 5), [[0, 3, 4, 7, 8], [1, 2, 5, 6, 9]])


@pytest.mark.parametrize("name", ["sharded_chunked", "chunked"])
def test_results_come_back_in_the_cohorts_order_whoever_is_dealt_where(name):
    def client(shared, number):
        return ClientOutput({"w": shared * number}, number, {"of": number}, {"m": mean(number, True)})

    numbers = jnp.float32([3, 1, 4, 1.5, 9, 2, 6])
    work = jnp.array([5, 1, 9, 2, 6, 5, 3])
    output = run_cohort(client, jnp.float32(2), numbers, aggregator="stack", execution=toy.executions()[name], work=work)
    np.testing.assert_array_equal(output.client_states["of"], numbers)
    np.testing.assert_array_equal(output.aggregate.update["w"], 2 * numbers)
    np.testing.assert_array_equal(output.metrics["m"].total, numbers)
    one = run_cohort(client, jnp.float32(2), numbers[:1], aggregator="sum", execution=toy.executions()[name])
    assert one.aggregate == ({"w": 6.0}, 3.0)  # fewer clients than devices


@pytest.mark.parametrize("name", STRATEGIES)
def test_several_rounds_of_one_dispatch_are_what_single_ones_are(name):
    execution = toy.executions()[name]
    simulator, several = (Simulator(toy.problem(bad_client=3), e, 4) for e in (execution, execution._replace(rounds=3)))
    state, _ = simulator.initialize(0)
    together, found = several.dispatch(several.initialize(0)[0])
    rows = []
    for _ in range(3):
        state, row = simulator.round(state)
        rows.append(row)
    assert found == [pytest.approx(row) for row in rows]
    assert [row["client/non_finite"] for row in rows] != [0, 0, 0]
    assert together.round == 3
    np.testing.assert_allclose(together.server["w"], state.server["w"], rtol=1e-6)
    np.testing.assert_array_equal(together.clients, state.clients)


BIG = np.arange(1000, dtype=np.float32)


@pytest.mark.parametrize(
    ("tree", "finite"),
    [
        ({"a": BIG, "b": np.float32(3)}, True),
        ({"a": BIG, "b": np.float32(np.nan)}, False),
        ({"a": np.r_[BIG, np.float32(np.nan)]}, False),
        ({"a": np.r_[np.float32(-np.inf), BIG]}, False),
        ({"a": np.r_[BIG, np.float32(np.inf)], "b": np.int32(1)}, False),
        ({"a": jnp.array([1, jnp.nan, 2], jnp.bfloat16), "b": BIG}, False),
        ({"a": np.float32(3.4e38) * np.ones(10, np.float32)}, True),  # of which a sum is infinite
        ({"a": np.array([True, False]), "b": np.arange(3)}, True),
        ({"a": jax.random.key(0), "b": np.zeros((0, 3), np.float32)}, True),
        ((), True),
    ],
)
def test_all_numbers_are_finite_or_not(tree, finite):
    assert bool(jax.jit(round_module._all_finite)(tree)) == finite
