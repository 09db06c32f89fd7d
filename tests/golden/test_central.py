"""Three steps of FixMatch and FreeMatch on pooled data against NumPy: losses, thresholds, SGD, schedule, averages, metrics.

The network is linear, so that each gradient is written out. Batches are given, and the views draw nothing: the labeled one is
the image, the weak one its left-right and the strong one its up-down mirror image, so that one in place of the other shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data import batching
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.experiment.arguments import server_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Aggregate, DataSpec, ServerData
from fedjax_ssl.methods import METHODS, options_class
from tests.golden import linear_clients as lc

SIDE, CLASSES, BATCH, MU, STEPS, ROUNDS, ROUND = 3, 3, 2, 3, 3, 4, 2
RATE, MOMENTUM, DECAY, EMA, LAMBDA = 0.03, 0.9, 0.1, 0.8, 0.7
TRUE_LABELS = np.arange(16) % CLASSES
OPTIMIZER = {"learning_rate": RATE, "schedule": "cosine_7_16", "weight_decay": DECAY, "decay": "kernels"}
VIEWS = Views(
    plain=lc.upright,
    weak=lambda key, images: lc.upright(images)[:, :, ::-1],
    strong=lambda key, images: lc.upright(images)[:, ::-1],
    labeled=lambda key, images: lc.upright(images),
)
SETTINGS = Settings.from_dict(
    {"rounds": ROUNDS, "server": {"training": {"optimizer": OPTIMIZER, "batch_size": BATCH, "epochs": 0, "steps": STEPS}}}
)


class Central:
    """Four labeled and nine unlabeled images of a pool, a linear network, and given batches."""

    def __init__(self):
        rng = np.random.default_rng(45)
        self.pool = rng.integers(0, 256, (16, SIDE, SIDE, 1)).astype(np.uint8)
        self.labeled, self.labels = np.array([3, 14, 5, 1]), np.array([2, 0, 1, 0])
        self.unlabeled = np.array([8, 2, 7, 0, 9, 3, 14, 12, 15])
        self.labeled_batches = np.array([[0, 1], [2, 3], [1, 3]])
        self.batches = np.array([[0, 4, 2, 7, 1, 3], [5, 8, 6, 0, 4, 2], [7, 1, 3, 5, 8, 6]])
        self.params = lc.random_layer(rng, 0.7, bias=0.3)
        self.average = {name: leaf + 0.1 * rng.standard_normal(leaf.shape) for name, leaf in self.params.items()}
        self.momentum = {name: 0.2 * rng.standard_normal(leaf.shape) for name, leaf in self.params.items()}
        self.status = [0.6, np.array([0.5, 0.3, 0.2]), np.array([0.7, 0.3, 0.0])]

    def expected(self, options):
        """(parameters, average, momentum, status, metrics as lists over steps), by the papers' equations."""
        w, average, m, status = dict(self.params), dict(self.average), dict(self.momentum), list(self.status)
        adaptive = hasattr(options, "fairness_weight")
        metrics = {"server/loss": [], "server/mask_rate": [], "server/threshold": []}
        correct = passed = 0
        images = lc.plain(self.pool.astype(float))
        order_shows = False
        for s in range(STEPS):
            x = images[self.labeled[self.labeled_batches[s]]].reshape(BATCH, -1)
            y = self.labels[self.labeled_batches[s]]
            rows = self.unlabeled[self.batches[s]]
            weak, strong = images[rows][:, :, ::-1].reshape(MU * BATCH, -1), images[rows][:, ::-1].reshape(MU * BATCH, -1)
            supervised, q, outputs = (lc.outputs(w, view) for view in (x, weak, strong))
            confidence, label = q.max(1), q.argmax(1)
            threshold = 0.55
            if adaptive:  # SAT: the status first, then the mask
                stale = confidence >= (status[1] / status[1].max() * status[0])[label]
                batch = (confidence.mean(), q.mean(0), np.bincount(label, minlength=CLASSES) / len(q))
                status = [LAMBDA * old + (1 - LAMBDA) * new for old, new in zip(status, batch, strict=True)]
                status[0] = min(status[0], options.largest_threshold)
                threshold = (status[1] / status[1].max() * status[0])[label]
                order_shows |= bool(np.any(stale != (confidence >= threshold)))
            accepted = confidence >= threshold
            assert np.abs(confidence - threshold).min() > 2e-3  # no decision hangs on float32
            assert 0 < accepted.sum() < len(q)
            loss = lc.cross_entropy(supervised, y).mean() + lc.cross_entropy(outputs, label)[accepted].sum() / len(q)
            residual = lc.residual(outputs, label) * accepted[:, None] / len(q)
            if adaptive:
                fairness, of_fairness = saf(outputs, accepted, status)
                loss, residual = loss + options.fairness_weight * fairness, residual + options.fairness_weight * of_fairness
            g = lc.combine(np.add, lc.gradient(x, lc.residual(supervised, y) / BATCH), lc.gradient(strong, residual))
            g["kernel"] = g["kernel"] + DECAY * w["kernel"]  # not on biases
            done = (ROUND * STEPS + s) / (STEPS * ROUNDS)
            w, m = lc.sgd(w, g, m, RATE * np.cos(7 / 16 * np.pi * done), nesterov=True)  # Sohn et al. 2020, Section 2.4
            average = lc.combine(lambda a, w: EMA * a + (1 - EMA) * w, average, w)
            metrics["server/loss"].append(loss)
            metrics["server/mask_rate"].append(accepted.mean())
            metrics["server/threshold"].append(status[0])
            correct, passed = correct + (label == TRUE_LABELS[rows])[accepted].sum(), passed + accepted.sum()
        assert order_shows == adaptive
        if not adaptive:
            del metrics["server/threshold"]
        metrics |= {name: [total / weight] for name, (total, weight) in lc.ratios(correct, passed, self.batches.size).items()}
        return w, average, m, status, metrics

    def got(self, name, options, monkeypatch):
        """What the method makes of the same state: (state, metrics, logits)."""
        given = iter([self.labeled_batches, self.batches])
        monkeypatch.setattr(batching, "stream", lambda *_: Batch(b := jnp.asarray(next(given)), jnp.ones(b.shape, bool)))
        method = METHODS[name](
            task=lc.linear_task(labels_at=("server",), views=VIEWS),
            client=None,
            server=server_of(SETTINGS),
            options=options,
        )
        state, _ = method.init(jax.random.key(0), DataSpec((SIDE, SIDE, 1), CLASSES, 1, 1))
        state = state._replace(
            weights=state.weights._replace(params=lc.named(self.params)),
            average=lc.named(self.average),
            optimizer=lc.with_leaves(state.optimizer, lc.named(self.momentum)),
        )
        if state.status != ():
            state = state._replace(status=type(state.status)(*(jnp.asarray(part, jnp.float32) for part in self.status)))
        labeled, unlabeled = lc.examples(self.pool, self.labeled, 4, self.labels), lc.examples(self.pool, self.unlabeled, 9)
        data = ServerData(labeled, unlabeled, jnp.asarray(TRUE_LABELS[self.unlabeled]), unlabeled, jnp.int32(ROUND))
        new, metrics = jax.jit(method.server_update)(state, Aggregate((), 0.0), data, jax.random.key(1))
        logits = method.predict["global"](new, jnp.asarray(self.pool), jnp.ones(16, bool))
        return new, metrics, logits


