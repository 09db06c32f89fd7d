"""One whole SemiFL `client_update` against NumPy: fix set, mixtures, per-batch labels, local SGD, weight and every metric.

The client, its linear network and its views are those of `test_fl2_client`: the weak view is the image, the strong one its
mirror image, and batches come in order. What a step draws at random is fixed here: the mixing ratio, and the partners.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_ssl.methods.optimizers import torch_sgd
from fedjax_ssl.methods.server import Broadcast, Server
from fedjax_ssl.methods.task import Task, Weights

from fedjax_ssl import models
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import Shard
from fedjax_ssl.methods.semifl import SemiFLOptions, semifl
from fedjax_ssl.ssl import mixup
from tests.golden.test_fl2_client import (
    CLASSES,
    CONFIDENCE,
    DECAY,
    MOMENTUM,
    SIDE,
    TRUTH,
    Client,
    InOrder,
    gradient,
    norm,
    softmax,
)
from tests.golden.test_fl2_client import plain as normalized

RATIO = 0.3
PARTNERS = np.array([5, 4, 6, 4])  # of the four places of a batch; 4 and 6 are not confident, and 4 comes twice
EPOCHS, RATE = 2, 0.2


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
                passed, right = passed + sure.sum(), right + (now == TRUTH[at])[sure].sum()
                at, y = at[sure], now[sure]
                if not len(at):
                    continue
            else:
                y = label[at]
            onehot, probs = np.eye(CLASSES)[y], softmax(self.strong[at] @ w["kernel"] + w["bias"])
            g = gradient(self.strong[at], (probs - onehot) / len(at))
            loss, used = loss - np.log((probs * onehot).sum(1)).sum(), used + len(at)
            if options.mix == "mixup":
                partner = PARTNERS[: len(at)]
                x = RATIO * self.weak[at] + (1 - RATIO) * self.weak[partner]
                target = RATIO * onehot + (1 - RATIO) * np.eye(CLASSES)[label[partner]]
                probs = softmax(x @ w["kernel"] + w["bias"])
                mixed = gradient(x, (probs - target) / len(at))
                g = {name: g[name] + mixed[name] for name in g}
                mix_loss -= (target * np.log(probs)).sum()
            g = {name: g[name] + DECAY * w[name] for name in w}
            m = {name: MOMENTUM * m[name] + g[name] for name in w}
            w = {name: w[name] - RATE * (g[name] + MOMENTUM * m[name]) for name in w}

        size, total = 4 * sum(leaf.size for leaf in w.values()), 7.0
        if per_batch:
            total = 7 * EPOCHS
        else:
            passed, right = accepted.sum(), (accepted & (label == TRUTH[:7])).sum()
        metrics = {
            "client/loss": (loss, used),
            "client/mask_rate": (passed, total),
            "diagnostics/label_ratio": (passed, total),
            "diagnostics/pseudo_label_accuracy": (right, passed),
            "diagnostics/correct_ratio": (right, total),
            "diagnostics/wrong_ratio": (passed - right, total),
            "diagnostics/correct_wrong_ratio": (right, passed - right),
            "comm/bytes_down": (size,),
            "comm/bytes_up": (size,),
            "perf/client_images": (EPOCHS * len(order),),
            # The strong view, and either the mixture, or the weak view to label it; 7 images to label are two batches of 4.
            "cost/forward_passes": (2 * rows + (0 if per_batch else 8),),
            "cost/backward_passes": (rows if per_batch else 2 * rows,),
        } | ({"client/mix_loss": (mix_loss, used)} if options.mix == "mixup" else {})
        return {name: self.params[name] - w[name] for name in w}, m, metrics

    def labels(self, x, w, options):
        """Labels of weak views, and which of them are confident: never by a hair's breadth."""
        probs = softmax(x @ w["kernel"] + w["bias"])
        assert np.abs(probs.max(1) - options.confidence).min() > 1e-3
        return probs.argmax(1), probs.max(1) >= options.confidence

    def got(self, options: SemiFLOptions, batch_size: int):
        views = Views(
            plain=lambda images: normalized(images.astype(jnp.float32)),
            weak=lambda key, images: normalized(images.astype(jnp.float32)),
            strong=lambda key, images: normalized(images.astype(jnp.float32))[:, :, ::-1],
            labeled=lambda key, images: normalized(images.astype(jnp.float32)) * jnp.nan,
        )
        task = Task(models.build("linear", num_classes=CLASSES), views, CLASSES, "static", 4)
        sgd = torch_sgd(momentum=MOMENTUM, nesterov=True, weight_decay=DECAY)
        training = InOrder(sgd, lambda _: None, batch_size, epochs=EPOCHS)
        method = semifl(task=task, client=training, server=Server(None, None, 0, None), options=options)

        (name,) = jax.eval_shape(lambda key: task.init(key, (SIDE, SIDE, 1)), jax.random.key(0)).params
        params = {name: jax.tree.map(jnp.float32, self.params)}
        momentum = {name: jax.tree.map(jnp.float32, self.momentum)}
        kept = jax.tree.unflatten(jax.tree.structure(sgd.init(params)), jax.tree.leaves(momentum))
        unlabeled = Examples(jnp.asarray(self.pool), jnp.asarray(self.index), jnp.int32(7), None)
        shard = Shard(unlabeled._replace(count=jnp.int32(0)), unlabeled, jnp.asarray(TRUTH))
        shared = Broadcast(Weights(params, {}), jnp.float32(RATE))
        output = jax.jit(method.client_update)(shared, (), kept, shard, jax.random.key(0))
        momentum = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(output.client_state))
        return output.update.params[name], output.weight, momentum[name], output.metrics


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
BATCH = {"confidence": 0.987, "pseudo_labels": "batch", "mix": "none"}


@pytest.mark.parametrize(("options", "batch_size"), [(PAPER, 4), (BATCH, 2)], ids=["paper", "labels per batch"])
def test_a_client_update_is_what_the_equations_say(drawn, options, batch_size):
    client, options = SemiFLClient(), SemiFLOptions(**options)
    update, momentum, metrics = client.expected(options, batch_size)
    got_update, got_weight, got_momentum, got_metrics = client.got(options, batch_size)
    if options.mix == "mixup":
        assert (drawn["alpha"], drawn["low"]) == (0.75, 0)
    if options.pseudo_labels == "batch":
        assert client.decisions[1::4] == [([2], [0]), ([2, 3], [0, 0])]
        assert client.decisions[3] == ([], [])  # no step
    for leaf in ("kernel", "bias"):
        np.testing.assert_allclose(got_update[leaf], update[leaf], rtol=1e-4, atol=1e-5 * norm(update))
        np.testing.assert_allclose(got_momentum[leaf], momentum[leaf], rtol=1e-4, atol=1e-5 * norm(momentum))
    assert got_weight == 1
    assert set(got_metrics) == set(metrics)
    for name, value in metrics.items():
        np.testing.assert_allclose(got_metrics[name], value, rtol=1e-4, err_msg=name)
