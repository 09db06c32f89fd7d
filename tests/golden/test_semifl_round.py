"""Two whole rounds of SemiFL against NumPy in float64: fix and mix sets, mixtures, weights, both momenta, statistics.

The network has a hidden layer with batch norm and ReLU, whose gradient is written out. Batches come in order; the mixing ratios
and partners are drawn from the steps' keys. The package computes in float32, and in a process of its own in float64, where
nothing but the order of sums is left to differ.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.local import Server, Task, substream
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.local.server import StaticNorm
from fedjax_ssl.method import Aggregate, ClientData, Cohort, DataSpec, ServerData, averaged, summed
from fedjax_ssl.methods.semifl import SemiFLOptions, semifl
from fedjax_ssl.models import ModelFns, norm
from tests.golden import linear_clients as lc

HIDDEN, EPS, CLIP, EPOCHS, RATE, DECAY, ALPHA = 6, 1e-5, 0.8, 2, 0.2, 0.1, 0.75
LABELED, UNLABELED, BATCH, SBN_BATCH, ROUNDS = 5, 24, 4, 8, 2
KEY = jax.random.key(3)


def initial():
    rng = np.random.default_rng(1)
    d = lc.SIDE**2
    params = {
        "w1": rng.normal(size=(d, HIDDEN)),
        "scale": 1 + 0.1 * rng.normal(size=HIDDEN),
        "bias": 0.1 * rng.normal(size=HIDDEN),
    }
    return params | {"w2": 1.5 * rng.normal(size=(HIDDEN, lc.CLASSES)), "b2": 0.1 * rng.normal(size=lc.CLASSES)}


def apply(params, stats, images, *, mask=None, train=False, key=None):
    layer = norm.Norm(stats["mean"], stats["var"], params["scale"], params["bias"], EPS)
    y, mean, var = norm.normalize(images.reshape(len(images), -1) @ params["w1"], mask, layer, train=train)
    return jax.nn.relu(y) @ params["w2"] + params["b2"], {"mean": mean, "var": var}


def init(key, image):
    del key, image
    return {k: jnp.float32(v) for k, v in initial().items()}, {"mean": jnp.zeros(HIDDEN), "var": jnp.ones(HIDDEN)}


class Data:
    """A pool of labeled images, then unlabeled ones, of which the last of three clients has the least confident."""

    def __init__(self):
        self.pool = np.random.default_rng(2).integers(0, 256, (LABELED + UNLABELED, lc.SIDE, lc.SIDE, 1)).astype(np.uint8)
        x = lc.plain(self.pool.astype(float))
        self.weak, self.strong = x.reshape(len(x), -1), x[:, :, ::-1].reshape(len(x), -1)
        self.labeled = x[:LABELED, ::-1].reshape(LABELED, -1)
        start = Reference(self)
        confidence = start.forward(start.w, self.weak[LABELED:], start.stats)[0].max(1)
        order = LABELED + np.argsort(confidence)
        self.clients = [order[9::2], order[8::2], order[:8]]
        self.confidence = np.sort(confidence)[[10, 11]].mean()

    def client_data(self, k):
        return ClientData(None, lc.examples(self.pool, self.clients[k], 8), jnp.zeros(8, jnp.int32))

    def server(self, number):
        labeled = lc.examples(self.pool, np.arange(LABELED), LABELED, lc.LABELS)
        rest = lc.examples(self.pool, np.arange(LABELED, len(self.pool)), UNLABELED)
        return ServerData(labeled, rest, None, None, jnp.int32(number), ROUNDS)


class Reference:
    """The rounds in NumPy, in `dtype`."""

    def __init__(self, data, dtype=np.float64):
        self.data, self.dtype = data, dtype
        self.w = {k: v.astype(dtype) for k, v in initial().items()}
        zeros = {k: np.zeros_like(v) for k, v in self.w.items()}
        self.momenta, self.own, self.server = [dict(zeros) for _ in range(3)], dict(zeros), dict(zeros)
        self.stats = self.collect()

    def forward(self, w, x, stats=None):
        """(outputs, what the backward pass needs); by the batch's own statistics unless others are given."""
        z = x @ w["w1"]
        mean, var = (z.mean(0), z.var(0)) if stats is None else stats
        n = (z - mean) / np.sqrt(var + self.dtype(EPS))
        h = n * w["scale"] + w["bias"]
        return lc.softmax(np.maximum(h, 0) @ w["w2"] + w["b2"]), (z, n, h, var)

    def gradient(self, w, x, target):
        """(that of the mean cross-entropy with soft targets in training mode, the sum of the losses)."""
        q, (_, n, h, var) = self.forward(w, x)
        out = (q - target) / self.dtype(len(x))
        back = (out @ w["w2"].T) * (h > 0)
        dn = back * w["scale"]
        dz = (dn - dn.mean(0) - n * (dn * n).mean(0)) / np.sqrt(var + self.dtype(EPS))
        g = {"w1": x.T @ dz, "scale": (back * n).sum(0), "bias": back.sum(0), "w2": np.maximum(h, 0).T @ out, "b2": out.sum(0)}
        return {k: g[k] for k in w}, -np.sum(target * np.log(q))

    def step(self, w, g, m):
        size = np.sqrt(sum(np.sum(v**2) for v in g.values()))
        scale = self.dtype(min(1.0, CLIP / size))
        g = {k: scale * g[k] + self.dtype(DECAY) * w[k] for k in w}
        m = {k: self.dtype(0.9) * m[k] + g[k] for k in w}
        return {k: w[k] - self.dtype(RATE) * (g[k] + self.dtype(0.9) * m[k]) for k in w}, m

    def collect(self):
        """Static statistics over labeled and unlabeled images in the same batches, every batch alike."""
        x = self.data.weak.astype(self.dtype)  # plain images, the labeled ones first
        z = [x[i : i + SBN_BATCH] @ self.w["w1"] for i in range(0, len(x), SBN_BATCH)]
        return np.mean([b.mean(0) for b in z], 0), np.mean([b.var(0, ddof=1) for b in z], 0)

    def client(self, k, key):
        """(weights, takes part) of client k."""
        weak, strong = (views[self.data.clients[k]].astype(self.dtype) for views in (self.data.weak, self.data.strong))
        q, _ = self.forward(self.w, weak, self.stats)
        label, confidence = q.argmax(1), q.max(1)
        assert np.abs(confidence - self.data.confidence).min() > 1e-4  # no decision hangs on float32
        fix = np.flatnonzero(confidence >= self.data.confidence)
        train_key, w, m, one_hot, s = jax.random.split(key, 3)[2], self.w, self.momenta[k], np.eye(lc.CLASSES), 0
        for _ in range(EPOCHS):
            for start in range(0, len(fix), BATCH):
                at = fix[start : start + BATCH]
                ratio_key, partner_key, *_ = jax.random.split(substream(jax.random.fold_in(train_key, s), "mixup"), 4)
                lam = self.dtype(jax.random.beta(ratio_key, ALPHA, ALPHA))
                partner = np.asarray(jax.random.randint(partner_key, (BATCH,), 0, len(weak)))[: len(at)]
                x = lam * weak[at] + (1 - lam) * weak[partner]
                target = lam * one_hot[label[at]] + (1 - lam) * one_hot[label[partner]]
                fixed, loss = self.gradient(w, strong[at], one_hot[label[at]].astype(self.dtype))
                mixed, mix_loss = self.gradient(w, x, target.astype(self.dtype))
                w, m = self.step(w, lc.combine(np.add, fixed, mixed), m)
                self.losses[k] += loss, mix_loss
                s += 1
        self.momenta[k] = m
        return w, len(fix) > 0

    def round(self, keys):
        """How many clients take part."""
        self.losses = np.zeros((3, 2))
        found = [self.client(k, key) for k, key in enumerate(keys)]
        taking = [w for w, takes_part in found if takes_part]
        mean = lc.combine(lambda *ws: sum(ws) / self.dtype(len(ws)), *taking)
        self.server = {k: self.dtype(0.5) * self.server[k] + self.w[k] - mean[k] for k in mean}
        w, m = {k: self.w[k] - self.server[k] for k in mean}, self.own
        x, y = self.data.labeled.astype(self.dtype), np.eye(lc.CLASSES)[lc.LABELS].astype(self.dtype)
        for _ in range(EPOCHS):
            for start in range(0, LABELED, BATCH):
                w, m = self.step(w, self.gradient(w, x[start : start + BATCH], y[start : start + BATCH])[0], m)
        self.w, self.own = w, m
        self.stats = self.collect()
        return len(taking)


