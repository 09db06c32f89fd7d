"""FedLabel against NumPy: a whole client update of each variant, and the server's two halves.

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
from fedjax_ssl.local.server import StaticNorm, mean_of_stack
from fedjax_ssl.method import Aggregate, ServerData, Shard
from fedjax_ssl.methods.fedlabel import FedLabelClientState, FedLabelOptions, Halves, fedlabel
from fedjax_ssl.models import ModelFns
from tests.golden import linear_clients as lc
from tests.golden.normalizing import EPSILON, normalize, normalized, tracked

SIDE, CLASSES, LABELED, UNLABELED, BATCH, TAU = 3, 3, 3, 9, 4, 3
RATE, MOMENTUM, DECAY, SHARE = 0.1, 0.9, 0.1, 0.3
LABELS = np.array([2, 0, 1, 0])  # the fourth row is padding, as is the tenth here
TRUE_LABELS = np.array([0, 0, 1, 2, 1, 0, 0, 2, 1, 2])
BETA = 0.6
SEED, PLACES = 39, [0, 5, 1, 4, 2, 3, 6, 8, 7, 9]  # for which the assertions on the example hold
# The unlabeled batches: in the paper's variant nothing of the last is kept, some rows come twice and one never.
ORDER = np.array([[0, 1, 2, 3], [4, 1, 5, 2], [0, 6, 1, 7]])
BASE = {"confidence": BETA, "unlabeled_steps": len(ORDER), "consistency_weight": 2.0}
VARIANTS = {
    "paper": {},
    "other options": {
        "measure": "entropy", "expert_view": "weak", "kl_order": "net_first", "counts": "distinct", "unlabeled_rate": 0.5,
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


class Net:
    """The network and its optimizer in float64."""

    def __init__(self, params, stats, momentum, rate):
        self.w, self.v, self.m, self.rate = dict(params), dict(stats), dict(momentum), rate

    def evaluated(self, x):
        normed = (x - self.v["mean"]) / np.sqrt(self.v["var"] + EPSILON)
        return lc.softmax(normed @ self.w["kernel"] + self.w["bias"])

    def trained(self, x):
        """(outputs, normalized inputs) in training mode; the statistics are tracked."""
        normed, self.v = normalized(x), tracked(self.v, x, SHARE)
        return lc.softmax(normed @ self.w["kernel"] + self.w["bias"]), normed

    def step(self, *parts, more=None):
        """One step along the gradients of (normalized inputs, residuals of the logits), and of `more`."""
        g = lc.combine(lambda *of_parts: sum(of_parts), *(lc.gradient(*part) for part in parts), *([more] if more else []))
        self.m = lc.combine(lambda m, g, w: MOMENTUM * m + g + DECAY * w, self.m, g, self.w)
        self.w = lc.combine(lambda w, m: w - self.rate * m, self.w, self.m)


class Problem:
    """A client and what it is sent, in float64, and what FedLabel makes of it here and there."""

    def __init__(self):
        rng = np.random.default_rng(SEED)
        self.pool = rng.integers(0, 256, (16, SIDE, SIDE, 1)).astype(np.uint8)
        order = rng.permutation(16)
        self.labeled_rows, self.rows = order[:4], order[4:14][PLACES]
        self.w = {"kernel": 0.6 * rng.standard_normal((9, CLASSES)), "bias": 0.3 * rng.standard_normal(CLASSES)}
        self.v = {"mean": 0.3 * rng.standard_normal(9), "var": rng.uniform(0.3, 0.9, 9)}
        self.momenta = [lc.combine(lambda x: 0.2 * rng.standard_normal(x.shape), self.w) for _ in range(2)]

    def view(self, name, rows):
        return VIEWS[name](self.pool[rows].astype(float)).reshape(len(rows), -1)

    def decide(self, options, global_, local):
        """What is decided on each of the UNLABELED images: (label, kept, local's, agreed, ratio, KL's target)."""
        x = self.view(options.expert_view, self.rows[:UNLABELED])
        s = np.stack([global_.evaluated(x), local.evaluated(x)])
        if options.measure == "variance":
            h = ((s - 1 / CLASSES) ** 2).sum(-1) / (CLASSES - 1)
        else:
            h = 1 / (1e-5 - (s * np.log(s)).sum(-1))
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
        onehot, loss = np.eye(CLASSES)[LABELS[:LABELED]], 0.0
        for _ in range(TAU):
            p, x = local.trained(self.view("labeled", self.labeled_rows[:LABELED]))
            loss += -np.log((p * onehot).sum(1)).sum()
            local.step((x, (p - onehot) / LABELED))

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
            divisors = (BATCH, BATCH) if options.normalize == "batch" else (len(kept), max(agreeing.sum(), 1))
            strong = self.view("strong" if options.augment == "strong" else options.expert_view, self.rows[kept])
            p, x = net.trained(strong)
            onehot = np.eye(CLASSES)[label[kept]]
            ce_sum += -np.log((p * onehot).sum(1)).sum()
            parts, more = [(x, (p - onehot) / divisors[0])], None
            if both:
                if options.augment == "strong":
                    p, x = net.trained(self.view(options.expert_view, self.rows[kept]))
                t = target[kept]
                kl = (t * np.log(t / p)).sum(1) if options.kl_order == "target_first" else (p * np.log(p / t)).sum(1)
                residual = p - t if options.kl_order == "target_first" else p * (np.log(p / t) - kl[:, None])
                weight = options.consistency_weight * ratio[kept] * agreeing / divisors[1]
                parts.append((x, weight[:, None] * residual))
                kl_sum += kl[agreeing].sum()
            if options.proximity:
                more = lc.combine(lambda w, a: 2 * options.proximity * (w - a) / w.size, net.w, self.w)
            net.step(*parts, more=more)

        drawn = ORDER.ravel()
        used = drawn[passing[drawn]]
        r = {"draws": TAU * LABELED + len(used), "distinct": LABELED + len(set(used)), "passing": max(len(used), 1)}[
            options.counts
        ]
        self.labels = lc.diagnostics([label[drawn]], [TRUE_LABELS[drawn]], [passing[drawn]])
        # Forward passes of a step on unlabeled data, and those of them that are trained.
        experts, nets = 2 if both else 1, 2 if both and options.augment == "strong" else 1
        size, models = 4 * (9 * CLASSES + CLASSES + 9 + 9), 2 if options.aggregation == "halves" else 1
        metrics = {
            **self.labels,
            "client/loss": (loss, TAU * LABELED),
            "client/unlabeled_loss": (ce_sum, len(used)),
            "comm/bytes_down": (size,),
            "comm/bytes_up": (models * size + 4,),
            "perf/client_images": (TAU * LABELED + ORDER.size,),
            "cost/forward_passes": (BATCH * (TAU + len(ORDER) * (experts + nets)),),
            "cost/backward_passes": (BATCH * (TAU + len(ORDER) * nets),),
        }
        if both:
            metrics["client/consistency_loss"] = (kl_sum, agreed[used].sum())
            metrics["client/local_expert_rate"] = (of_local[used].sum(), len(used))
            metrics["client/agreement_rate"] = (agreed[drawn].sum(), drawn.size)
        return local, net, r, metrics

    def got(self, options):
        client, update = client_of(options)
        labeled = lc.examples(self.pool, self.labeled_rows, LABELED, LABELS)
        shard = Shard(labeled, lc.examples(self.pool, self.rows, UNLABELED), jnp.asarray(TRUE_LABELS))
        states = [lc.with_leaves(client.optimizer.init(lc.float32(self.w)), lc.float32(m)) for m in self.momenta]
        shared = Broadcast(Weights(lc.float32(self.w), lc.float32(self.v)), jnp.float32(RATE), jnp.int32(0))
        return update(shared, (), FedLabelClientState(*states), shard, jax.random.key(0))


def in_order(key, mask, batch_size, steps):
    """ORDER for the unlabeled examples; labels as they are drawn."""
    if len(mask) == len(LABELS):
        return draws(key, mask, batch_size, steps)
    assert (batch_size, steps) == (BATCH, len(ORDER))
    return Schedule(jnp.asarray(ORDER, jnp.int32), jnp.int32(BATCH), jnp.int32(steps), BATCH)


@pytest.fixture(autouse=True)
def unlabeled_batches_in_order(monkeypatch):
    monkeypatch.setattr("fedjax_ssl.data.batching.draws", in_order)


def draw_nothing(view, *arguments):
    """The view of (images,) or (key, images)."""
    return view(arguments[-1].astype(jnp.float32))


def method_of(options):
    views = Views(**{name: functools.partial(draw_nothing, view) for name, view in VIEWS.items()})
    task = Task(ModelFns(None, apply), views, CLASSES, "running", SHARE, labels_at=("clients",))
    client = Training(torch_sgd(momentum=MOMENTUM, weight_decay=DECAY), lambda _: None, BATCH, steps=TAU)
    server = Server(optax.sgd(1.0), client, 0, StaticNorm("cohort", "examples", 4, 4))
    return client, fedlabel(task=task, client=client, server=server, options=options)


@functools.cache
def client_of(options):
    client, method = method_of(options)
    return client, lc.with_costs(method.client_update)


def assert_near(got, expected, what):
    for name, leaf in expected.items():
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(got[name], leaf, rtol=1e-4, atol=1e-4 * scale, err_msg=f"{what}: {name}")


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
            assert_near(got.params, lc.combine(lambda x, s=scale: s * x, params), "half, parameters")
            assert_near(got.stats, lc.combine(lambda x, s=scale: s * x, stats), "half, statistics")
    else:
        assert output.weight == r
        assert_near(output.update.params, lc.combine(np.add, deltas[0][0], deltas[1][0]), "parameters")
        assert_near(output.update.stats, lc.combine(lambda a, b: (a + b) / 2, deltas[0][1], deltas[1][1]), "statistics")
    for state, expected in zip(output.client_state, (local.m, net.m), strict=True):
        assert_near(lc.with_leaves(expected, state), expected, "momentum")
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
    aggregate = mean_of_stack(Aggregate(spoiled, jnp.array([1.0, 1.0, 0.0])))
    _, method = method_of(FedLabelOptions(aggregation="halves"))
    state = ServerState(lc.float32(sent), optax.sgd(1.0).init(lc.float32(sent.params)), ())
    nothing = lc.examples(Problem().pool, [0], 0, [0])
    new, _ = method.server_update(state, aggregate, ServerData(nothing, nothing, None, None, 0), jax.random.key(0))
    for got, want in zip(new.weights, jax.tree.map(expected, sent, of_l, of_u), strict=True):
        assert_near(got, want, "server")
