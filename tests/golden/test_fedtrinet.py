"""FedTriNet against NumPy: whole client updates of both phases, the threshold, alpha, the base confidence, frozen layers.

The network has one hidden layer, its first block. One compiled client update serves all cases. Batches come in order instead of
shuffled; the labeled view turns images upside down, so that the plain one in its place shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import models
from fedjax_ssl.local import Broadcast, Server, Task, Weights
from fedjax_ssl.local.forward_passes import forward_batches_of
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import Aggregate, ClientData, Cohort, DataSpec, ServerData
from fedjax_ssl.methods import METHODS
from fedjax_ssl.methods.fedtrinet import FedTriNetClientState, FedTriNetOptions, fine_tune
from fedjax_ssl.ssl import thresholds
from tests import toy
from tests.golden import linear_clients as lc

SIDE, CLASSES, HIDDEN, R1 = lc.SIDE, lc.CLASSES, 4, 3
LABELED, UNLABELED, BATCH, EPOCHS, RATE, MOMENTUM = 5, 12, 3, 2, 0.3, 0.9
LABELS = np.array([0, 2, 1, 1, 0])
LAYERS = {"Dense_0": ("W0", "b0"), "Dense_1": ("W1", "b1")}
SIZE = 4 * (SIDE * SIDE * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)
SGD, FORWARD = torch_sgd(momentum=MOMENTUM), 5


def task_of(network="mlp", norm="static", **options):
    model = models.build(network, num_classes=CLASSES, **options)
    return Task(model, lc.LABELED_ALONE, CLASSES, norm, labels_at=("clients",))


@functools.cache
def method():
    training = lc.InOrder(SGD, lambda _: jnp.float32(RATE), BATCH, epochs=EPOCHS)
    server = Server(optax.sgd(1.0), training, 0, None)
    options = toy.options(FedTriNetOptions, labeled_rounds=R1)
    made = METHODS["fedtrinet"](task=task_of(hidden=HIDDEN), client=training, server=server, options=options)
    return made, lc.with_costs(made.client_update, FORWARD)


def outputs(net, x):
    hidden = np.maximum(x @ net["W0"] + net["b0"], 0)
    return hidden, lc.softmax(hidden @ net["W1"] + net["b1"])


def gradient(net, parts):
    """Of sum_parts weight * mean cross-entropy, parts: (images, labels, weight)."""
    total = dict.fromkeys(net, 0.0)
    for x, y, weight in parts:
        if len(y):
            hidden, p = outputs(net, x)
            r = weight * lc.residual(p, y) / len(y)
            back = (r @ net["W1"].T) * (hidden > 0)
            new = {"W1": hidden.T @ r, "b1": r.sum(0), "W0": x.T @ back, "b0": back.sum(0)}
            total = {name: total[name] + new[name] for name in net}
    return total


def sgd(net, momentum, steps, trained=("W0", "b0", "W1", "b1")):
    """(network, momentum) after steps, each a list of parts, of the layers `trained`."""
    for parts in steps:
        g = gradient(net, parts)
        moved = lc.sgd(*({name: tree[name] for name in trained} for tree in (net, g, momentum)), RATE)
        net, momentum = net | moved[0], momentum | moved[1]
    return net, momentum


def batches(x, y):
    return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, len(y), BATCH)]


class Problem:
    """A client's data, the global network, its own last one, and a momentum."""

    def __init__(self, seed=2):
        rng = np.random.default_rng(seed)
        self.pool = rng.integers(0, 256, (24, SIDE, SIDE, 1)).astype(np.uint8)
        self.labeled_index, self.index = rng.permutation(24)[: LABELED + 2], rng.permutation(24)[: UNLABELED + 1]
        self.true_labels = rng.integers(0, CLASSES, UNLABELED + 1)
        shapes = {"W0": (SIDE * SIDE, HIDDEN), "b0": (HIDDEN,), "W1": (HIDDEN, CLASSES), "b1": (CLASSES,)}
        self.shared, self.last, self.momentum = (
            {name: scale * rng.standard_normal(shape) for name, shape in shapes.items()} for scale in (0.6, 0.6, 0.1)
        )
        self.x = self.images(self.labeled_index[:LABELED])
        self.u, self.plain_u = (self.images(self.index[:UNLABELED], flip=flip) for flip in (True, False))

    def images(self, rows, flip=True):
        images = lc.plain(self.pool[rows].astype(float))
        return (images[:, ::-1] if flip else images).reshape(len(rows), -1)

    def fine_tuned(self, last):
        """The global first layer, and the client's own last one after E epochs on labels, with a momentum of its own."""
        fused = {**last, "W0": self.shared["W0"], "b0": self.shared["b0"]}
        steps = [[(*batch, 1.0)] for _ in range(EPOCHS) for batch in batches(self.x, LABELS)]
        return sgd(fused, dict.fromkeys(fused, 0.0), steps, trained=("W1", "b1"))[0]

    def on_labels(self):
        return sgd(self.shared, self.momentum, [[(*b, 1.0)] for _ in range(EPOCHS) for b in batches(self.x, LABELS)])

    def sums(self, last, tuned):
        return sum(outputs(net, self.plain_u)[1] for net in (last, tuned, self.shared))

    def second_phase(self, last, pseudo, threshold, weighed, round):
        """((network, momentum), pseudo-labels, whether they are weighed, images) after a round."""
        tuned = self.fine_tuned(last)
        total = self.sums(last, tuned)
        assert np.abs(total.max(1) - threshold).min() > 1e-3  # no decision hangs on float32
        new = np.where((pseudo < 0) & (total.max(1) >= threshold), total.argmax(1), pseudo)
        weighed = weighed or ((new >= 0) & (pseudo < 0)).sum() >= 10
        has = new >= 0
        if not weighed:
            one = batches(np.concatenate([self.x, self.u[has]]), np.append(LABELS, new[has]))
            steps = [[(*batch, 1.0)] for _ in range(EPOCHS) for batch in one]
        else:
            labeled, others = batches(self.x, LABELS), batches(self.u[has], new[has])
            steps = []
            for epoch in range(EPOCHS):
                progress = (5 * round + epoch - 50) / 100
                weight = 0.15 * min(max(progress, 0), 1)
                count = max(len(labeled), len(others))
                for s in range(epoch * count, (epoch + 1) * count):
                    pair = [(*labeled[s % len(labeled)], 0.5)]
                    steps.append(pair + ([(*others[s % len(others)], weight / 2)] if others else []))
        seen = sum(len(part[1]) for step in steps for part in step)
        return sgd(tuned, self.momentum, steps), new, weighed, seen + EPOCHS * LABELED

    def inputs(self, *, round, threshold=3.1, seen=True, pseudo=None, weighed=False, labeled=LABELED, unlabeled=UNLABELED):
        labels = np.append(LABELS, [2, 2]).astype(np.int32)
        rows = lc.examples(self.pool, self.labeled_index, labeled, labels)
        client_data = ClientData(rows, lc.examples(self.pool, self.index, unlabeled), jnp.asarray(self.true_labels, jnp.int32))
        pseudo = jnp.asarray(np.append(np.full(UNLABELED, -1) if pseudo is None else pseudo, -1), jnp.int32)
        optimizer = lc.with_leaves(SGD.init(named(self.shared)), named(self.momentum))
        state = FedTriNetClientState(jnp.array(seen), Weights(named(self.last), {}), pseudo, jnp.array(weighed), optimizer)
        weights = Weights(named(self.shared), {})
        shared = Broadcast(weights, jnp.float32(RATE), jnp.int32(R1 + round), extra=jnp.float32(threshold))
        return shared, (), state, client_data, jax.random.key(0)

    def got(self, **case):
        return method()[1](*self.inputs(**case))


