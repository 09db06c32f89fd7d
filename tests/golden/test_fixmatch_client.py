"""One whole FixMatch `client_update` with local pseudo-labels, for labels at both places, against NumPy (Sohn et al. 2020)."""

import numpy as np
import pytest

from fedjax_ssl.methods.fixmatch import FixMatchOptions, fixmatch
from tests.golden import linear_clients as lc

CONFIDENCE = 0.75


@pytest.mark.parametrize(
    ("labels_at", "divisor", "weight", "prox_mu"),
    [
        ("clients", "batch", 1.0, 0.0),
        ("clients", "used", 2.5, 0.0),
        ("server", "batch", 2.5, 0.0),  # FedSiam's FedFixMatch
        ("server", "batch", 2.5, 0.5),  # FedProx + FixMatch
    ],
)
def test_a_client_update_is_what_the_equations_say(labels_at, divisor, weight, prox_mu):
    client, loss, unlabeled_loss, seen = lc.Client(), [], [], []

    def gradients(w, labeled, unlabeled):
        x, y = client.labeled[labeled], lc.LABELS[labeled]
        p = lc.outputs(w, x)
        supervised = lc.residual(p, y) / len(y)  # Eq. 3, over the real examples of the batch
        loss.extend(lc.cross_entropy(p, y))
        q = lc.outputs(w, client.weak[unlabeled])
        label, accepted = q.argmax(1), q.max(1) >= CONFIDENCE
        assert np.abs(q.max(1) - CONFIDENCE).min() > 1e-3  # no decision hangs on float32
        seen.append((label, lc.TRUE_LABELS[unlabeled], accepted))
        x_u = client.strong[unlabeled]
        p_u = lc.outputs(w, x_u)
        unlabeled_loss.extend(lc.cross_entropy(p_u, label)[accepted])
        # Eq. 4: over the whole batch, or ((FL)^2, Eq. 10) over its accepted examples.
        over = len(label) if divisor == "batch" else max(accepted.sum(), 1)
        parts = [(x_u, weight * lc.residual(p_u, label) * accepted[:, None] / over)]
        return [(x, supervised), *parts] if labels_at == "clients" else parts

    expected = client.trained(gradients, prox_mu)
    options = {"pseudo_labels": "local", "divisor": divisor, "strict": False, "confidence": CONFIDENCE}
    options |= {"unlabeled_weight": weight, "unlabeled_batch_size": lc.UNLABELED_BATCH}
    got = client.got(fixmatch, FixMatchOptions(**options), prox_mu=prox_mu, labels_at=(labels_at,))
    # A step whose divisors differ and, with labels, one that accepts nothing.
    assert ({0, 1} if labels_at == "clients" else {1}) <= {a.sum() for *_, a in seen}
    lc.assert_trained(got, expected, seen, loss, unlabeled_loss, labels_at)
