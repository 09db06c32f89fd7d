"""What every method keeps: one trace, resume bit for bit, honest metrics, no use of hidden labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.methods import SERVER_ALONE
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy

# Methods whose clients receive one model and send one back, and what they send besides, in bytes.
ONE_MODEL = {"fl2": 4, "fedlabel": 4} | dict.fromkeys(
    ("fixmatch", "semifl", "uda", "feddure", "fedavg", "fedavg_pp", "fedprox", "fedsiam_pi"), 0
)
LEAVES_OUT = ("semifl",)  # a client that accepts nothing sends nothing
FRACTIONS = ("diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy", "diagnostics/correct_ratio", "client/mask_rate")


def host(state):
    """A copy of a state on the host, its key as numbers."""
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, host(a), host(b)))


@pytest.fixture(scope="module", params=tiny.CASES, ids="-".join)
def ran(request):
    """A method's experiment, its states after 0, 2 and 4 rounds, its rows, and how often its client was traced."""
    method, labels_at = request.param
    experiment = tiny.experiment(method, labels_at=labels_at)
    traces = []

    def counted(*args):
        traces.append(1)
        return experiment.problem.method.client_update(*args)

    method = experiment.problem.method._replace(client_update=counted)
    simulator = Simulator(experiment.problem._replace(method=method), toy.executions()["chunked"], 250)
    state, _ = simulator.initialize(0)
    states, rows = {0: jax.tree.map(jnp.copy, state)}, []
    for number in range(1, 5):
        state, row = simulator.round(state)
        rows.append(row | simulator.evaluate(state))
        states[number] = jax.tree.map(jnp.copy, state)
    return experiment, simulator, states, rows, len(traces)


def test_the_client_is_traced_once(ran):
    assert ran[4] == 1


def test_going_on_from_a_state_gives_the_same_bits(ran):
    _, simulator, states, rows, _ = ran
    state = jax.tree.map(jnp.copy, states[2])
    for row in rows[2:]:
        state, got = simulator.round(state)
        assert got | simulator.evaluate(state) == row
    assert same(state, states[4])


def test_state_keeps_its_structure_and_its_key_and_changes(ran):
    _, _, states, _, _ = ran
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[4])
    assert np.array_equal(jax.random.key_data(states[0].key), jax.random.key_data(states[4].key))
    assert not same(states[3]._replace(round=states[4].round), states[4])
    assert int(states[4].round) == 4


def test_it_learns_the_easy_problem(ran):
    _, _, _, rows, _ = ran
    assert rows[-1]["eval/accuracy"] > 0.5  # chance is 0.1
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]


def test_metrics_are_in_range_and_count_what_was_sent(ran):
    experiment, _, states, rows, _ = ran
    name = experiment.settings.method["name"]
    for row in rows:
        assert all(0 <= row[key] <= 1 for key in FRACTIONS if key in row)
        if name in ONE_MODEL:
            params, stats = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in states[0].server.weights)
            sent, rest = divmod(row["comm/bytes_up"], params + ONE_MODEL[name])
            assert rest == 0
            assert sent <= 5 if name in LEAVES_OUT else sent == 5
            assert row["comm/bytes_down"] == 5 * (params + stats)
    for key in ("comm/bytes_up", "cost/forward_passes", "cost/backward_passes"):
        assert (sum(row.get(key, 0) for row in rows) > 0) == (name not in SERVER_ALONE)
    assert ("server/loss" in rows[0]) == ("server" in experiment.settings.data.labels_at)


def test_true_labels_of_unlabeled_images_reach_diagnostics_alone(ran):
    experiment, simulator, states, rows, _ = ran
    data = experiment.problem.data
    labels = np.array(data.train.labels)
    hidden = data.pooled.index[0]
    labels[hidden] = np.roll(labels[hidden], 1)
    spoiled = experiment.problem._replace(data=data._replace(train=data.train._replace(labels=labels)))
    other = Simulator(spoiled, toy.executions()["chunked"], 250)
    state, _ = other.initialize(0)
    for _ in range(2):
        state, row = other.round(state)
    assert same(state, states[2])
    if "diagnostics/pseudo_label_accuracy" in row:
        assert row["diagnostics/pseudo_label_accuracy"] != rows[1]["diagnostics/pseudo_label_accuracy"]
    assert simulator is not other


@pytest.mark.parametrize("norm", ["static", "running", "batch"])
def test_every_batch_norm_mode_learns(norm):
    config = tiny.config("fixmatch", model__norm=norm, rounds=3)
    config["model"] = {"name": "cnn", "norm": norm, "width": 4}
    rows = [row for _, row in build(config).rounds()]
    assert rows[-1]["eval/accuracy"] > 0.35  # chance is 0.1