PROBLEM = Problem()


def named(net):
    return {layer: {"kernel": jnp.float32(net[w]), "bias": jnp.float32(net[b])} for layer, (w, b) in LAYERS.items()}


def assert_close(got, expected):
    lc.assert_same(got, named(expected), 2e-6)


def check(output, trained, pseudo, images, *, weighed, up=SIZE, down=SIZE + 4):
    """A client's output against what it ends with; trained: (network, momentum)."""
    net, momentum = trained
    uploaded = jax.tree.map(lambda a, b: a - b, named(PROBLEM.shared), output.update.params)
    assert_close(uploaded, net)
    state = output.client_state
    assert_close(state.last.params, net)
    assert_close(lc.with_leaves(named(net), state.optimizer), momentum)
    np.testing.assert_array_equal(state.pseudo, np.append(pseudo, -1))
    assert (bool(state.seen), bool(state.weighed), float(output.weight)) == (True, weighed, 1.0)
    got = tuple(output.metrics[name].total for name in ("comm/bytes_up", "comm/bytes_down", "perf/client_images"))
    assert got == (up, down, images)


def threshold_for(last, gained):
    """A threshold that so many of the unlabeled examples pass."""
    largest = np.sort(PROBLEM.sums(last, PROBLEM.fine_tuned(last)).max(1))
    return largest[-gained:][0] / 2 + largest[-gained - 1] / 2 if gained < UNLABELED else 0.5


