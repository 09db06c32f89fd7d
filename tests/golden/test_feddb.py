"""FedDB against NumPy (Zhu et al. 2024): debiased pseudo-labels, a whole `client_update`, and the server's learned weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl.local import Broadcast, Server, ServerState, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import Aggregate, ServerData
from fedjax_ssl.methods.feddb import FedDBOptions, Sent, feddb
from fedjax_ssl.ssl import prior
from tests.golden import linear_clients as lc

CONFIDENCE, DECAY = 0.55, 0.3
# Of a model that prefers class 0: freed of this bias it prefers others.
OUTPUTS = np.reshape([80, 15, 5, 50, 42, 8, 49, 6, 45, 70, 20, 10, 45, 40, 15, 90, 4, 6, 55, 5, 40], (7, 3)) / 100
PRIORS = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.5, 0.3], [0.4, 0.1, 0.5]])


def learned(priors, steps, decay=0.9):
    b = np.full(len(priors), 1 / len(priors))
    for _ in range(steps):
        off = b @ priors - 1 / 3
        gradient = np.array([2 / 3 * np.sum(off * p) for p in priors])
        z = b - (gradient + decay * b)
        b = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    return b


def test_weights_bring_the_clients_priors_near_uniform_and_absent_ones_have_none():
    for steps in (1, 3, 100):
        np.testing.assert_allclose(
            prior.weights_to_uniform(jnp.float32(PRIORS), jnp.ones(4, bool), steps), learned(PRIORS, steps), rtol=1e-5
        )
    present = np.array([True, False, True, True])
    rows = np.where(present[:, None], PRIORS, np.nan)
    got = prior.weights_to_uniform(jnp.float32(rows), jnp.asarray(present))
    np.testing.assert_allclose(got[present], learned(PRIORS[present], 100), rtol=1e-5)
    assert got[1] == 0
    assert np.ptp(learned(PRIORS, 100)) > 5e-3
    assert not np.any(prior.weights_to_uniform(jnp.float32(PRIORS), jnp.zeros(4, bool)))


def method_of(**options):
    sgd = torch_sgd(momentum=lc.MOMENTUM, nesterov=True, weight_decay=lc.DECAY, clip_norm=0.0)
    client = lc.InOrder(sgd, lambda _: None, batch_size=lc.BATCH, epochs=lc.EPOCHS)
    server = Server(optax.sgd(1.0), None, 0, None)
    return feddb(task=lc.linear_task(), client=client, server=server, options=FedDBOptions(**options)), sgd, server


def test_a_client_update_is_what_the_equations_say():
    client, loss, unlabeled_loss = lc.Client(OUTPUTS), [], []
    q = lc.outputs(client.params, client.weak)
    own = q.mean(0)
    ratios = q / own
    label, confidence = ratios.argmax(1), (ratios / ratios.sum(1, keepdims=True)).max(1)
    used = confidence >= CONFIDENCE
    assert 0 < used.mean() < 1
    assert (label != q.argmax(1)).any() or (used != (q.max(1) >= CONFIDENCE)).any()  # the bias matters
    rows = np.flatnonzero(used)
    w, m = dict(client.params), dict(client.momentum)
    size, at = lc.UNLABELED_BATCH, 0
    steps = [(a, rows[at : at + size]) for _ in range(lc.EPOCHS) for a in (np.arange(0, 3), np.arange(3, 5))]
    per_epoch = -(-len(rows) // size)
    steps = [(a, rows[(i % per_epoch) * size : (i % per_epoch + 1) * size]) for i, (a, _) in enumerate(steps)]
    for labeled, unlabeled in steps:
        x, y = client.labeled[labeled], lc.LABELS[labeled]
        p, p_u = lc.outputs(w, x), lc.outputs(w, client.strong[unlabeled])
        loss.extend(lc.cross_entropy(p, y))
        unlabeled_loss.extend(lc.cross_entropy(p_u, label[unlabeled]))
        own = DECAY * own + (1 - DECAY) * lc.outputs(w, client.weak[unlabeled]).mean(0)
        parts = (
            lc.gradient(x, lc.residual(p, y) / len(y)),
            lc.gradient(client.strong[unlabeled], lc.residual(p_u, label[unlabeled]) / len(unlabeled)),
        )
        g = lc.combine(lambda a, b: a + b, *parts)
        w, m = lc.sgd(w, g, m, decay=lc.DECAY, nesterov=True)
    method, sgd, _ = method_of(confidence=CONFIDENCE, prior_decay=DECAY, unlabeled_batch_size=size)
    params = lc.named(client.params)
    momentum = lc.with_leaves(sgd.init(params), lc.named(client.momentum))
    shared = Broadcast(Weights(params, {}), jnp.float32(lc.RATE), jnp.int32(0), 1)
    output = jax.jit(method.client_update)(shared, (), momentum, client.client_data(), jax.random.key(0))
    lc.assert_same(output.update.update.params["Dense_0"], {name: client.params[name] - w[name] for name in w})
    lc.assert_same(lc.with_leaves(params, output.client_state)["Dense_0"], m)
    np.testing.assert_allclose(output.update.prior, own, rtol=1e-4)
    assert output.weight == lc.LABELED + lc.UNLABELED
    for name, values in {"client/loss": loss, "client/unlabeled_loss": unlabeled_loss}.items():
        np.testing.assert_allclose(lc.numbers(output.metrics[name]), (sum(values), len(values)), rtol=1e-4)
    assert int(output.metrics["comm/bytes_up"][0]) == lc.BYTES + 4 * lc.CLASSES


def test_the_server_weighs_updates_by_their_clients_priors_alone():
    method, _, server = method_of()
    first = Weights({"w": jnp.zeros(2)}, {})
    state = ServerState(first, server.optimizer.init(first.params), ())
    updates, sizes = np.float32([[1, 2], [3, 5], [9, 9], [-4, 1]]), np.float32([3, 1, 0, 7])
    sent = Aggregate(Sent(Weights({"w": jnp.asarray(updates)}, ()), jnp.float32(PRIORS)), jnp.asarray(sizes))
    none = lc.examples(np.zeros((1, lc.SIDE, lc.SIDE, 1), np.uint8), np.zeros(1, np.int32), 0, np.zeros(1, np.int32))
    data = ServerData(none, none, jnp.zeros(1, jnp.int32), none, jnp.int32(0))
    new, _ = method.server_update(state, sent, data, jax.random.key(0))
    here = sizes > 0
    np.testing.assert_allclose(new.weights.params["w"], -learned(PRIORS[here], 100) @ updates[here], rtol=1e-5)