def saf(outputs, accepted, status):
    """The fairness loss and its gradient for the logits of all strong views, through the mean output alone."""
    _, p, h = status
    q = outputs[accepted]

    def inverse(x):
        return np.divide(1, x, out=np.zeros(CLASSES), where=x > 0)

    a = p * inverse(h)
    a = a / a.sum()
    r = inverse(np.bincount(q.argmax(1), minlength=CLASSES) / len(q))
    u = q.mean(0) * r
    b = u / u.sum()
    of_u = (a / (b + 1e-12) - (a * b / (b + 1e-12)).sum()) / u.sum()
    of_q = of_u * r / len(q)
    gradient = np.zeros_like(outputs)
    gradient[accepted] = q * (of_q - (q * of_q).sum(1, keepdims=True))
    return np.sum(a * np.log(b + 1e-12)), gradient


FREEMATCH = {"fairness_weight": 0.4, "threshold_decay": LAMBDA}
CASES = {
    "fixmatch": ("fixmatch_central", {"confidence": 0.55}),
    "freematch": ("freematch_central", FREEMATCH),
    "freematch, cut off": ("freematch_central", FREEMATCH | {"largest_threshold": 0.61}),
}


@pytest.mark.parametrize(("name", "own"), CASES.values(), ids=CASES)
def test_a_round_is_what_the_equations_say(monkeypatch, name, own):
    central, options = Central(), options_class(METHODS[name])(mu=MU, ema_decay=EMA, **own)
    w, average, momentum, status, metrics = central.expected(options)
    state, got_metrics, logits = central.got(name, options, monkeypatch)
    kept = lc.with_leaves(state.average, state.optimizer)
    for got, expected in ((state.weights.params, w), (state.average, average), (kept, momentum)):
        lc.assert_same(got["Dense_0"], expected)
    for got, expected in zip(state.status, status, strict=False):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert bool(state.status) == (name == "freematch_central")
    assert set(got_metrics) == set(metrics)
    for key, values in metrics.items():
        got = got_metrics[key]
        np.testing.assert_allclose(got.total / got.weight, np.mean(values), rtol=1e-5, err_msg=key)
    # What is evaluated is the average.
    x = lc.plain(central.pool.astype(float)).reshape(16, -1)
    np.testing.assert_allclose(logits, x @ average["kernel"] + average["bias"], rtol=1e-3, atol=1e-4)
