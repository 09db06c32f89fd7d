"""FedCon against NumPy: BYOL's loss, a client's whole update, and the server's training with its teacher.

The networks are a hidden layer with a predictor (client) and one linear layer (server), so that each gradient is written out.
Batches come in order instead of shuffled, and views draw nothing: of the two views of a batch the first is the image, the
second its mirror image, so that one in place of the other shows.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import models
from fedjax_ssl.data.augment import Views
from fedjax_ssl.local import Broadcast, Server, ServerState, Task, Training, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import ClientData, ServerData
from fedjax_ssl.methods.fedcon import FedConClientState, FedConOptions, Teacher, fedcon, server_work
from fedjax_ssl.ssl import losses
from tests.golden import linear_clients as lc

SIDE, CLASSES, HIDDEN, HEAD, BATCH, RATE, MOMENTUM, DECAY, EPSILON = 3, 3, 4, 5, 4, 0.1, 0.9, 0.1, 1e-5


def task(network, **options):
    """A task whose weak and labeled views are in turn the image and its mirror image."""
    turns = {name: itertools.cycle([False, True]) for name in ("weak", "labeled")}

    def view(name):
        def draw(_, images):
            x = lc.upright(images)
            return x[:, :, ::-1] if next(turns[name]) else x

        return draw

    views = Views(lc.upright, view("weak"), None, view("labeled"))  # FedCon has no strong view
    return Task(models.build(network, num_classes=CLASSES, **options), views, CLASSES, "static")


def cosine(p, t):
    return (p * t).sum(1) / np.linalg.norm(p, axis=1) / np.linalg.norm(t, axis=1)


def cosine_gradient(p, t):
    """d cos(p, t) / dp, row by row."""
    length = np.linalg.norm(p, axis=1, keepdims=True)
    return (t / np.linalg.norm(t, axis=1, keepdims=True) - cosine(p, t)[:, None] * p / length) / length


def test_the_negative_cosine_and_its_gradient_leave_the_target_alone():
    p, t = lc.float32(list(np.random.default_rng(0).standard_normal((2, 5, 4))))
    p, t = p.at[3].set(0), t.at[4].set(0)
    values, pullback = jax.vjp(losses.negative_cosine, p, t)
    np.testing.assert_allclose(values[:3], -cosine(p[:3], t[:3]), rtol=1e-5)
    np.testing.assert_array_equal(values[3:], 0)
    weight = jnp.arange(1.0, 6.0)
    of_output, of_target = pullback(weight)
    np.testing.assert_allclose(of_output[:3], -weight[:3, None] * cosine_gradient(p[:3], t[:3]), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(of_output[3:], 0)
    np.testing.assert_array_equal(of_target, 0)


def features(f, x):
    return np.maximum(x @ f["kernel"] + f["bias"], 0)


def predict(h, f):
    """The predictor's output, and what its gradient needs."""
    u = f @ h["Dense_0"]["kernel"] + h["Dense_0"]["bias"]
    root = np.sqrt(u.var(0) + EPSILON)
    normed = (u - u.mean(0)) / root
    r = np.maximum(h["BatchNorm_0"]["scale"] * normed + h["BatchNorm_0"]["bias"], 0)
    return r @ h["Dense_1"]["kernel"] + h["Dense_1"]["bias"], (normed, root, r)


def backward(params, x, f, kept, d_out):
    """Gradient of all parameters for the cotangent `d_out` of the predictor's output, through batch norm's moments too."""
    h, (normed, root, r) = params["head"], kept
    d_v = (d_out @ h["Dense_1"]["kernel"].T) * (r > 0)
    d_normed = d_v * h["BatchNorm_0"]["scale"]
    d_u = (d_normed - d_normed.mean(0) - normed * (d_normed * normed).mean(0)) / root
    d_f = (d_u @ h["Dense_0"]["kernel"].T) * (f > 0)
    scale = {"scale": (d_v * normed).sum(0), "bias": d_v.sum(0)}
    head = {"Dense_0": lc.gradient(f, d_u), "BatchNorm_0": scale, "Dense_1": lc.gradient(r, d_out)}
    return {"backbone": {"Dense_0": lc.gradient(x, d_f)}, "head": head}