def keys(number):
    return jax.random.split(jax.random.fold_in(KEY, number), 3)


def engines(data):
    """(parameters, statistics, weights, losses) after each round, by the package."""
    task = Task(ModelFns(init, apply), lc.VIEWS, lc.CLASSES, "static")
    sgd = torch_sgd(momentum=0.9, nesterov=True, weight_decay=DECAY, clip_norm=CLIP)
    client = lc.InOrder(sgd, lambda _: jnp.float32(RATE), BATCH, EPOCHS)
    statistics = StaticNorm("all", "batches", SBN_BATCH, SBN_BATCH, "joined")
    server = Server(optax.sgd(1.0, momentum=0.5), client, 0, statistics)
    options = SemiFLOptions(confidence=float(data.confidence), mixup_alpha=ALPHA)
    method = semifl(task=task, client=client, server=server, options=options)
    state, clients = method.init(KEY, DataSpec((lc.SIDE, lc.SIDE, 1), lc.CLASSES, 3, 3))
    state, _ = method.prepare(state, data.server(0), KEY)
    of_client, of_server = jax.jit(method.client_update), jax.jit(method.server_update)
    for number in range(ROUNDS):
        shared, _ = method.broadcast(state, clients, Cohort(jnp.arange(3), jnp.int32(number), ROUNDS))
        own = [jax.tree.map(lambda x, k=k: x[k], clients) for k in range(3)]
        outputs = [of_client(shared, (), own[k], data.client_data(k), key) for k, key in enumerate(keys(number))]
        clients, update, weight = (
            jax.tree.map(lambda *x: jnp.stack(x), *(getattr(one, name) for one in outputs))
            for name in ("client_state", "update", "weight")
        )
        state, _ = of_server(state, averaged(summed(Aggregate(update, weight))), data.server(number), KEY)
        losses = [[one.metrics[f"client/{name}"].total for name in ("loss", "mix_loss")] for one in outputs]
        yield state.weights.params, (state.weights.stats["mean"], state.weights.stats["var"]), weight, losses


