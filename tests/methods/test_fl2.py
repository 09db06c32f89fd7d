"""(FL)^2's client by its edge cases and ablations."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import local
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import ClientData
from fedjax_ssl.methods.fl2 import FL2Options, pseudo_label
from tests import engine, tiny
from tests.methods.clients import Client, finite, norm, same


@pytest.fixture(scope="module")
def client():
    return Client("fl2")


@pytest.mark.ci
def test_a_client_that_accepts_nothing_returns_the_global_model_with_its_weight(client):
    # Equal outputs for all images: every confidence is tau_k itself, and nothing lies strictly above.
    output = client(weights=client.biased(2.0))
    tau = np.exp(2) / (np.exp(2) + 9)
    assert norm(output.update) == 0
    np.testing.assert_allclose(output.weight, 1 - tau, rtol=1e-5)
    assert output.metrics["diagnostics/label_ratio"].total == 0
    assert output.metrics["perf/client_images"].total == 0
    assert same(output.client_state, client.kept)
    sure = client(weights=client.biased(1e4))  # tau_k = 1
    assert 0 < sure.weight < 1e-10
    assert norm(sure.update) == 0


@pytest.mark.ci
def test_a_client_of_one_image_trains_on_it_and_stays_finite():
    # With > nothing lies above the mean of one confidence. Batch norm then sees one real image in a batch of padding.
    options = {"method__strict": False, "method__batches": "accepted", "execution__conv": "xla"}
    client = Client("fl2", network="cnn", client__batch_size=8, **options)
    assert client.weights.stats
    output = client(unlabeled=1)
    assert finite(output)
    assert norm(output.update) > 0
    assert output.weight > 0
    assert output.metrics["perf/client_images"].total == 1
    assert output.metrics["diagnostics/label_ratio"] == (1, 1)


PROBS = np.array([[0.97, 0.02, 0.01], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.96, 0.03, 0.01], [0.2, 0.2, 0.6]], np.float32)


def labeling(monkeypatch, true=(0, 0, 2, 1, 2), **options):
    """Pseudo-labels of five images whose softmax outputs are PROBS; the last is padding."""
    monkeypatch.setattr(local, "class_probabilities", lambda *_: jnp.asarray(PROBS))
    unlabeled = Examples(None, jnp.arange(5), jnp.int32(4), None)
    client_data = ClientData(unlabeled, unlabeled, jnp.array(true))
    return pseudo_label(None, FL2Options(**options), None, client_data, None)


# tau = mean(.97, .5, .8, .96) = .8075; pbar = (.6325, .2875, .08), so tau(c) = (.8075, .3670, .1021).
@pytest.mark.parametrize(("on", "expected"), [("accepted", [1, 0, 1, 1, 0]), ("correct", [1, 0, 0, 0, 0])])
def test_sacr_acts_on_the_chosen_examples(monkeypatch, on, expected):
    assert labeling(monkeypatch, consistency_on=on).consistent.astype(int).tolist() == expected


@pytest.mark.parametrize("on", ["confident", "correct"])
def test_the_oracle_changes_the_labels_of_what_is_accepted_and_nothing_else(monkeypatch, on):
    usual, oracle = (labeling(monkeypatch, pseudo_labels=which, consistency_on=on) for which in ("global", "true"))
    assert usual.label.tolist() == [0, 0, 1, 0, 2]
    assert oracle.label.tolist() == [0, 0, 2, 1, 2]
    assert same(oracle._replace(label=usual.label), usual)
    unknown = labeling(monkeypatch, pseudo_labels="true", true=(-1, 0, 2, 1, 2))
    assert [unknown.accepted.tolist(), unknown.consistent.tolist()] == [
        [False, False, True, True, False],
        [False] * 3 + [True, False],
    ]


def test_a_fixed_threshold_accepts_the_confident_alone(monkeypatch):
    for strict, expected in ((True, [True, False, False, False, False]), (False, [True, False, False, True, False])):
        got = labeling(monkeypatch, threshold="fixed", confidence=float(np.float32(0.96)), strict=strict)
        assert got.accepted.tolist() == expected


@pytest.mark.ci
def test_fixmatch_is_fl2_without_its_three_parts_bit_for_bit(usual_emitters):
    parts_off = {"method__threshold": "fixed", "method__consistency": "none", "method__aggregation": "uniform"}
    (states, rows), (others, other_rows) = (
        engine.simulate(tiny.experiment(method, rounds=2, method__confidence=0.2, **overrides), rounds=2)[1:]
        for method, overrides in (("fixmatch", {}), ("fl2", parts_off))
    )
    assert all(row.pop("client/threshold") == pytest.approx(0.2) for row in other_rows)
    assert rows == other_rows
    assert same(states[2].server, others[2].server)
    assert not same(states[1].server, states[2].server)
