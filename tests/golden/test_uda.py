"""UDA against NumPy (Xie et al. 2020): a whole `client_update`, with and without annealing, and TSA by itself."""

import jax
import numpy as np
import pytest

from fedjax_ssl.methods.uda import UDAOptions, uda
from fedjax_ssl.ssl import tsa
from tests.golden import linear_clients as lc
from tests.golden.test_server_training import RATE, Server, optimizer

T, CONFIDENCE = 0.4, 0.7


@pytest.mark.parametrize(
    ("labels_at", "schedule", "round", "eta", "prox_mu"),
    [
        ("clients", "none", 0, np.inf, 0.0),
        ("clients", "linear", 1, 1 / 4 * (1 - 1 / 3) + 1 / 3, 0.0),
        ("server", "none", 0, np.inf, 0.0),
        ("server", "none", 0, np.inf, 0.5),  # FedProx + UDA
    ],
)
def test_a_client_update_is_what_the_equations_say(labels_at, schedule, round, eta, prox_mu):
    client, loss, unlabeled_loss, seen, kept_counts, sharpened = lc.Client(), [], [], [], [], []

    def gradients(w, labeled, unlabeled):
        x, y = client.labeled[labeled], lc.LABELS[labeled]
        p = lc.outputs(w, x)
        correct = p[np.arange(len(y)), y]
        kept = correct <= eta
        assert np.abs(correct - eta).min() > 1e-3
        kept_counts.append(kept.sum())
        supervised = lc.residual(p, y) * kept[:, None] / max(kept.sum(), 1)
        loss.extend(-np.log(correct)[kept])
        z = client.weak[unlabeled] @ w["kernel"] + w["bias"]
        q, target = lc.softmax(z), lc.softmax(z / T)
        used = q.max(1) > CONFIDENCE
        assert np.abs(q.max(1) - CONFIDENCE).min() > 1e-3
        sharpened.append((target.max(1) > CONFIDENCE) & ~used)
        seen.append((q.argmax(1), lc.TRUE_LABELS[unlabeled], used))
        x_u = client.strong[unlabeled]
        p_u = lc.outputs(w, x_u)
        unlabeled_loss.extend((target * np.log(target / p_u)).sum(1)[used])
        parts = [(x_u, (p_u - target) * used[:, None] / len(q))]  # the target is a constant
        return [(x, supervised), *parts] if labels_at == "clients" else parts

    expected = client.trained(gradients, prox_mu)
    options = UDAOptions(confidence=CONFIDENCE, unlabeled_batch_size=lc.UNLABELED_BATCH, tsa=schedule)
    got = client.got(uda, options, prox_mu=prox_mu, at=(round, 4), labels_at=(labels_at,))
    assert np.concatenate(sharpened).any()  # the mask of sharpened probabilities would be another
    assert schedule == "none" or (min(kept_counts), max(kept_counts)) != (3, 3)
    lc.assert_trained(got, expected, seen, loss, unlabeled_loss, labels_at)


def test_the_servers_fine_tuning_is_annealed_too():
    """Two steps on all labels as one batch, in round 5 of 8: those that are learned already are left out."""
    server = Server("uda", tsa="linear")
    server.state = server.state._replace(weights=jax.tree.map(lambda x: 20 * x, server.state.weights))  # far from uniform
    for number in (0, 4):
        eta, kept_counts = number / 8 * 0.9 + 0.1, []

        def kept(p, eta=eta, counts=kept_counts):
            correct = (p * server.y).sum(1)
            counts.append((correct <= eta).sum())
            assert np.abs(correct - eta).min() > 1e-3
            return correct <= eta

        expected = server.expected(optimizer(), RATE, kept=kept)
        assert 0 < min(kept_counts) < len(server.y)
        lc.assert_same(server.trained(number), expected)


@pytest.mark.parametrize("num_classes", [2, 10])
@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_tsa_thresholds(progress, num_classes):
    a = {"linear": progress, "exp": np.exp(5 * (progress - 1)), "log": 1 - np.exp(-5 * progress)}
    for schedule, value in a.items():
        expected = value * (1 - 1 / num_classes) + 1 / num_classes
        np.testing.assert_allclose(tsa.threshold(schedule, progress, num_classes), expected, rtol=1e-6)
