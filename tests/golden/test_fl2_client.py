"""One whole (FL)^2 `client_update` against NumPy: pseudo-labels, CAT, SACR, local SGD, LSAA's weight and every metric.

The network is linear, so that each gradient is written out. Batches come in order instead of shuffled, and the views draw
nothing: the weak one is the image, the strong one its mirror image, so that one in place of the other shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_ssl.methods.local import Training
from fedjax_ssl.methods.optimizers import torch_sgd
from fedjax_ssl.methods.server import Broadcast, Server
from fedjax_ssl.methods.task import Task, Weights

from fedjax_ssl import models
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.batching import Schedule
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import Shard
from fedjax_ssl.methods.fl2 import FL2Options, fl2

SIDE, CLASSES, BATCH, EPOCHS, RATE, MOMENTUM, DECAY, ETA = 3, 3, 4, 1, 0.05, 0.9, 0.1, 0.01

# Softmax outputs of the client's seven images. tau_k = .934, and class 0 leads pbar: tau(c) = (.934, .185, .170). So image 1 is
# confident (CONFIDENCE) without being accepted, images 4 and 6 are accepted without being confident.
OUTPUTS = np.array(
    [
        [0.995, 0.003, 0.002],
        [0.925, 0.030, 0.045],
        [0.990, 0.004, 0.006],
        [0.985, 0.010, 0.005],
        [0.060, 0.860, 0.080],
        [0.998, 0.001, 0.001],
        [0.120, 0.095, 0.785],
    ]
)
CONFIDENCE = 0.91
TRUTH = np.array([0, 0, 1, 0, 1, 0, 0, 2])  # the eighth row is padding


class InOrder(Training):
    """Local training whose batches come in order; the last one is filled up with the first example, which is accepted."""

    def schedule(self, key, mask):
        del key
        count = jnp.sum(mask, dtype=jnp.int32)
        order = jnp.argsort(~mask, stable=True).astype(jnp.int32)
        order = jnp.where(jnp.arange(len(order)) < count, order, order[0])
        return Schedule(jnp.tile(order, (self.epochs, 1)), count, self.epochs * -(-count // self.batch_size))


def plain(images):
    return images / 100.0 - 1.0


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradient(x, residual):
    return {"kernel": x.T @ residual, "bias": residual.sum(0)}


def norm(tree):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in tree.values()))


class Client:
    """Seven images of a pool of twelve, and a kernel that gives them OUTPUTS; float64."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.pool = rng.integers(0, 256, (12, SIDE, SIDE, 1)).astype(np.uint8)
        self.index = np.array([3, 11, 5, 1, 8, 2, 7, 0])
        images = plain(self.pool[self.index[:7]].astype(float))
        self.weak, self.strong = images.reshape(7, -1), images[:, :, ::-1].reshape(7, -1)
        bias = 0.3 * rng.standard_normal(CLASSES)
        self.params = {"kernel": np.linalg.pinv(self.weak) @ (np.log(OUTPUTS) - bias), "bias": bias}
        self.momentum = {name: 0.3 * rng.standard_normal(leaf.shape) for name, leaf in self.params.items()}

    def expected(self, options: FL2Options, clip: float):
        """(update, weight, momentum, metrics as value or (total, weight)) of one client, as the paper's equations say."""
        w, m = dict(self.params), dict(self.momentum)
        probs = softmax(self.weak @ w["kernel"] + w["bias"])
        label, confidence = probs.argmax(1), probs.max(1)
        tau, mean = confidence.mean(), probs.mean(0)  # Eqs. 7, 8
        threshold = mean / mean.max() * tau  # Eq. 9
        accepted, confident = confidence > threshold[label], confidence > options.confidence
        # No decision hangs on float32, nor on > or >=.
        assert min(np.abs(confidence - threshold[label]).min(), np.abs(confidence - options.confidence).min()) > 1e-3
        assert accepted.astype(int).tolist() == [1, 0, 1, 1, 1, 1, 1]
        assert confident.astype(int).tolist() == [1, 1, 1, 1, 0, 1, 0]
        consistent = confident & accepted if options.consistency_on == "confident_accepted" else confident
        order = np.flatnonzero(accepted) if options.batches == "accepted" else np.arange(7)

        loss = consistency_loss = used = 0.0
        batches = np.split(order, range(BATCH, len(order), BATCH))
        steps = len(batches)
        for at in batches:
            x, y, a, f = self.strong[at], label[at], accepted[at], consistent[at]
            clean, onehot = softmax(x @ w["kernel"] + w["bias"]), np.eye(CLASSES)[y]
            grad_a = gradient(x, (clean - onehot) * (a / a.sum())[:, None])  # Eq. 10
            grad_p = gradient(x, (clean - onehot) * (f / f.sum())[:, None])  # Eq. 11
            t = {"kernel": np.abs(w["kernel"]) + ETA, "bias": np.ones(CLASSES)}
            if options.perturbation == "sam":  # Eq. 12
                t = {name: np.ones_like(leaf) for name, leaf in w.items()}
            scale = options.rho / norm({name: t[name] * grad_p[name] for name in w})
            star = {name: w[name] + scale * t[name] ** 2 * grad_p[name] for name in w}
            moved = softmax(x @ star["kernel"] + star["bias"])
            grad_cs = gradient(x, (moved - clean) * (f / a.sum())[:, None])  # Eq. 13
            loss += -np.log((clean * onehot).sum(1))[a].sum()
            consistency_loss += (clean * np.log(clean / moved)).sum(1)[f].sum()
            used += a.sum()
            g = {name: grad_a[name] + options.consistency_weight * grad_cs[name] for name in w}  # Eq. 14
            if clip:
                assert norm(g) > clip  # clipping acts
                g = {name: g[name] * clip / norm(g) for name in w}
            g = {name: g[name] + DECAY * w[name] for name in w}
            m = {name: MOMENTUM * m[name] + g[name] for name in w}
            w = {name: w[name] - RATE * (g[name] + MOMENTUM * m[name]) for name in w}

        size = 4 * sum(leaf.size for leaf in w.values())
        by_status = options.aggregation == "lsaa"
        right = int((accepted & (label == TRUTH[:7])).sum())
        metrics = {
            "client/loss": (loss, used),
            "client/consistency_loss": (consistency_loss, used),
            "client/mask_rate": (6, 7),
            "client/threshold": (tau, 1),
            "diagnostics/label_ratio": (6, 7),
            "diagnostics/pseudo_label_accuracy": (right, 6),
            "diagnostics/correct_ratio": (right, 7),
            "diagnostics/wrong_ratio": (6 - right, 7),
            "diagnostics/correct_wrong_ratio": (right, 6 - right),
            "comm/bytes_down": (size,),
            "comm/bytes_up": (size + 4 * by_status,),  # tau_k travels too (Algorithm 1, line 24)
            "perf/client_images": (len(order),),
            # Two batches of 4 to label 7 images; a step has two forward and three backward passes.
            "cost/forward_passes": (8 + steps * 2 * BATCH,),
            "cost/backward_passes": (steps * 3 * BATCH,),
        }
        update = {name: self.params[name] - w[name] for name in w}
        return update, 1 - tau if by_status else 1.0, m, metrics  # Eq. 15

    def got(self, options: FL2Options, clip: float):
        views = Views(
            plain=lambda images: plain(images.astype(jnp.float32)),
            weak=lambda key, images: plain(images.astype(jnp.float32)),
            strong=lambda key, images: plain(images.astype(jnp.float32))[:, :, ::-1],
            labeled=lambda key, images: plain(images.astype(jnp.float32)),
        )
        task = Task(models.build("linear", num_classes=CLASSES), views, CLASSES, "static", 4)
        sgd = torch_sgd(momentum=MOMENTUM, nesterov=True, weight_decay=DECAY, clip_norm=clip)
        training = InOrder(sgd, lambda _: None, BATCH, epochs=EPOCHS)
        method = fl2(task=task, client=training, server=Server(None, None, 0, None), options=options)

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


