"""What every method keeps: one trace, resume bit for bit, honest metrics, clients that contribute, no use of hidden labels."""

import jax
import numpy as np
import pytest

from tests import engine, tiny
from tests.golden.linear_clients import ratios

# Methods whose clients receive one model and send one back, and what they send besides, in bytes.
ONE_MODEL = {"fl2": 4, "fedlabel": 4} | dict.fromkeys(
    ("fixmatch", "semifl", "uda", "feddure", "fedavg", "fedavg_pp", "fedprox", "fedsiam_pi"), 0
)
FRACTIONS = ("diagnostics/label_ratio", "diagnostics/pseudo_label_accuracy", "diagnostics/correct_ratio", "client/mask_rate")

ALWAYS = {"server/non_finite", "client/non_finite", "eval/accuracy", "eval/loss"}
OF_CLIENTS = {
    "client/participants", "client/loss", "comm/bytes_up", "comm/bytes_down", "perf/client_images", "cost/forward_passes",
    "cost/backward_passes",
}  # fmt: skip
DIAGNOSTICS = set(ratios(0, 0, 0))
LABELING = DIAGNOSTICS | {"client/mask_rate"}
WEIGHTS = {f"client/instance_weight_{name}" for name in ("mean", "p10", "p90")}
OWN = {
    "fl2": LABELING | {"client/threshold", "client/consistency_loss"},
    "semifl": LABELING | {"client/mix_loss"},
    "fedmatch": LABELING | {"client/consistency_loss", "client/upload_fraction"},
    "fedcon": {"server/consistency_loss"},
    "fedsiam_pi": {"client/consistency_loss"},
    "fedsiam_mt": {"client/consistency_loss", "eval/accuracy_online"},
    "fedsiam_d": {
        "client/consistency_loss", "eval/accuracy_online", "client/upload_fraction", "client/upload_bytes_fraction",
    },
    "fixmatch": LABELING,
    "uda": LABELING,
    "freematch": LABELING | {"client/threshold"},
    "sage": LABELING | {"client/unlabeled_loss"},
    "cbafed": LABELING,
    "rscfed": {"server/labeled_share"},
    "twinsight": LABELING | {"client/instance_loss", "client/neighborhood_loss"},
    "feddb": LABELING | {"client/unlabeled_loss"},
    "feddure": DIAGNOSTICS | WEIGHTS | {"client/reward", "client/unlabeled_loss"},
    "fedlabel": LABELING
    | {"client/unlabeled_loss", "client/consistency_loss", "client/local_expert_rate", "client/agreement_rate"},
    "fedtrinet": DIAGNOSTICS | {"client/unlabeled_loss", "client/threshold"},
    "fedsem": DIAGNOSTICS,
    "fixmatch_central": DIAGNOSTICS | {"server/mask_rate"},
    "freematch_central": DIAGNOSTICS | {"server/mask_rate", "server/threshold"},
}  # fmt: skip
"""What a method reports besides, in the rounds in which it has a meaning."""


@pytest.fixture(scope="module", params=tiny.params(fast=tiny.FEW, ci=tiny.SOME))
def ran(request):
    """A method's experiment, its simulator, its states after 0 to 4 rounds, its rows, and how often its client was traced."""
    method, labels_at = request.param
    experiment, traces = tiny.experiment(method, labels_at=labels_at), []

    def counted(method):
        return engine.with_outputs(method, lambda output: traces.append(1) or output)

    return experiment, *engine.simulate(experiment, changed=counted, rounds=4), len(traces)


def test_going_on_from_a_state_gives_the_same_bits(ran):
    _, simulator, states, rows, _ = ran
    engine.assert_goes_on(simulator, states, rows, 2)


def test_it_is_traced_once_learns_and_keeps_its_states_structure(ran):
    _, _, states, rows, traces = ran
    assert traces == 1
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[4])
    assert np.array_equal(jax.random.key_data(states[0].key), jax.random.key_data(states[4].key))
    assert not engine.same_bits(states[3]._replace(round=states[4].round), states[4])
    assert int(states[4].round) == 4
    assert rows[-1]["eval/accuracy"] > 0.5  # chance is 0.1
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]