class Client:
    """Seven images of a pool of twelve, a received backbone, and what the client keeps; float64."""

    def __init__(self):
        self.rng = np.random.default_rng(1)
        self.pool = self.rng.integers(0, 256, (12, SIDE, SIDE, 1)).astype(np.uint8)
        self.index = np.array([3, 11, 5, 1, 8, 2, 7, 0])
        self.received = {"Dense_0": self.dense(SIDE * SIDE, HIDDEN)}
        self.target = {"Dense_0": self.dense(SIDE * SIDE, HIDDEN)}
        scale = {"scale": 1 + 0.2 * self.rng.standard_normal(HEAD), "bias": 0.2 * self.rng.standard_normal(HEAD)}
        self.head = {"Dense_0": self.dense(HIDDEN, HEAD), "BatchNorm_0": scale, "Dense_1": self.dense(HEAD, HIDDEN)}
        params = {"backbone": self.received, "head": self.head}
        self.momentum = jax.tree.map(lambda leaf: 0.1 * self.rng.standard_normal(leaf.shape), params)

    def dense(self, inputs, outputs):
        kernel = self.rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        return {"kernel": kernel, "bias": 0.3 + 0.1 * self.rng.standard_normal(outputs)}

    def expected(self, seen: bool):
        """(parameters, target, momentum, sum of losses) after one epoch."""
        images = lc.plain(self.pool[self.index[:7]].astype(float))
        first, second = images.reshape(7, -1), images[:, :, ::-1].reshape(7, -1)
        w, m = {"backbone": self.received, "head": self.head}, self.momentum
        target = self.target if seen else self.received
        loss = 0.0
        for at in (np.arange(4), np.arange(4, 7)):
            x1, x2 = first[at], second[at]
            t1, t2 = (features(target["Dense_0"], x) for x in (x1, x2))
            grads = []
            for x, t in ((x1, t2), (x2, t1)):
                f = features(w["backbone"]["Dense_0"], x)
                p, kept = predict(w["head"], f)
                loss += -0.5 * cosine(p, t).sum()
                grads.append(backward(w, x, f, kept, -0.5 * cosine_gradient(p, t) / len(at)))
            w, m = lc.sgd(w, jax.tree.map(np.add, *grads), m, RATE, decay=DECAY)
            target = jax.tree.map(lambda t, w: TARGET_DECAY * t + (1 - TARGET_DECAY) * w, target, w["backbone"])
        return w, target, m, loss

    def got(self, seen: bool):
        received, head, target, momentum = lc.float32((self.received, self.head, self.target, self.momentum))
        optimizer = lc.with_leaves(SGD.init({"backbone": received, "head": head}), momentum)
        unlabeled = lc.examples(self.pool, self.index, 7)
        client_data = ClientData(unlabeled._replace(count=jnp.int32(0)), unlabeled, jnp.zeros(8, jnp.int32))
        shared = Broadcast(Weights(received, {}), jnp.float32(RATE))
        state = FedConClientState(head, target, jnp.asarray(seen), optimizer)
        return client_update()(shared, (), state, client_data, jax.random.key(0))


SGD, TARGET_DECAY = torch_sgd(momentum=MOMENTUM, weight_decay=DECAY), 0.7


@functools.cache
def client_update():
    client = lc.InOrder(SGD, lambda _: None, BATCH, epochs=1)
    options = FedConOptions(head_hidden=HEAD, target_decay=TARGET_DECAY)
    server = Server(None, None, 0, None)
    return lc.with_costs(fedcon(task=task("mlp", hidden=HIDDEN), client=client, server=server, options=options).client_update)