def test_the_first_phase_is_fedavg_on_labels_and_keeps_what_was_uploaded():
    trained = PROBLEM.on_labels()
    for seen in (False, True):
        output = PROBLEM.got(round=-1, threshold=0.0, seen=seen)
        check(output, trained, np.full(UNLABELED, -1), EPOCHS * LABELED, weighed=False, down=SIZE)
        assert output.metrics["diagnostics/label_ratio"] == (0, 0)
        assert output.metrics["client/loss"].weight == EPOCHS * LABELED


@pytest.mark.parametrize(
    ("gained", "round", "weighed", "before"),
    [
        (4, 0, False, 0),  # together as one set
        (10, 4, False, 0),  # enough: in pairs, alpha = 0
        (11, 20, False, 0),  # alpha = .075 and, in the second epoch, .0765
        (1, 45, True, 3),  # enough in an earlier round; more batches of labeled examples than of the others; alpha = .15
        (12, 30, True, 0),
    ],
)
def test_a_round_of_the_second_phase_is_what_the_equations_say(gained, round, weighed, before):
    threshold = threshold_for(PROBLEM.last, gained + before)
    sums = PROBLEM.sums(PROBLEM.last, PROBLEM.fine_tuned(PROBLEM.last))
    pseudo = np.full(UNLABELED, -1)
    order = np.argsort(sums.max(1))[::-1][:before]  # these pass too, and keep the labels that they have
    pseudo[order] = (sums.argmax(1)[order] + 1) % CLASSES  # not what the three networks would say now
    trained, new, now_weighed, images = PROBLEM.second_phase(PROBLEM.last, pseudo, threshold, weighed, round)
    assert (new >= 0).sum() == gained + before
    assert now_weighed == (weighed or gained >= 10)
    output = PROBLEM.got(round=round, threshold=threshold, weighed=weighed, pseudo=pseudo)
    up = SIZE + (8 if round == 0 else 0)
    check(output, trained, new, images, weighed=now_weighed, up=up)
    right = (new == PROBLEM.true_labels[:UNLABELED]).sum()
    assert output.metrics["diagnostics/label_ratio"] == (gained + before, UNLABELED)
    assert output.metrics["diagnostics/pseudo_label_accuracy"] == (right, gained + before)
    np.testing.assert_allclose(output.metrics["client/threshold"], (threshold, 1), rtol=1e-6)


def test_a_client_that_the_first_phase_never_drew_trains_once_on_its_labels_first():
    last, _ = PROBLEM.on_labels()
    threshold = threshold_for(last, 4)
    trained, new, _, images = PROBLEM.second_phase(last, np.full(UNLABELED, -1), threshold, False, 2)
    output = PROBLEM.got(round=2, threshold=threshold, seen=False)
    check(output, trained, new, images + EPOCHS * LABELED, weighed=False)


@pytest.mark.parametrize("seen", [False, True])
def test_a_client_without_labels_trains_on_pseudo_labels_of_the_global_model_if_it_has_none_of_its_own(seen):
    first, second = (PROBLEM.got(round=round, threshold=0.1, seen=seen, labeled=0) for round in (-1, 3))
    assert (first.weight, bool(first.client_state.seen)) == (0, seen)
    assert_close(first.client_state.last.params, PROBLEM.last)
    assert second.weight == 1
    own = outputs(PROBLEM.shared, PROBLEM.plain_u)[1].argmax(1)
    assert np.array_equal(np.asarray(second.client_state.pseudo)[:UNLABELED], own) == (not seen)


def test_the_threshold_falls_to_half():
    m, rounds = 0.7, jnp.arange(70)
    expected = [2.8 * m] * 10 + [(1 - 0.02 * r) * 2.8 * m for r in range(10, 35)] + [1.4 * m] * 35
    np.testing.assert_allclose(jax.vmap(lambda r: thresholds.falling(jnp.float32(m), r))(rounds), expected, atol=1e-6)