def differences(data, other):
    """Of each round: how far apart parameters and statistics are, relative to how far the float64 ones have moved."""
    reference, start = Reference(data), initial()
    for number, (params, stats, weight, losses) in enumerate(other):
        assert reference.round(keys(number)) == np.sum(weight)
        np.testing.assert_allclose(losses, reference.losses, rtol=1e-4)
        apart = lc.norm({k: np.float64(params[k]) - v for k, v in reference.w.items()})
        of_stats = np.linalg.norm(np.subtract(stats, reference.stats)) / np.linalg.norm(reference.stats)
        yield apart / lc.norm({k: v - start[k] for k, v in reference.w.items()}), of_stats


@pytest.mark.ci
def test_two_rounds_are_those_of_float64_to_rounding():
    for apart in differences(Data(), engines(Data())):
        assert max(apart) < 1e-5


IN_FLOAT64 = """
import jax
jax.config.update("jax_enable_x64", True)
jax.numpy.float32, jax.numpy.int32 = jax.numpy.float64, jax.numpy.int64  # before the package is imported
from tests.golden.test_semifl_round import Data, differences, engines
for apart in differences(Data(), engines(Data())):
    print(*apart)
"""


@pytest.mark.slow
def test_in_float64_no_more_is_left_than_the_order_of_sums():
    done = subprocess.run([sys.executable, "-c", IN_FLOAT64], capture_output=True, text=True, check=True)
    assert max(map(float, done.stdout.split())) < 1e-13  # 3e-16, 2e-15 of the statistics
