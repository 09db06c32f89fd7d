"""FreeMatch as a client's loss, against NumPy (Wang et al. 2023): a whole `client_update` with thresholds that move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import Broadcast, Server, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.methods.freematch import FreeMatchClientState, FreeMatchOptions, freematch
from fedjax_ssl.ssl.freematch import Status
from tests.golden import linear_clients as lc

DECAY, FAIRNESS = 0.6, 0.3
BEGUN = {"tau": 0.5, "probs": np.array([0.5, 0.3, 0.2]), "histogram": np.array([0.2, 0.5, 0.3])}


def sum_norm(x):
    return x / x.sum()


@pytest.mark.parametrize("restart", [False, True])
def test_a_client_update_is_what_the_equations_say(restart):
    client, seen, taus = lc.Client(), [], []
    uniform = np.full(lc.CLASSES, 1 / lc.CLASSES)
    status = {"tau": 1 / lc.CLASSES, "probs": uniform, "histogram": uniform} if restart else dict(BEGUN)

    def gradients(w, labeled, unlabeled):
        x, y = client.labeled[labeled], lc.LABELS[labeled]
        q = lc.outputs(w, client.weak[unlabeled])
        label, shares = q.argmax(1), np.eye(lc.CLASSES)[q.argmax(1)].mean(0)
        of_batch = {"tau": q.max(1).mean(), "probs": q.mean(0), "histogram": shares}
        for name, value in of_batch.items():
            status[name] = DECAY * status[name] + (1 - DECAY) * value
        thresholds = status["probs"] / status["probs"].max() * status["tau"]
        used = q.max(1) >= thresholds[label]
        taus.append(status["tau"])
        seen.append((label, lc.TRUE_LABELS[unlabeled], used))
        x_u = client.strong[unlabeled]
        p_u = lc.outputs(w, x_u)
        # L_f = sum_c a_c log b_c with b = SumNorm(total / h); d L_f / d total_c = (a_c / b_c - sum a) / (h_c sum(total / h)).
        total, h = p_u[used].sum(0), np.eye(lc.CLASSES)[p_u[used].argmax(1)].sum(0)
        inverse, inverse_status = (
            np.divide(1, one, out=np.zeros(lc.CLASSES), where=one > 0) for one in (h, status["histogram"])
        )
        a, b = sum_norm(status["probs"] * inverse_status), sum_norm(total * inverse)
        of_total = (a / (b + 1e-12) - np.sum(a * b / (b + 1e-12))) * inverse / np.sum(total * inverse)
        fair = p_u * (of_total - (p_u * of_total).sum(1, keepdims=True))  # through the softmax
        residual = lc.residual(p_u, label) / len(unlabeled) + FAIRNESS * fair
        return [(x, lc.residual(lc.outputs(w, x), y) / len(y)), (x_u, residual * used[:, None])]

    expected = client.trained(gradients)
    assert 0 < np.concatenate([used for _, _, used in seen]).mean() < 1
    sgd = torch_sgd(momentum=lc.MOMENTUM, nesterov=True, weight_decay=lc.DECAY, clip_norm=0.0)
    trains = lc.InOrder(sgd, lambda _: None, batch_size=lc.BATCH, epochs=lc.EPOCHS)
    options = FreeMatchOptions(
        threshold_decay=DECAY, fairness_weight=FAIRNESS, unlabeled_batch_size=lc.UNLABELED_BATCH, restart=restart
    )
    method = freematch(task=lc.linear_task(), client=trains, server=Server(None, None, 0, None), options=options)
    params = lc.named(client.params)
    before = FreeMatchClientState(lc.with_leaves(sgd.init(params), lc.named(client.momentum)), Status(**lc.float32(BEGUN)))
    shared = Broadcast(Weights(params, {}), jnp.float32(lc.RATE), jnp.int32(0), 1)
    output = jax.jit(method.client_update)(shared, (), before, client.client_data(), jax.random.key(0))
    lc.assert_same(output.update.params["Dense_0"], expected[0])
    lc.assert_same(lc.with_leaves(params, output.client_state.optimizer)["Dense_0"], expected[1])
    for name, value in status.items():
        np.testing.assert_allclose(getattr(output.client_state.status, name), value, rtol=1e-4)
    np.testing.assert_allclose(lc.numbers(output.metrics["client/threshold"]), (sum(taus), len(taus)), rtol=1e-4)
    lc.assert_metrics(
        {name: output.metrics[name] for name in output.metrics if name.startswith("diagnostics") or name == "client/mask_rate"},
        lc.diagnostics(*zip(*seen, strict=True)),
    )
