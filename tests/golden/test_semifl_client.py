"""SemiFL's `client_update` with labels of each batch, against NumPy; `test_semifl_round` has global ones and mixtures."""

import numpy as np

from fedjax_ssl.methods.semifl import SemiFLOptions, semifl
from tests.golden import linear_clients as lc
from tests.golden.test_fl2_client import TRUE_LABELS, Client

EPOCHS, RATE, BATCH = 2, 0.2, 2
CONFIDENCE = 0.988  # image 3 has .985 by the global model, and passes by the local one in epoch 2


def test_a_client_update_with_labels_of_each_batch_is_what_the_equations_say():
    client, loss, seen, passed = Client(), [], [], []
    w, m = dict(client.params), dict(client.momentum)
    batches = EPOCHS * np.split(np.arange(7), range(BATCH, 7, BATCH))
    for at in batches:
        probs = lc.outputs(w, client.weak[at])
        label, sure = probs.argmax(1), probs.max(1) >= CONFIDENCE
        assert np.abs(probs.max(1) - CONFIDENCE).min() > 1e-3  # no decision hangs on float32
        seen.append((label, TRUE_LABELS[at], sure))
        passed.append(at[sure].tolist())
        if sure.any():  # else it is no step
            x, y = client.strong[at[sure]], label[sure]
            p = lc.outputs(w, x)
            loss.extend(lc.cross_entropy(p, y))
            w, m = lc.sgd(w, lc.gradient(x, lc.residual(p, y) / len(y)), m, RATE, decay=lc.DECAY, nesterov=True)
    assert (passed[1::4], passed[3]) == ([[2], [2, 3]], [])
    options = SemiFLOptions(confidence=CONFIDENCE, pseudo_labels="local", mix="none")
    views = lc.VIEWS._replace(labeled=lambda key, images: np.nan * images)
    update, weight, momentum, metrics = client.got(
        semifl, options, labels_at=("server",), views=views, rate=RATE, batch_size=BATCH, epochs=EPOCHS
    )
    lc.assert_same(update, lc.combine(np.subtract, client.params, w))
    lc.assert_same(momentum, m)
    assert weight == 1
    rows = len(batches) * BATCH
    costs = lc.costs(lc.BYTES, lc.BYTES, EPOCHS * 7, 2 * rows, rows)
    lc.assert_metrics(metrics, {"client/loss": (sum(loss), len(loss))} | lc.diagnostics(*zip(*seen, strict=True)) | costs)
