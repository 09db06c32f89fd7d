"""One whole SemiFL `client_update` against NumPy: fix set, mixtures, per-batch labels, local SGD, weight and every metric.

The client is that of `test_fl2_client`. What a step draws at random is fixed here: the mixing ratio, and the partners.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.methods.semifl import SemiFLOptions, semifl
from fedjax_ssl.ssl import mixup
from tests.golden import linear_clients as lc
from tests.golden.test_fl2_client import CONFIDENCE, TRUE_LABELS, Client

RATIO = 0.3
PARTNERS = np.array([5, 4, 6, 4])  # of the four places of a batch; 4 and 6 are not confident, and 4 comes twice
EPOCHS, RATE = 2, 0.2
WITHOUT_LABELED = lc.VIEWS._replace(labeled=lambda key, images: jnp.nan * images)


class SemiFLClient(Client):
    """The client of seven images, and what SemiFL makes of it in float64."""

    def expected(self, options: SemiFLOptions, batch_size: int):
        """(update, weight, momentum, metrics as value or (total, weight))."""
        w, m = dict(self.params), dict(self.momentum)
        label, accepted = self.labels(self.weak, w, options)
        per_batch = options.pseudo_labels == "batch"
        order = np.arange(7) if per_batch else np.flatnonzero(accepted)
        loss = mix_loss = used = passed = right = 0.0
        self.decisions = []
        batches = EPOCHS * np.split(order, range(batch_size, len(order), batch_size))
        rows = len(batches) * batch_size
        for at in batches:
            if per_batch:
                now, sure = self.labels(self.weak[at], w, options)
                self.decisions.append((at[sure].tolist(), now[sure].tolist()))
                passed, right = passed + sure.sum(), right + (now == TRUE_LABELS[at])[sure].sum()
                at, y = at[sure], now[sure]
                if not len(at):
                    continue
            else:
                y = label[at]
            probs = lc.outputs(w, self.strong[at])
            g = lc.gradient(self.strong[at], lc.residual(probs, y) / len(at))
            loss, used = loss + lc.cross_entropy(probs, y).sum(), used + len(at)
            if options.mix == "mixup":
                partner = PARTNERS[: len(at)]
                x = RATIO * self.weak[at] + (1 - RATIO) * self.weak[partner]
                target = RATIO * np.eye(lc.CLASSES)[y] + (1 - RATIO) * np.eye(lc.CLASSES)[label[partner]]
                probs = lc.outputs(w, x)
                mixed = lc.gradient(x, (probs - target) / len(at))
                g = {name: g[name] + mixed[name] for name in g}
                mix_loss -= (target * np.log(probs)).sum()
            w, m = lc.sgd(w, g, m, RATE, decay=lc.DECAY, nesterov=True)

        total = 7 * EPOCHS if per_batch else 7
        if not per_batch:
            passed, right = accepted.sum(), (accepted & (label == TRUE_LABELS)).sum()
        # The strong view, and either the mixture, or the weak view to label it; 7 images to label are two batches of 4.
        forward, backward = (2 * rows, rows) if per_batch else (2 * rows + 8, 2 * rows)
        metrics = {
            "client/loss": (loss, used),
            "client/mask_rate": (passed, total),
            **lc.ratios(right, passed, total),
            **lc.costs(lc.BYTES, lc.BYTES, EPOCHS * len(order), forward, backward),
        } | ({"client/mix_loss": (mix_loss, used)} if options.mix == "mixup" else {})
        return {name: self.params[name] - w[name] for name in w}, m, metrics

    def labels(self, x, w, options):
        """Labels of weak views, and which of them are confident: never by a hair's breadth."""
        probs = lc.outputs(w, x)
        assert np.abs(probs.max(1) - options.confidence).min() > 1e-3
        return probs.argmax(1), probs.max(1) >= options.confidence


@pytest.fixture
def drawn(monkeypatch):
    """What a step draws is fixed; says with which arguments it was drawn."""
    seen = {}

    def ratio(key, alpha):
        seen["alpha"] = alpha
        return jnp.float32(RATIO)

    def randint(key, shape, low, high):
        seen["low"], seen["high"] = low, high
        return jnp.where(high == 7, PARTNERS[: shape[0]], 0)

    monkeypatch.setattr(mixup, "ratio", ratio)
    monkeypatch.setattr(jax.random, "randint", randint)
    return seen


PAPER = {"confidence": CONFIDENCE}
# Image 3 is not confident for the global model (.985), but is for the local one in epoch 2. The strong views' are others.
BATCH = {"confidence": 0.988, "pseudo_labels": "batch", "mix": "none"}


@pytest.mark.parametrize(("options", "batch_size"), [(PAPER, 4), (BATCH, 2)], ids=["paper", "labels per batch"])
def test_a_client_update_is_what_the_equations_say(drawn, options, batch_size):
    client, options = SemiFLClient(), SemiFLOptions(**options)
    update, momentum, metrics = client.expected(options, batch_size)
    got_update, got_weight, got_momentum, got_metrics = client.got(
        semifl, options, labels_at=("server",), views=WITHOUT_LABELED, rate=RATE, batch_size=batch_size, epochs=EPOCHS
    )
    if options.mix == "mixup":
        assert (drawn["alpha"], drawn["low"]) == (0.75, 0)
    if options.pseudo_labels == "batch":
        assert client.decisions[1::4] == [([2], [0]), ([2, 3], [0, 0])]
        assert client.decisions[3] == ([], [])  # no step
    lc.assert_same(got_update, update)
    lc.assert_same(got_momentum, momentum)
    assert got_weight == 1
    lc.assert_metrics(got_metrics, metrics)


@pytest.mark.parametrize("alpha", [0.75, 2.0])
def test_the_mixing_ratio_is_beta_and_not_folded(alpha):
    ratios = np.asarray(jax.vmap(lambda key: mixup.ratio(key, alpha))(jax.random.split(jax.random.key(0), 4000)))
    assert 0 <= ratios.min() < 0.1 < 0.9 < ratios.max() <= 1
    np.testing.assert_allclose(ratios.mean(), 0.5, atol=0.02)
    np.testing.assert_allclose(ratios.var(), 1 / (4 * (2 * alpha + 1)), rtol=0.06)
