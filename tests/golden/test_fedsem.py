"""FedSem against NumPy: whole client updates in both phases, pseudo-labels that are made once, and what is sent.

One compiled client update serves all: the phase follows from the round. Labeled examples count twice in the first phase.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.local import Broadcast, Server, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import Aggregate, Cohort, DataSpec, ServerData
from fedjax_ssl.methods.fedsem import FedSemClientState, FedSemOptions, fedsem
from tests import toy
from tests.golden import linear_clients as lc

R1, SGD = 3, torch_sgd(momentum=lc.MOMENTUM)
NONE = np.full(lc.UNLABELED + 1, -1, np.int32)
MADE = np.append(lc.OUTPUTS.argmax(1), -1)  # the labeler's, the last row is padding
TRUE = np.append(lc.TRUE_LABELS, -1)
OTHERS = np.append((lc.TRUE_LABELS + 1) % lc.CLASSES, -1)


@functools.cache
def problem(norm="static", source="global"):
    """(method, jitted client update, client, the model that is trained), whose labeler is the client's linear model."""
    task = lc.linear_task(norm, views=lc.LABELED_ALONE)
    training = lc.InOrder(SGD, lambda _: jnp.float32(lc.RATE), lc.BATCH, epochs=lc.EPOCHS)
    server = Server(optax.sgd(1.0), training, 0, None)
    options = toy.options(FedSemOptions, labeled_rounds=R1, labeled_repeats=2, pseudo_labels=source)
    method = fedsem(task=task, client=training, server=server, options=options)
    return method, lc.with_costs(method.client_update), lc.Client(), lc.random_layer(np.random.default_rng(5), 0.3)


def got(round, pseudo, *, labeled=lc.LABELED, unlabeled=lc.UNLABELED, source="global"):
    _, update, client, start = problem(source=source)
    weights, labeler = (Weights(lc.named(params), {}) for params in (start, client.params))
    shared = Broadcast(weights, jnp.float32(lc.RATE), jnp.int32(round), extra=labeler)
    optimizer = lc.with_leaves(SGD.init(lc.named(start)), jax.tree.map(jnp.zeros_like, lc.named(start)))
    client_data = client.client_data(labeled, unlabeled)
    return update(shared, (), FedSemClientState(jnp.asarray(pseudo, jnp.int32), optimizer), client_data, jax.random.key(0))


def expected(x, y):
    """(update, sum of the losses, examples seen) of SGD with momentum on the mean cross-entropy of batches in order."""
    start = problem()[3]
    w, m, loss, seen = dict(start), dict.fromkeys(start, 0.0), 0.0, 0
    for _ in range(lc.EPOCHS):
        for at in range(0, len(y), lc.BATCH):
            images, labels = x[at : at + lc.BATCH], y[at : at + lc.BATCH]
            p = lc.outputs(w, images)
            loss, seen = loss + lc.cross_entropy(p, labels).sum(), seen + len(labels)
            w, m = lc.sgd(w, lc.gradient(images, lc.residual(p, labels) / len(labels)), m)
    return lc.combine(np.subtract, start, w), loss, seen


def check(output, x, y, *, down, diagnostics, labeled_rows=0):
    update, loss, seen = expected(x, y)
    (params,) = output.update.params.values()
    lc.assert_same(params, update)
    assert output.weight == 1
    rows = lc.EPOCHS * -(-len(y) // lc.BATCH) * lc.BATCH
    costs = lc.costs(down, lc.BYTES, seen, rows + labeled_rows, rows)
    lc.assert_metrics(output.metrics, {"client/loss": (loss, seen), **costs, **diagnostics})


def test_the_first_phase_is_fedavg_on_labels_gone_through_twice():
    x, y = np.tile(problem()[2].labeled, (2, 1)), np.tile(lc.LABELS, 2)
    output = got(R1 - 1, NONE)
    check(output, x, y, down=lc.BYTES, diagnostics=lc.ratios(0, 0, 0))
    np.testing.assert_array_equal(output.client_state.pseudo, NONE)
    assert got(R1 - 1, NONE, labeled=0).weight == 0  # nothing to train on yet
    assert got(R1 + 1, NONE, unlabeled=0).metrics["comm/bytes_down"].total == lc.BYTES  # nothing to label: no second model


@pytest.mark.parametrize(
    ("round", "kept", "labels", "down", "source"),
    [
        (R1, NONE, MADE, lc.BYTES, "global"),
        (R1 + 1, NONE, MADE, 2 * lc.BYTES, "global"),
        (R1 + 1, OTHERS, OTHERS, lc.BYTES, "global"),
        (R1, NONE, TRUE, lc.BYTES, "true"),
    ],
    ids=["drawn at once", "drawn later", "drawn again", "true labels"],
)
def test_the_second_phase_trains_on_all_examples_with_the_labelers_labels_which_stay(round, kept, labels, down, source):
    """A client that is drawn later receives the labeler beside the global model; an oracle has true labels in their place."""
    client, drawn = problem()[2], labels[: lc.UNLABELED]
    right = int((drawn == lc.TRUE_LABELS).sum())
    assert (0 < right < lc.UNLABELED) == (labels is MADE)
    views = lc.plain(client.pool[client.index[: lc.UNLABELED]].astype(float))[:, ::-1]  # the labeled ones
    x, y = np.concatenate([client.labeled, views.reshape(lc.UNLABELED, -1)]), np.append(lc.LABELS, drawn)
    rows = 8 if kept is NONE and source == "global" else 0  # to label: two batches of 4
    output = got(round, kept, source=source)
    check(output, x, y, down=down, diagnostics=lc.ratios(right, lc.UNLABELED, lc.UNLABELED), labeled_rows=rows)
    np.testing.assert_array_equal(output.client_state.pseudo, labels)


def test_the_labeler_is_the_model_that_ends_the_first_phase():
    """With the statistics of its batch norm, which clients track here: the server averages them as it does parameters."""
    method, _, client, start = problem("running")
    nothing = client.client_data(labeled=0).labeled
    state, clients = method.init(jax.random.key(1), DataSpec((lc.SIDE, lc.SIDE, 1), lc.CLASSES, 4, 2, lc.UNLABELED + 1))
    assert jax.tree.all(jax.tree.map(np.array_equal, state.extra, state.weights))
    first = state.weights._replace(stats={"mean": jnp.float32([0.5, -2.0]), "var": jnp.float32([9.0, 7.0])})
    change = Weights(lc.named(start), {"mean": jnp.float32([0.3, -0.7]), "var": jnp.float32([0.2, 0.5])})
    state = state._replace(weights=first, extra=first)
    assert clients.pseudo.shape == (4, lc.UNLABELED + 1)
    assert np.all(clients.pseudo == -1)
    weights = []
    for round in range(R1 + 2):
        shared, _ = method.broadcast(state, clients, Cohort(jnp.arange(2), jnp.int32(round)))
        weights.append(shared.weights)
        if round >= R1:
            jax.tree.map(np.testing.assert_array_equal, shared.extra, weights[R1])
        data = ServerData(nothing, nothing, None, None, jnp.int32(round))
        state, _ = method.server_update(state, Aggregate(change, jnp.float32(2)), data, jax.random.key(0))
    for before, move, at_end, after in zip(*map(jax.tree.leaves, (first, change, *weights[R1:])), strict=True):
        np.testing.assert_allclose(at_end, before - R1 * move, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after, before - (R1 + 1) * move, rtol=1e-5, atol=1e-6)
        assert not np.allclose(at_end, after)
