"""The strategies compute the same rounds: one round at 1e-5 for all methods, three at 1e-4 in a smooth setting.

Thresholds and argmax turn rounding into different decisions sooner or later, so the three rounds use a method without a
threshold to cross: every pseudo-label is accepted (`confidence` 0), and labels are far from ties for this seed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.simulation import round as round_module
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy

COUNTED = ("comm/bytes_up", "comm/bytes_down", "cost/forward_passes", "cost/backward_passes", "perf/client_images")
STRATEGIES = ("scan", "chunked", "sharded", "sharded_chunked")
# Each takes its own compilation. The fast one has chunks, padding and devices; `tests/contract` runs all methods in chunks.
FAST_FIRST = ["sharded_chunked", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunked", "scan", "sharded"))]


def run(experiment, execution, rounds, simulator_class=Simulator):
    simulator = simulator_class(experiment.problem, execution, 250)
    state, _ = simulator.initialize(0)
    rows = []
    for _ in range(rounds):
        state, metrics = simulator.round(state)
        rows.append(metrics)
    return jax.device_get(state._replace(key=jax.random.key_data(state.key))), rows


@functools.cache
def reference(method: str, rounds: int, smooth: bool, labels_at: str = ""):
    overrides = SMOOTH if smooth else {}
    if not smooth and "confidence" in tiny.config(method)["method"]:
        overrides = {"method__confidence": 0.12}  # so that some pass in round 1, and clients train
    experiment = tiny.experiment(method, labels_at=labels_at, **overrides)
    return experiment, run(experiment, toy.executions()["vmap"], rounds)


SMOOTH = {"method__threshold": "fixed", "method__confidence": 0.0}


def distance(a, b) -> float:
    """Relative Euclidean distance over all parameters."""
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


# Half a minute each: the methods that differ most in what clients keep, send and train; the others are slow tests.
FAST = (("fl2", "server"), ("fedmatch", "clients"), ("fedsiam_d", "server"), ("feddure", "clients"))


@pytest.mark.parametrize("strategy", FAST_FIRST)
@pytest.mark.parametrize("case", tiny.by_speed(FAST))
def test_one_round_of_every_method_agrees(case, strategy):
    """The server, what clients keep, and what was counted; then a round that goes on from there by the compiled program."""
    method, labels_at = case
    experiment, (expected, (row,)) = reference(method, 1, False, labels_at)
    assert row.get("client/mask_rate", 1) > 0
    simulator = Simulator(experiment.problem, toy.executions()[strategy], 250)
    state, _ = simulator.initialize(0)
    state, got = simulator.round(state)
    for tree, other in ((expected.server, state.server), (expected.clients, state.clients)):
        assert not jax.tree.leaves(tree) or distance(tree, other) < 1e-5
    assert {key: got[key] for key in COUNTED if key in got} == {key: row[key] for key in COUNTED if key in row}
    seconds = simulator.compile_s
    simulator.round(state)
    assert simulator.compile_s == seconds


@pytest.mark.parametrize("strategy", FAST_FIRST)
def test_three_rounds_agree_and_decide_alike(strategy):
    experiment, (expected, expected_rows) = reference("fl2", 3, True)
    state, rows = run(experiment, toy.executions()[strategy], 3)
    for key in ("diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy"):
        assert [row[key] for row in rows] == [row[key] for row in expected_rows]
    assert distance(expected.server.weights, state.server.weights) < 1e-4
    assert distance(expected.clients, state.clients) < 1e-4


@pytest.mark.parametrize("strategy", ["vmap", "chunked"])
def test_a_permuted_cohort_gives_the_same_round(monkeypatch, strategy):
    # In chunks of 2 of 5 clients, others then share a chunk, and another one is repeated as padding.
    experiment, (expected, _) = reference("fl2", 3, True)
    sample = round_module.sample

    def permuted(*args):
        cohort = sample(*args)
        return cohort._replace(ids=cohort.ids[::-1])

    monkeypatch.setattr(round_module, "sample", permuted)
    state, _ = run(experiment, toy.executions()[strategy], 3)
    assert distance(expected.server, state.server) < 1e-4
    assert distance(expected.clients, state.clients) < 1e-4


# A network with static batch norm, on RandAugment's views. FixMatch alone, to compile in seconds: SACR's passes are compared
# above. Every pseudo-label is accepted, as in SMOOTH; they and the rounding down in RandAugment turn out alike for this seed.
CNN = {
    "method__confidence": 0.0, "data__strong": "usb", "execution__conv": "im2col", "client__epochs": 0, "client__steps": 2,
    "client__batch_size": 16, "server__epochs": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def cnn():
    """The experiment, its initial state, and what `vmap` makes of it after 1 and 3 rounds."""
    experiment = tiny.experiment("fixmatch", network="cnn", **CNN)
    start, _ = Simulator(experiment.problem, toy.executions()["vmap"], 250).initialize(0)
    assert start.server.weights.stats
    return experiment, start, rounds_of(experiment, start, "vmap")


def rounds_of(experiment, start, strategy):
    """The states after 1 and 3 rounds from the state `start`, and all rows of metrics."""
    simulator = Simulator(experiment.problem, toy.executions()[strategy], 250)
    place = jax.tree.map(lambda template: template.sharding, simulator.template(0))
    state = jax.device_put(jax.tree.map(jnp.copy, start), place)
    states, rows = [], []
    for _ in range(3):
        state, row = simulator.round(state)
        rows.append(row)
        states.append(jax.device_get(state._replace(key=())))
    return states[0], states[2], rows


@pytest.mark.parametrize(
    "strategy", ["chunked", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "chunked")]
)
def test_batch_norm_and_randaugment_agree_over_one_and_three_rounds(cnn, strategy):
    experiment, start, (first, third, rows) = cnn
    got_first, got_third, got_rows = rounds_of(experiment, start, strategy)
    for key in ("diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy"):
        assert [row[key] for row in got_rows] == [row[key] for row in rows]
    for expected, got, tolerance in ((first, got_first, 1e-5), (third, got_third, 1e-4)):
        assert distance(expected.server.weights.params, got.server.weights.params) < tolerance
        assert distance(expected.server.weights.stats, got.server.weights.stats) < tolerance
        assert distance(expected.clients, got.clients) < tolerance


@pytest.mark.parametrize(
    ("method", "rounds", "smooth"),
    [("fl2", 3, True), ("uda", 1, False), pytest.param("fedcon", 2, False, marks=pytest.mark.slow)],
)
def test_data_on_the_host_give_the_same_bits(method, rounds, smooth):
    experiment, (expected, expected_rows) = reference(method, rounds, smooth)
    state, rows = run(experiment, toy.executions()["vmap"], rounds, HostSimulator)
    assert rows == expected_rows
    assert jax.tree.all(jax.tree.map(np.array_equal, expected, state))