PAPER = {"confidence": CONFIDENCE}
RELEASED = {"confidence": CONFIDENCE, "strict": False, "batches": "accepted", "consistency_on": "confident_accepted"}
OTHER = {"perturbation": "sam", "rho": 0.5, "consistency_weight": 3.0, "aggregation": "uniform"}


@pytest.mark.parametrize(
    ("options", "clip"),
    [(PAPER, 0.0), (PAPER | {"rho": 1.0}, 0.0), (RELEASED, 0.1), (PAPER | OTHER, 0.0)],
    ids=["paper", "paper on cifar100", "released", "no option at its default"],
)
def test_a_client_update_is_what_the_equations_say(options, clip):
    client, options = Client(), FL2Options(**options)
    update, weight, momentum, metrics = client.expected(options, clip)
    got_update, got_weight, got_momentum, got_metrics = client.got(options, clip)
    for leaf in ("kernel", "bias"):
        np.testing.assert_allclose(got_update[leaf], update[leaf], rtol=1e-4, atol=1e-5 * norm(update))
        np.testing.assert_allclose(got_momentum[leaf], momentum[leaf], rtol=1e-4, atol=1e-5 * norm(momentum))
    np.testing.assert_allclose(got_weight, weight, rtol=1e-5)
    assert set(got_metrics) == set(metrics)
    for name, value in metrics.items():
        np.testing.assert_allclose(got_metrics[name], value, rtol=1e-3 if "consistency" in name else 1e-5, err_msg=name)