def test_metrics_are_those_of_the_method_and_in_range(ran):
    experiment, _, states, rows, _ = ran
    settings, requires = experiment.settings, experiment.method.requires
    name = settings.method.name
    keys = ALWAYS | OWN.get(name, set()) | (OF_CLIENTS if requires.clients else set())
    if settings.data.labels_at == "server":
        keys |= {"server/loss"}
        if name.startswith("fedsiam"):  # its clients' loss is of labels
            keys -= {"client/loss"}
    elif name in ("fedmatch", "fixmatch", "uda"):
        keys |= {"client/unlabeled_loss"}
    assert set().union(*rows) == keys
    for row in rows:
        assert all(0 <= row[key] <= 1 for key in set(FRACTIONS) & set(row))
        if name in ONE_MODEL:
            params, stats = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in states[0].server.weights)
            sent, rest = divmod(row["comm/bytes_up"], params + ONE_MODEL[name])
            assert rest == 0
            assert sent == row["client/participants"]
            assert row["comm/bytes_down"] == 5 * (params + stats)
    for key in ("comm/bytes_up", "comm/bytes_down", "cost/forward_passes", "cost/backward_passes", "perf/client_images"):
        assert (sum(row.get(key, 0) for row in rows) > 0) == requires.clients


@pytest.mark.parametrize("case", tiny.params(fast=(), ci=[("fl2", "server")]))
def test_clients_contribute_and_updates_of_zeros_do_not(case):
    method, labels_at = case
    # So that a round is the clients' work.
    quiet = {"server__training__optimizer__learning_rate": 1e-9, "server__training__pretrain": 0}
    experiment = tiny.experiment(method, labels_at=labels_at, **tiny.confident(method, 0.1), **quiet)
    real, zero = engine.changes(experiment, factors=(1.0, 0.0), rounds=2)
    assert zero < 1e-6
    assert (real > 1e-4) == (method not in tiny.WITHOUT_CLIENTS) == experiment.method.requires.clients


@pytest.mark.parametrize("case", tiny.params(fast=(), ci=[("fl2", "server")]))
def test_factors_of_layers_reach_every_step_of_client_and_server(case):
    """With the factor 0 for all parameters nothing that is evaluated moves but by an average's rounding."""
    method, labels_at = case
    frozen = {f"{group}__optimizer__layers": "Dense_[01]/=0" for group in ("client", "server__training")}
    experiment = tiny.experiment(method, labels_at=labels_at, **tiny.confident(method, 0.1), **frozen)
    _, states, _ = engine.simulate(experiment, "scan", rounds=2, evaluated=False)
    before, after = (state.server for state in states[::2])
    assert engine.distance(before.weights.params, after.weights.params) < 1e-7
    if hasattr(before, "average"):  # of methods on pooled data
        assert engine.distance(before.average, after.average) < 1e-7


def test_true_labels_of_unlabeled_images_reach_diagnostics_alone(monkeypatch, ran):
    experiment, simulator, states, rows, _ = ran
    train, test = simulator._pools
    hidden = experiment.problem.data.pooled.index[0]
    changed = {}
    for change in ("other", "unknown"):
        labels = np.array(train.labels)
        labels[hidden] = np.roll(labels[hidden], 1) if change == "other" else -1
        spoiled = train._replace(labels=jax.device_put(labels, train.labels.sharding))
        monkeypatch.setattr(simulator, "_pools", (spoiled, test))
        state, changed[change] = simulator.initialize(), []
        for _ in range(2):
            state, row = simulator.round(state)
            changed[change].append(row)
        if not experiment.settings.data.reveal_labels:
            assert engine.same_bits(state, states[2])
            assert change == "other" or not any(key.startswith("diagnostics/") for row in changed[change] for key in row)
    key = "diagnostics/pseudo_label_accuracy"
    for row, other in zip(rows[:2], changed["other"], strict=True):
        assert (key in row) == (key in other)
        assert key not in row or row[key] != other[key]


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "running", "static"])
def test_every_batch_norm_mode_learns(norm):
    rows = [row for _, row in tiny.experiment("fixmatch", network="cnn", model__norm=norm, rounds=3).rounds()]
    assert rows[-1]["eval/accuracy"] > 0.35  # chance is 0.1