@pytest.mark.parametrize("without", [0, 1])
def test_the_base_confidence_is_that_of_the_last_model_of_the_first_phase_on_the_next_cohorts_data(without):
    """Or of a later model, where so many cohorts are `without` data: until then no pseudo-label is accepted."""
    made, _ = method()
    state, clients = made.init(jax.random.key(1), DataSpec((SIDE, SIDE, 1), CLASSES, 4, 2, UNLABELED + 1))
    assert clients.pseudo.shape == (4, UNLABELED + 1)
    rows = np.array([[3, 1, 7, 0], [2, 9, 4, 11]])  # with two rows of padding at the end of the first
    of_cohort = lc.examples(PROBLEM.pool, rows, 0)._replace(count=jnp.int32([2, 4]))
    nothing = lc.examples(PROBLEM.pool, rows[0], 0, rows[0])
    step = Weights(jax.tree.map(lambda x: 0.1 * x, named(PROBLEM.last)), ())
    expected, server_update = 4.0, jax.jit(made.server_update)
    for round in range(R1 + 2):
        shared, _ = made.broadcast(state, clients, Cohort(jnp.arange(2), jnp.int32(round)))
        assert shared.round == round
        np.testing.assert_allclose(shared.extra, expected, rtol=1e-5)
        own = of_cohort._replace(count=jnp.zeros(2, jnp.int32)) if R1 - 1 <= round < R1 - 1 + without else of_cohort
        data = ServerData(nothing, nothing, None, own, jnp.int32(round))
        with forward_batches_of(FORWARD):
            state, _ = server_update(state, Aggregate(step, jnp.float32(2)), data, jax.random.key(0))
        if round == R1 - 1 + without:
            first, last = (state.weights.params[layer] for layer in LAYERS)
            net = {"W0": first["kernel"], "b0": first["bias"], "W1": last["kernel"], "b1": last["bias"]}
            images = PROBLEM.images(np.array([3, 1, 2, 9, 4, 11]), flip=False)
            expected = 2.8 * outputs({name: np.asarray(leaf, float) for name, leaf in net.items()}, images)[1].max(1).mean()


def test_fine_tuning_has_no_proximal_term():
    shared, _, state, client_data, key = PROBLEM.inputs(round=0)
    training = lc.InOrder(SGD, lambda _: None, BATCH, epochs=EPOCHS, prox_mu=0.5)
    tuned = jax.jit(lambda: fine_tune(task_of(hidden=HIDDEN), training, shared, state.last, client_data, True, key))()
    assert_close(tuned.carry.weights.params, PROBLEM.fine_tuned(PROBLEM.last))


def test_fine_tuning_leaves_first_blocks_and_their_statistics_alone():
    """Batch norm that tracks statistics, momentum and weight decay: none of them moves a frozen layer."""
    task = task_of("cnn", norm="running", width=2)
    training = lc.InOrder(torch_sgd(momentum=MOMENTUM, weight_decay=0.1), lambda _: None, BATCH, epochs=1, prox_mu=0.1)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (LABELED, 8, 8, 1)).astype(np.uint8)
    labeled = lc.examples(images, np.arange(LABELED), LABELED, LABELS)
    shared, last = (task.init(jax.random.key(seed), (8, 8, 1)) for seed in (1, 2))
    last = jax.tree.map(lambda x: x + 0.01, last)  # statistics too are others than the global network's
    message = Broadcast(shared, jnp.float32(RATE))
    first = {"Conv_0", "Conv_1", "BatchNorm_0", "BatchNorm_1"}
    client_data = ClientData(labeled, None, None)
    run = jax.jit(lambda trains: fine_tune(task, training, message, last, client_data, trains, jax.random.key(3)))
    joined, tuned = run(False).carry.weights, run(True).carry.weights
    for got, start, of_shared, of_last in zip(tuned, joined, shared, last, strict=True):
        assert set(got) == set(of_shared)
        for layer, leaves in got.items():
            same = jax.tree.map(np.array_equal, start[layer], (of_shared if layer in first else of_last)[layer])
            assert all(jax.tree.leaves(same)), layer
            still = jax.tree.leaves(jax.tree.map(np.array_equal, leaves, start[layer]))
            assert all(still) if layer in first else not any(still), layer