@pytest.mark.parametrize("seen", [False, True])
def test_a_client_update_is_what_the_equations_say(seen):
    client = Client()
    w, target, momentum, loss = client.expected(seen)
    output = client.got(seen)
    state = output.client_state
    lc.assert_same(output.update.params, jax.tree.map(np.subtract, client.received, w["backbone"]))
    assert output.update.stats == ()
    lc.assert_same(state.head, w["head"])
    lc.assert_same(state.target, target)
    assert bool(state.seen)
    lc.assert_same(jax.tree.leaves(state.optimizer), jax.tree.leaves(momentum))
    assert output.weight == 1
    size = 4 * (SIDE * SIDE + 1) * HIDDEN  # the backbone alone
    costs = lc.costs(size, size, 7, 2 * 4 * BATCH, 2 * 2 * BATCH)  # two steps: two views, of both networks
    lc.assert_metrics(output.metrics, {"client/loss": (loss, 7), **costs})


LABELS, STEPS, ROUNDS, PRETRAIN, RAMP, TEACHER_RATE = 5, 2, 9, 1, 6, 0.5


@functools.cache
def server_training():
    training = Training(torch_sgd(momentum=MOMENTUM), lambda _: jnp.float32(RATE), LABELS, epochs=STEPS, persistent=False)
    server = Server(None, training, PRETRAIN, None)
    options = FedConOptions(ramp_rounds=RAMP, teacher_rate=TEACHER_RATE)
    return jax.jit(server_work(task("linear"), server, options).train)


@pytest.mark.parametrize("trainings", [0, 3, 9])
def test_the_servers_training_is_what_the_equations_say(trainings):
    rng = np.random.default_rng(2)
    pool, y = rng.integers(0, 256, (LABELS, SIDE, SIDE, 1)).astype(np.uint8), np.array([0, 2, 1, 1, 0])
    images = lc.plain(pool.astype(float))
    x = images.reshape(LABELS, -1), images[:, :, ::-1].reshape(LABELS, -1)

    w, teacher, m = lc.random_layer(rng), lc.random_layer(rng), {"kernel": 0.0, "bias": 0.0}
    start = w, teacher
    weight = np.exp(-5 * (1 - min(trainings, RAMP) / RAMP) ** 2)
    ce_sum = kl_sum = 0.0
    for step in range(STEPS):
        targets = lc.outputs(teacher, x[0]), lc.outputs(teacher, x[1])
        grads = []
        for own, other in ((0, 1), (1, 0)):
            q, t = lc.outputs(w, x[own]), targets[other]
            ce_sum += 0.5 * lc.cross_entropy(q, y).sum()
            kl_sum += 0.5 * (t * np.log(t / q)).sum()
            grads.append(lc.gradient(x[own], 0.5 * (lc.residual(q, y) + weight * (q - t)) / LABELS))
        w, m = lc.sgd(w, lc.combine(np.add, *grads), m, RATE)
        k, in_all = trainings * STEPS + step, STEPS * (PRETRAIN + ROUNDS)
        decay = 1 - TEACHER_RATE * (np.cos(np.pi * k / in_all) + 1) / 2
        teacher = lc.combine(lambda t, w, decay=decay: decay * t + (1 - decay) * w, teacher, w)

    params, average = map(lc.named, start)
    state = ServerState(Weights(params, {}), (), (), Teacher(average, jnp.int32(trainings * STEPS)))
    # One batch of all labels: the mean over it does not feel the order.
    labeled = lc.examples(pool, np.arange(LABELS), LABELS, y)
    data = ServerData(labeled, labeled, None, labeled, jnp.int32(max(0, trainings - 1)), ROUNDS)
    state, metrics = server_training()(state, data, jax.random.key(0))
    lc.assert_same(state.weights.params["Dense_0"], w)
    lc.assert_same(state.extra.params["Dense_0"], teacher)
    assert state.extra.steps == (trainings + 1) * STEPS
    assert state.fine_tune == ()
    np.testing.assert_allclose(metrics["server/loss"], (ce_sum, STEPS * LABELS), rtol=1e-4)
    np.testing.assert_allclose(metrics["server/consistency_loss"], (kl_sum, STEPS * LABELS), rtol=1e-4)
