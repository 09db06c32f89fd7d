"""The strategies compute the same rounds: for all methods one at 1e-5 and three at 1e-4, by one compiled program each.

By the third round clients have come back to what they keep, FedMatch's have had helpers, and methods of two phases are in the
second. Thresholds and argmax turn rounding into different decisions sooner or later: for these seeds they are alike, as the
diagnostics show.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.separate import SeparateSimulator

from fedjax_ssl.simulation import round as round_module
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy

EQUAL = (
    *("comm/bytes_up", "comm/bytes_down", "cost/forward_passes", "cost/backward_passes", "perf/client_images"),
    *("client/upload_fraction", "diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy"),
)
"""What is counted, and what is decided."""
STRATEGIES = ("scan", "chunked", "sharded", "sharded_chunked")
# Each takes its own compilation. The fast one has chunks, padding and devices; `tests/contract` runs all methods in chunks.
FAST_FIRST = ["sharded_chunked", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunked", "scan", "sharded"))]


def run(experiment, strategy, simulator_class=Simulator, start=None):
    """The states after each of three rounds from a fresh state, or from `start`, on the host, and the rows of metrics."""
    simulator = simulator_class(experiment.problem, toy.executions()[strategy], 250)
    if start is None:
        state, _ = simulator.initialize(0)
    else:
        place = jax.tree.map(lambda template: template.sharding, simulator.template(0))
        state = jax.device_put(jax.tree.map(jnp.copy, start), place)
    states, rows, compiled = [], [], set()
    for _ in range(3):
        state, metrics = simulator.round(state)
        state_as_numbers = state._replace(key=jax.random.key_data(state.key))
        states.append(jax.tree.map(np.array, jax.device_get(state_as_numbers)))  # copies: a round writes over host arrays
        rows.append(metrics)
        compiled.add(simulator.compile_s)
    assert len(compiled) == 1  # later rounds go on by the first one's program
    return states, rows


def confident(method: str) -> dict[str, float]:
    """A threshold that some pass in round 1, so that clients train, as an override of a tiny config."""
    return {"method__confidence": 0.12} if "confidence" in tiny.config(method)["method"] else {}


@functools.cache
def reference(method: str, labels_at: str):
    """The experiment, and what `vmap` makes of it."""
    experiment = tiny.experiment(method, labels_at=labels_at, **confident(method))
    return experiment, *run(experiment, "vmap")


def distance(a, b) -> float:
    """Relative Euclidean distance over all parameters."""
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


# Half a minute each: the methods that differ most in what clients keep, send and train; the others are slow tests.
FAST = (
    *((name, "server") for name in ("fl2", "semifl", "fedmatch", "fedsiam_d")),
    *((name, "clients") for name in ("uda", "feddure")),
)


def assert_agree(expected, got, tolerance=1e-4):
    """The server with all that it keeps, and what clients keep."""
    for tree, other in ((expected.server, got.server), (expected.clients, got.clients)):
        assert not jax.tree.leaves(tree) or distance(tree, other) < tolerance


def assert_same_rounds(expected, got):
    """Of two pairs (states, rows): the states, what was counted, and what was decided."""
    (states, rows), (got_states, got_rows) = expected, got
    assert [{key: row[key] for key in EQUAL if key in row} for row in got_rows] == [
        {key: row[key] for key in EQUAL if key in row} for row in rows
    ]
    assert_agree(states[0], got_states[0], 1e-5)
    assert_agree(states[2], got_states[2])


@pytest.mark.parametrize("strategy", FAST_FIRST)
@pytest.mark.parametrize("case", tiny.by_speed(FAST))
def test_one_and_three_rounds_of_every_method_agree(case, strategy):
    experiment, *expected = reference(*case)
    assert all(row.get("client/mask_rate", 1) > 0 for row in expected[1])
    assert_same_rounds(expected, run(experiment, strategy))


# FedSiam-D's updates are stacked; FedMatch's steps take two turns.
@pytest.mark.parametrize("case", tiny.by_speed((("fl2", "server"), ("fedsiam_d", "server"))))
def test_clients_in_programs_of_their_own_give_the_same_rounds(case):
    experiment, *expected = reference(*case)
    assert_same_rounds(expected, run(experiment, "sharded_chunked", SeparateSimulator))


@pytest.mark.parametrize("case", tiny.by_speed((("fl2", "server"), ("fedmatch", "clients"))))
def test_steps_that_are_written_out_give_the_same_rounds(case):
    method, labels_at = case
    few = {"client__epochs": 0, "client__steps": 3, "server__epochs": 0, "server__steps": 2} | confident(method)
    experiments = (tiny.experiment(method, labels_at=labels_at, execution__steps=how, **few) for how in ("loop", "unrolled"))
    looped, unrolled = (run(experiment, "scan") for experiment in experiments)
    assert_same_rounds(looped, unrolled)


@pytest.mark.parametrize("strategy", ["vmap", "chunked"])
def test_a_permuted_cohort_gives_the_same_rounds(monkeypatch, strategy):
    # In chunks of 2 of 5 clients, others then share a chunk, and another one is repeated as padding.
    experiment, states, _ = reference("fl2", "server")
    sample = round_module.sample

    def permuted(*args):
        cohort = sample(*args)
        return cohort._replace(ids=cohort.ids[::-1])

    monkeypatch.setattr(round_module, "sample", permuted)
    assert_agree(states[2], run(experiment, strategy)[0][2])


# A network with static batch norm, on RandAugment's views. FixMatch alone, to compile in seconds: SACR's passes are compared
# above. Every pseudo-label is accepted; they and the rounding down in RandAugment turn out alike for this seed.
CNN = {
    "method__confidence": 0.0, "data__strong": "usb", "execution__conv": "im2col", "client__epochs": 0, "client__steps": 2,
    "client__batch_size": 16, "server__epochs": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def cnn():
    """The experiment, its initial state, and what `vmap` makes of it."""
    experiment = tiny.experiment("fixmatch", network="cnn", **CNN)
    start, _ = Simulator(experiment.problem, toy.executions()["vmap"], 250).initialize(0)
    assert start.server.weights.stats
    return experiment, start, *run(experiment, "vmap", start=start)


@pytest.mark.parametrize(
    "strategy", ["chunked", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "chunked")]
)
def test_batch_norm_and_randaugment_agree_over_one_and_three_rounds(cnn, strategy):
    experiment, start, states, rows = cnn
    got_states, got_rows = run(experiment, strategy, start=start)
    for key in ("diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy"):
        assert [row[key] for row in got_rows] == [row[key] for row in rows]
    for number, tolerance in ((0, 1e-5), (2, 1e-4)):
        expected, got = (each[number].server.weights for each in (states, got_states))
        assert distance(expected.params, got.params) < tolerance
        assert distance(expected.stats, got.stats) < tolerance
        assert distance(states[number].clients, got_states[number].clients) < tolerance


@pytest.mark.parametrize(
    ("method", "labels_at"),
    [("fl2", "server"), ("uda", "clients"), pytest.param("fedcon", "server", marks=pytest.mark.slow)],
)
def test_data_on_the_host_give_the_same_bits(usual_emitters, method, labels_at):
    experiment, states, rows = reference.__wrapped__(method, labels_at)  # compiled anew
    got_states, got_rows = run(experiment, "vmap", HostSimulator)
    assert got_rows == rows
    assert jax.tree.all(jax.tree.map(np.array_equal, states, got_states))
