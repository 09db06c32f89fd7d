"""CBAFed against NumPy (Li et al. 2023, as its released code has it): thresholds, both kinds of clients, the server."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.local import Broadcast, Server, ServerState, Setup, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import Aggregate
from fedjax_ssl.methods.cbafed import CBAFedExtra, CBAFedOptions, ClassCounts, Sent, cbafed, server_work
from fedjax_ssl.ssl import balanced
from tests.golden import linear_clients as lc

SVHN = np.array([15, 292, 986, 116, 63, 1285, 1352, 1438, 807, 267])
"""The class counts of the labeled client in the benchmark's split of SVHN."""
THRESHOLDS = np.array([0.5, 0.7, 0.3])
RARE = np.array([True, False, False])


def test_the_thresholds_of_svhns_labeled_client_are_those_of_the_specification():
    found = balanced.class_balanced(jnp.float32(SVHN), 0.9)
    expected = [0.7556, 0.7975, 0.9, 0.7709, 0.7629, 0.9, 0.9, 0.9, 0.8753, 0.7937]
    np.testing.assert_allclose(found.per_class, expected, atol=1e-4)
    assert np.flatnonzero(found.rare).tolist() == [0, 3, 4]
    none = balanced.class_balanced(jnp.zeros(10), 0.9)
    np.testing.assert_allclose(none.per_class, 0.84, rtol=1e-6)
    assert not np.any(none.rare)


def accepted_by_numpy(q, second):
    order = np.argsort(-q, axis=1)
    label, confidence = order[:, 0], q.max(1)
    first = confidence > THRESHOLDS[label]
    by_second = ~first & RARE[order[:, 1]] & second
    return np.where(by_second, order[:, 1], label), first | by_second, by_second


def method_of(**options):
    sgd = torch_sgd(momentum=lc.MOMENTUM, nesterov=True, weight_decay=lc.DECAY, clip_norm=0.0)
    client = lc.InOrder(sgd, lambda _: None, batch_size=lc.BATCH, epochs=lc.EPOCHS)
    made = {"task": lc.linear_task(), "client": client, "server": Server(None, None, 0, None)}
    return cbafed(**made, options=CBAFedOptions(**options)), sgd


def got(client, method, sgd, labeled, unlabeled):
    params = lc.named(client.params)
    momentum = lc.with_leaves(sgd.init(params), lc.named(client.momentum))
    extra = balanced.Thresholds(jnp.float32(THRESHOLDS), jnp.asarray(RARE))
    shared = Broadcast(Weights(params, {}), jnp.float32(lc.RATE), jnp.int32(0), 1, extra)
    data = client.client_data(labeled, unlabeled)
    return jax.jit(method.client_update)(shared, (), momentum, data, jax.random.key(0)), params


def batches(number):
    """Rows of the batches of all epochs, in order."""
    return [np.arange(number)[i : i + lc.BATCH] for _ in range(lc.EPOCHS) for i in range(0, number, lc.BATCH)]


@pytest.mark.parametrize("second", [True, False])
def test_an_unlabeled_client_trains_on_what_the_received_model_labels_once(second):
    client = lc.Client()
    q = lc.outputs(client.params, client.weak)
    label, used, by_second = accepted_by_numpy(q, second)
    assert 0 < used.mean() < 1
    assert by_second.any() == second
    rows = np.flatnonzero(used)
    w, m = dict(client.params), dict(client.momentum)
    for batch in batches(len(rows)):
        x, y = client.weak[rows[batch]], label[rows[batch]]  # the view that was labeled
        w, m = lc.sgd(w, lc.gradient(x, lc.residual(lc.outputs(w, x), y) / len(y)), m, decay=lc.DECAY, nesterov=True)
    output, params = got(client, *method_of(second_choice=second), 0, lc.UNLABELED)
    lc.assert_same(output.update.update.params["Dense_0"], {name: client.params[name] - w[name] for name in w})
    lc.assert_same(lc.with_leaves(params, output.client_state)["Dense_0"], m)
    assert output.weight == used.sum()
    np.testing.assert_allclose(output.update.counts.pseudo * used.sum(), np.bincount(label[used], minlength=3), rtol=1e-6)
    assert not np.any(output.update.counts.labeled)
    assert int(output.metrics["comm/bytes_up"][0]) == lc.BYTES + 4 * lc.CLASSES
    assert int(output.metrics["comm/bytes_down"][0]) == lc.BYTES + 4 * lc.CLASSES + lc.CLASSES


@pytest.mark.parametrize("every", [1, 0])
def test_a_labeled_client_returns_to_its_earlier_weights(every):
    client = lc.Client()
    w, m = dict(client.params), dict(client.momentum)
    before = None
    per_epoch = -(-lc.LABELED // lc.BATCH)
    for step, batch in enumerate(batches(lc.LABELED)):
        x, y = client.labeled[batch], lc.LABELS[batch]
        w, m = lc.sgd(w, lc.gradient(x, lc.residual(lc.outputs(w, x), y) / len(y)), m, decay=lc.DECAY, nesterov=True)
        if (step + 1) % per_epoch == 0 and every:
            w = w if before is None else {name: 0.8 * before[name] + 0.2 * w[name] for name in w}
            before = w
    output, params = got(client, *method_of(residual_epochs=every), lc.LABELED, 0)
    lc.assert_same(output.update.update.params["Dense_0"], {name: client.params[name] - w[name] for name in w})
    lc.assert_same(lc.with_leaves(params, output.client_state)["Dense_0"], m)
    assert output.weight == lc.LABELED
    np.testing.assert_allclose(output.update.counts.labeled * lc.LABELED, np.bincount(lc.LABELS, minlength=3), rtol=1e-6)


def test_the_global_model_returns_halfway_every_few_rounds_and_labeled_counts_are_kept():
    server = Server(optax.sgd(1.0), None, 0, None)
    work = server_work(Setup(lc.linear_task(), None, server, CBAFedOptions(residual_rounds=2)))
    zeros = jnp.zeros(3)
    first = Weights({"w": jnp.zeros(1)}, {})
    state = ServerState(
        first, server.optimizer.init(first.params), (), CBAFedExtra(ClassCounts(zeros, zeros), first, jnp.int32(0))
    )
    w, residual, seen = 0.0, None, []
    for number in range(6):
        update, weight = 1.0 + number, 4.0
        counts = ClassCounts(jnp.float32([2, 0, 1]) * (number != 3) / weight, jnp.float32([0, number, 1]) / weight)
        state = work.step(state, Aggregate(Sent(Weights({"w": jnp.full(1, update)}, ()), counts), jnp.float32(weight)))
        w -= update
        if number > 0 and number % 2 == 0:
            w = residual = (residual + w) / 2
        elif number == 0:
            residual = w
        seen.append(w)
        np.testing.assert_allclose(state.weights.params["w"], w, rtol=1e-6)
        np.testing.assert_allclose(state.extra.counts.labeled, [2, 0, 1])  # also where no labeled client took part
        np.testing.assert_allclose(state.extra.counts.pseudo, [0, number, 1])
    assert len({*seen}) == 6
