"""FedLabel against NumPy: a whole client update of each variant, the server's two halves, and what experts decide.

The network normalizes its inputs as batch norm does and is linear after that: each gradient is written out, and it shows whose
statistics are used and tracked. The views draw nothing: the strong one mirrors an image from left to right, the weak one from
top to bottom, the labeled one is its negative. There are fewer labels than a batch has, so that each has them all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.fedlabel import FEDLABEL
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.batching import Schedule, draws
from fedjax_ssl.local import Broadcast, Server, ServerState, Task, Training, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.local.server import StaticNorm
from fedjax_ssl.method import Aggregate, ClientData, ServerData, averaged, summed
from fedjax_ssl.methods.fedlabel import FedLabelClientState, FedLabelOptions, Halves, fedlabel
from fedjax_ssl.models import ModelFns
from fedjax_ssl.ssl import experts
from tests.golden import linear_clients as lc
from tests.golden.normalizing import EPSILON, normalize, normalized, tracked

CLASSES, LABELED, UNLABELED, BATCH, TAU = lc.CLASSES, 3, 9, 4, 3
RATE, MOMENTUM, DECAY, SHARE = 0.1, 0.9, 0.1, 0.3
LABELS = np.array([2, 0, 1, 0])  # the fourth row is padding, as is the tenth here
TRUE_LABELS = np.array([0, 0, 1, 2, 1, 0, 0, 2, 1, 2])
SEED, PLACES = 39, [0, 5, 1, 4, 2, 3, 6, 8, 7, 9]  # for which the assertions on the example hold
# The unlabeled batches: in the paper's variant nothing of the last is kept, some rows come twice and one never.
ORDER = np.array([[0, 1, 2, 3], [4, 1, 5, 2], [0, 6, 1, 7]])
BASE = {"confidence": 0.6, "unlabeled_steps": len(ORDER), "consistency_weight": 2.0}
VARIANTS = {
    "paper": {},
    "other options": {
        "measure": "entropy", "expert_view": "weak", "counts": "distinct", "unlabeled_rate": 0.5,
        "proximity": 2.0,
    },
    "released": FEDLABEL["released"] | {"burn_in": 0, "expert_view": "plain"},  # the view is above; some that are kept disagree
    "local expert": {"experts": "local"},
    "global expert": {"experts": "global"},
    "no strong view": {"augment": "none"},
}  # fmt: skip


VIEWS = {  # of images in [n, H, W, ch]
    "plain": lc.plain,
    "strong": lambda images: lc.plain(images)[:, :, ::-1],
    "weak": lambda images: lc.plain(images)[:, ::-1],
    "labeled": lambda images: -lc.plain(images),
}


def apply(params, stats, images, *, mask=None, train=False, key=None):
    """(logits, batch statistics) of the network: inputs normalized, then linear."""
    inputs, stats = normalize(stats, images, mask, train)
    return inputs @ params["kernel"] + params["bias"], stats


def variance(p):
    return ((p - 1 / CLASSES) ** 2).sum(-1) / (CLASSES - 1)


def inverse_entropy(p):
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 / (-np.where(p > 0, p * np.log(p), 0).sum(-1) + 1e-5)


MEASURES = {"variance": variance, "entropy": inverse_entropy}


class Net:
    def __init__(self, params, stats, momentum, rate):
        self.w, self.v, self.m, self.rate = dict(params), dict(stats), dict(momentum), rate

    def evaluated(self, x):
        normed = (x - self.v["mean"]) / np.sqrt(self.v["var"] + EPSILON)
        return lc.outputs(self.w, normed)

    def trained(self, x):
        """(outputs, normalized inputs) in training mode; the statistics are tracked."""
        normed, self.v = normalized(x), tracked(self.v, x, SHARE)
        return lc.outputs(self.w, normed), normed

    def step(self, *parts, more=None):
        """One step along the gradients of (normalized inputs, residuals of the logits), and of `more`."""
        g = lc.combine(lambda *of_parts: sum(of_parts), *(lc.gradient(*part) for part in parts), *([more] if more else []))
        self.w, self.m = lc.sgd(self.w, g, self.m, self.rate, decay=DECAY)


class Problem:
    """A client and what it is sent, in float64, and what FedLabel makes of it here and there."""

    def __init__(self):
        rng = np.random.default_rng(SEED)
        self.pool = rng.integers(0, 256, (16, lc.SIDE, lc.SIDE, 1)).astype(np.uint8)
        order = rng.permutation(16)
        self.labeled_rows, self.rows = order[:4], order[4:14][PLACES]
        self.w = lc.random_layer(rng, 0.6, bias=0.3)
        self.v = {"mean": 0.3 * rng.standard_normal(9), "var": rng.uniform(0.3, 0.9, 9)}
        self.momenta = [lc.combine(lambda x: 0.2 * rng.standard_normal(x.shape), self.w) for _ in range(2)]

    def view(self, name, rows):
        return VIEWS[name](self.pool[rows].astype(float)).reshape(len(rows), -1)

    def decide(self, options, global_, local):
        """What is decided on each of the UNLABELED images: (label, kept, local's, agreed, ratio, KL's target)."""
        x = self.view(options.expert_view, self.rows[:UNLABELED])
        s = np.stack([global_.evaluated(x), local.evaluated(x)])
        h = MEASURES[options.measure](s)
        assert np.abs(h[0] / h[1] - 1).min() > 1e-3  # no decision hangs on float32
        surer = {"both": (h[1] > h[0]).astype(int), "global": [0] * UNLABELED, "local": [1] * UNLABELED}[options.experts]
        surer, rows = np.array(surer), np.arange(UNLABELED)
        best, other = s[surer, rows], s[1 - surer, rows]
        assert np.abs(best.max(1) - options.confidence).min() > 1e-3
        agreed = other.argmax(1) == best.argmax(1)
        ratio = h[1 - surer, rows] / h[surer, rows]
        target = other if options.consistency_target == "other" else s[1]
        return best.argmax(1), best.max(1) > options.confidence, surer == 1, agreed, ratio, target

    def expected(self, options):
        """(w_L, w_U, r, metrics) as the equations say."""
        local = Net(self.w, self.v, self.momenta[0], RATE)
        y, loss = LABELS[:LABELED], 0.0
        for _ in range(TAU):
            p, x = local.trained(self.view("labeled", self.labeled_rows[:LABELED]))
            loss += lc.cross_entropy(p, y).sum()
            local.step((x, lc.residual(p, y) / LABELED))

        net, sent = Net(self.w, self.v, self.momenta[1], options.unlabeled_rate * RATE), Net(self.w, self.v, {}, 0)
        label, passing, of_local, agreed, ratio, target = self.decide(options, sent, local)
        both = options.experts == "both"
        self.taken, ce_sum, kl_sum = [], 0.0, 0.0
        for at in ORDER:
            kept = at[passing[at]]
            self.taken.append(len(kept))
            if not len(kept):
                continue
            agreeing = agreed[kept]
            divisors = (BATCH, BATCH) if options.divisor == "batch" else (len(kept), max(agreeing.sum(), 1))
            strong = self.view("strong" if options.augment == "strong" else options.expert_view, self.rows[kept])
            p, x = net.trained(strong)
            ce_sum += lc.cross_entropy(p, label[kept]).sum()
            parts, more = [(x, lc.residual(p, label[kept]) / divisors[0])], None
            if both:
                if options.augment == "strong":
                    p, x = net.trained(self.view(options.expert_view, self.rows[kept]))
                t = target[kept]
                kl, residual = (t * np.log(t / p)).sum(1), p - t
                weight = options.consistency_weight * ratio[kept] * agreeing / divisors[1]
                parts.append((x, weight[:, None] * residual))
                kl_sum += kl[agreeing].sum()
            if options.proximity:
                more = lc.combine(lambda w, a: 2 * options.proximity * (w - a) / w.size, net.w, self.w)
            net.step(*parts, more=more)

        drawn = ORDER.ravel()
        used = drawn[passing[drawn]]
        counts = {"draws": TAU * LABELED + len(used), "distinct": LABELED + len(set(used)), "passing": max(len(used), 1)}
        r = counts[options.counts]
        # Forward passes of a step on unlabeled data, and those of them that are trained.
        experts, nets = 2 if both else 1, 2 if both and options.augment == "strong" else 1
        size, models = 4 * (9 * CLASSES + CLASSES + 9 + 9), 2 if options.aggregation == "halves" else 1
        forward, backward = BATCH * (TAU + len(ORDER) * (experts + nets)), BATCH * (TAU + len(ORDER) * nets)
        metrics = {
            **lc.diagnostics([label[drawn]], [TRUE_LABELS[drawn]], [passing[drawn]]),
            **lc.costs(size, models * size + 4, TAU * LABELED + ORDER.size, forward, backward),
            "client/loss": (loss, TAU * LABELED),
            "client/unlabeled_loss": (ce_sum, len(used)),
        }
        if both:
            metrics["client/consistency_loss"] = (kl_sum, agreed[used].sum())
            metrics["client/local_expert_rate"] = (of_local[used].sum(), len(used))
            metrics["client/agreement_rate"] = (agreed[drawn].sum(), drawn.size)
        return local, net, r, metrics

    def got(self, options):
        client, update = client_of(options)
        labeled = lc.examples(self.pool, self.labeled_rows, LABELED, LABELS)
        client_data = ClientData(labeled, lc.examples(self.pool, self.rows, UNLABELED), jnp.asarray(TRUE_LABELS))
        states = [lc.with_leaves(client.optimizer.init(lc.float32(self.w)), lc.float32(m)) for m in self.momenta]
        shared = Broadcast(Weights(lc.float32(self.w), lc.float32(self.v)), jnp.float32(RATE), jnp.int32(0))
        return update(shared, (), FedLabelClientState(*states), client_data, jax.random.key(0))


def in_order(key, mask, batch_size, steps):
    """ORDER for the unlabeled examples; labels as they are drawn."""
    if len(mask) == len(LABELS):
        return draws(key, mask, batch_size, steps)
    assert (batch_size, steps) == (BATCH, len(ORDER))
    return Schedule(jnp.asarray(ORDER, jnp.int32), jnp.int32(BATCH), jnp.int32(steps), BATCH)


@pytest.fixture(autouse=True)
def unlabeled_batches_in_order(monkeypatch):
    monkeypatch.setattr("fedjax_ssl.data.batching.draws", in_order)


def method_of(options):
    # Given images, or a key and images.
    views = Views(**{name: lambda *given, view=view: view(given[-1].astype(jnp.float32)) for name, view in VIEWS.items()})
    task = Task(ModelFns(None, apply), views, CLASSES, "running", SHARE, labels_at=("clients",))
    client = Training(torch_sgd(momentum=MOMENTUM, weight_decay=DECAY), lambda _: None, BATCH, steps=TAU)
    server = Server(optax.sgd(1.0), client, 0, StaticNorm("cohort", "examples", 4, 4))
    return client, fedlabel(task=task, client=client, server=server, options=options)


@functools.cache
def client_of(options):
    client, method = method_of(options)
    return client, lc.with_costs(method.client_update)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_client_update_is_what_the_equations_say(variant):
    problem, options = Problem(), FedLabelOptions(**BASE | VARIANTS[variant])
    local, net, r, metrics = problem.expected(options)
    output = problem.got(options)
    if variant == "paper":
        assert problem.taken == [2, 3, 0]  # of four each
    deltas = [(lc.combine(np.subtract, problem.w, n.w), lc.combine(np.subtract, problem.v, n.v)) for n in (local, net)]
    if options.aggregation == "halves":
        assert output.weight == 1
        assert output.update.used == r
        for got, (params, stats), scale in zip(output.update[:2], deltas, (1, r), strict=True):
            lc.assert_same(tuple(got), jax.tree.map(lambda x, s=scale: s * x, (params, stats)), 1e-4)
    else:
        assert output.weight == r
        lc.assert_same(output.update.params, lc.combine(np.add, deltas[0][0], deltas[1][0]), 1e-4)
        lc.assert_same(output.update.stats, lc.combine(lambda a, b: (a + b) / 2, deltas[0][1], deltas[1][1]), 1e-4)
    lc.assert_same(lc.with_leaves([local.m, net.m], output.client_state), [local.m, net.m], 1e-4)
    lc.assert_metrics(output.metrics, metrics)


def test_the_released_aggregate_is_of_two_halves():
    rng = np.random.default_rng(0)

    def draw(*lead):
        params = {"kernel": rng.standard_normal((*lead, 9, CLASSES)), "bias": rng.standard_normal((*lead, CLASSES))}
        return Weights(params, {"mean": rng.standard_normal((*lead, 9)), "var": rng.uniform(0.5, 1.0, (*lead, 9))})

    sent, of_l, of_u, r = draw(), draw(3), draw(3), np.array([5.0, 1.0, 7.0])

    def expected(w, w_l, w_u):  # the third client takes no part
        del w
        return (w_l[0] + w_l[1]) / 4 + (5 * w_u[0] + w_u[1]) / 12

    changed = [jax.tree.map(lambda w, local: jnp.float32(w - local), sent, local) for local in (of_l, of_u)]
    changed[1] = jax.tree.map(lambda x: x * r.reshape(-1, *[1] * (x.ndim - 1)), changed[1])
    spoiled = jax.tree.map(lambda x: x.at[2].set(jnp.nan), Halves(*changed, jnp.float32(r)))
    aggregate = averaged(summed(Aggregate(spoiled, jnp.array([1.0, 1.0, 0.0]))))
    _, method = method_of(FedLabelOptions(aggregation="halves"))
    state = ServerState(lc.float32(sent), optax.sgd(1.0).init(lc.float32(sent.params)), ())
    nothing = lc.examples(Problem().pool, [0], 0, [0])
    new, _ = method.server_update(state, aggregate, ServerData(nothing, nothing, None, None, 0), jax.random.key(0))
    lc.assert_same(new.weights, jax.tree.map(expected, sent, of_l, of_u), 1e-4)


# Softmax outputs of the two experts on six images, and what they decide by variance (of three classes).
GLOBAL = np.array(
    [[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [1 / 3, 1 / 3, 1 / 3]]
)
LOCAL = np.array(
    [[0.1, 0.6, 0.3], [0.05, 0.9, 0.05], [0.2, 0.7, 0.1], [0.5, 0.3, 0.2], [0.05, 0.15, 0.8], [1 / 3, 1 / 3, 1 / 3]]
)
SURER_LOCAL = [False, True, False, False, True, False]  # image 3 is a tie, as is 5: the global expert wins
SHIFT = np.array([[3.0], [3.0], [3.0], [0.0], [3.0], [0.0]])  # a softmax knows of no shift, but for rounding
LABEL = [0, 1, 1, 0, 2, 0]
AGREED = [False, False, True, True, False, True]


@pytest.mark.parametrize("name", MEASURES)
def test_the_surer_expert_decides_and_the_global_one_wins_a_tie(name):
    probs = np.concatenate([GLOBAL, LOCAL, np.eye(3)[:1]])
    np.testing.assert_allclose(experts.MEASURES[name](jnp.float32(probs)), MEASURES[name](probs), rtol=1e-5, atol=1e-9)
    got = experts.decide(jnp.float32(np.log(GLOBAL + 1e-90) + SHIFT), jnp.float32(np.log(LOCAL)), name)
    h = [MEASURES[name](p) for p in (GLOBAL, LOCAL)]
    assert got.local.tolist() == SURER_LOCAL == (h[1] > h[0] + 1e-9).tolist()
    assert got.label.tolist() == LABEL
    assert got.agreed.tolist() == AGREED
    best = np.where(np.array(SURER_LOCAL)[:, None], LOCAL, GLOBAL)
    np.testing.assert_allclose(got.confidence, best.max(1), rtol=1e-5)
    ratio = np.array([1.0 if i == 5 else min(a, b) / max(a, b) for i, (a, b) in enumerate(zip(*h, strict=True))])
    np.testing.assert_allclose(got.ratio, ratio, rtol=1e-4)
    other = np.where(np.array(SURER_LOCAL)[:, None], GLOBAL, LOCAL)
    np.testing.assert_allclose(jax.nn.softmax(got.other), other, atol=1e-6)
