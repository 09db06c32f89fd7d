"""UDA against NumPy (Xie et al. 2020): a whole `client_update`."""

import numpy as np
import pytest

from fedjax_ssl.methods.uda import UDAOptions, uda
from tests.golden import linear_clients as lc

T, CONFIDENCE = 0.4, 0.7


# The last is FedProx + UDA.
@pytest.mark.parametrize(("labels_at", "prox_mu"), [("clients", 0.0), ("server", 0.0), ("server", 0.5)])
def test_a_client_update_is_what_the_equations_say(labels_at, prox_mu):
    client, loss, unlabeled_loss, seen, sharpened = lc.Client(), [], [], [], []

    def gradients(w, labeled, unlabeled):
        x, y = client.labeled[labeled], lc.LABELS[labeled]
        p = lc.outputs(w, x)
        supervised = lc.residual(p, y) / len(y)
        loss.extend(-np.log(p[np.arange(len(y)), y]))
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
    options = UDAOptions(confidence=CONFIDENCE, unlabeled_batch_size=lc.UNLABELED_BATCH)
    got = client.got(uda, options, prox_mu=prox_mu, labels_at=(labels_at,))
    assert np.concatenate(sharpened).any()  # the mask of sharpened probabilities would be another
    lc.assert_trained(got, expected, seen, loss, unlabeled_loss, labels_at)
