"""A client with labeled and unlabeled images and a linear softmax network, trained by hand in NumPy, in float64.

Batches come in order instead of shuffled, and the views draw nothing, so that one view in place of another shows: the weak one
is the image, the strong one its mirror image from left to right, the labeled one from top to bottom.
"""

import jax
import jax.numpy as jnp
import numpy as np
from fedjax_ssl.methods.local import Training
from fedjax_ssl.methods.optimizers import torch_sgd
from fedjax_ssl.methods.server import Broadcast, Server
from fedjax_ssl.methods.task import Task, Weights

from fedjax_ssl import models
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.batching import PairedSchedule, Schedule
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import Shard

SIDE, CLASSES, LABELED, UNLABELED = 3, 3, 5, 7
BATCH, UNLABELED_BATCH, EPOCHS, RATE, MOMENTUM, DECAY = 3, 4, 2, 0.05, 0.9, 0.1
STEPS = [  # what each step sees: two epochs over five labels, the second batch of each partial
    (np.arange(0, 3), np.arange(0, 4)),
    (np.arange(3, 5), np.arange(4, 7)),
    (np.arange(0, 3), np.arange(0, 4)),
    (np.arange(3, 5), np.arange(4, 7)),
]
# Softmax outputs of the unlabeled images at the broadcast model.
OUTPUTS = np.array(
    [
        [0.96, 0.03, 0.01],
        [0.60, 0.25, 0.15],
        [0.05, 0.91, 0.04],
        [0.02, 0.01, 0.97],
        [0.30, 0.62, 0.08],
        [0.10, 0.05, 0.85],
        [0.40, 0.25, 0.35],
    ]
)
LABELS = np.array([0, 2, 1, 1, 0])
TRUTH = np.array([0, 1, 1, 2, 1, 0, 2])


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def plain(images):
    return images / 100.0 - 1.0


def in_order(mask, batch_size: int, rows: int) -> Schedule:
    """The examples in `mask` in order, epoch after epoch."""
    order = jnp.argsort(~mask, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -len(order) % batch_size))
    count = jnp.sum(mask, dtype=jnp.int32)
    return Schedule(jnp.tile(order, (rows, 1)), count, rows * -(-count // batch_size))


class InOrder(Training):
    """Local training whose batches come in order."""

    def schedule(self, key, mask):
        del key
        return in_order(mask, self.batch_size, self.epochs)

    def paired_schedule(self, key, labeled, unlabeled, unlabeled_batch_size):
        del key
        first = in_order(labeled, self.batch_size, self.epochs)
        return PairedSchedule(first, in_order(unlabeled, unlabeled_batch_size, 10), unlabeled_batch_size, first.steps)


class Client:
    """Five labeled and seven unlabeled images of a pool, their tables padded, and a kernel that gives the latter OUTPUTS."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.pool = rng.integers(0, 256, (16, SIDE, SIDE, 1)).astype(np.uint8)
        self.labeled_index, self.index = np.array([9, 4, 13, 6, 10, 14, 15]), np.array([3, 11, 5, 1, 8, 2, 7, 0])
        images = plain(self.pool[self.index[:UNLABELED]].astype(float))
        self.weak, self.strong = images.reshape(UNLABELED, -1), images[:, :, ::-1].reshape(UNLABELED, -1)
        self.labeled = plain(self.pool[self.labeled_index[:LABELED]].astype(float))[:, ::-1].reshape(LABELED, -1)
        bias = 0.3 * rng.standard_normal(CLASSES)
        self.params = {"kernel": np.linalg.pinv(self.weak) @ (np.log(OUTPUTS) - bias), "bias": bias}
        self.momentum = {name: 0.3 * rng.standard_normal(leaf.shape) for name, leaf in self.params.items()}

    def trained(self, gradients, prox_mu: float = 0.0):
        """(update, momentum) after the STEPS; gradients: (w, labeled rows, unlabeled rows) -> [(images, residual), ...]."""
        w, m = dict(self.params), dict(self.momentum)
        for labeled, unlabeled in STEPS:
            parts = gradients(w, labeled, unlabeled)
            g = {"kernel": sum(x.T @ r for x, r in parts), "bias": sum(r.sum(0) for _, r in parts)}
            # d/dw of mu/2 ||w - w_t||^2, towards the broadcast model and not towards the last step's.
            g = {name: g[name] + prox_mu * (w[name] - self.params[name]) + DECAY * w[name] for name in w}
            m = {name: MOMENTUM * m[name] + g[name] for name in w}
            w = {name: w[name] - RATE * (g[name] + MOMENTUM * m[name]) for name in w}
        return {name: self.params[name] - w[name] for name in w}, m

    def got(self, factory, options=None, *, prox_mu=0.0, labels_at=("clients",), round=0, rounds=1):
        """(update, weight, momentum, metrics) of the method's client."""
        views = Views(
            plain=lambda images: plain(images.astype(jnp.float32)),
            weak=lambda key, images: plain(images.astype(jnp.float32)),
            strong=lambda key, images: plain(images.astype(jnp.float32))[:, :, ::-1],
            labeled=lambda key, images: plain(images.astype(jnp.float32))[:, ::-1],
        )
        task = Task(models.build("linear", num_classes=CLASSES), views, CLASSES, "static", 4, labels_at=labels_at)
        sgd = torch_sgd(momentum=MOMENTUM, nesterov=True, weight_decay=DECAY)
        training = InOrder(sgd, lambda _: None, BATCH, epochs=EPOCHS, prox_mu=prox_mu, rounds=rounds)
        method = factory(
            task=task, client=training, server=Server(None, None, 0, None), **({} if options is None else {"options": options})
        )

        (name,) = jax.eval_shape(lambda key: task.init(key, (SIDE, SIDE, 1)), jax.random.key(0)).params
        params = {name: jax.tree.map(jnp.float32, self.params)}
        momentum = {name: jax.tree.map(jnp.float32, self.momentum)}
        kept = jax.tree.unflatten(jax.tree.structure(sgd.init(params)), jax.tree.leaves(momentum))
        labels = jnp.asarray(np.append(LABELS, [2, 2]), jnp.int32)  # two rows of padding
        labeled = Examples(jnp.asarray(self.pool), jnp.asarray(self.labeled_index), jnp.int32(LABELED), labels)
        unlabeled = Examples(jnp.asarray(self.pool), jnp.asarray(self.index), jnp.int32(UNLABELED), None)
        shard = Shard(labeled, unlabeled, jnp.asarray(np.append(TRUTH, 0), jnp.int32))
        shared = Broadcast(Weights(params, {}), jnp.float32(RATE), jnp.int32(round))
        output = jax.jit(method.client_update)(shared, (), kept, shard, jax.random.key(0))
        momentum = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(output.client_state))
        return output.update.params[name], output.weight, momentum[name], output.metrics


def assert_same(got, expected):
    """Updates or momenta, relative to their norm."""
    scale = np.sqrt(sum(np.sum(leaf**2) for leaf in expected.values()))
    for name, leaf in expected.items():
        np.testing.assert_allclose(got[name], leaf, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def assert_metrics(got, expected):
    """Metrics as (total, weight) or (total,)."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def traffic(images: int, rows: int):
    """What every client of this network reports besides; rows: that every step takes forward and back."""
    size = 4 * (SIDE * SIDE * CLASSES + CLASSES)
    sent = {"comm/bytes_down": (size,), "comm/bytes_up": (size,), "perf/client_images": (images,)}
    passes = (len(STEPS) * rows,)
    return sent | {"cost/forward_passes": passes, "cost/backward_passes": passes}


def diagnostics(label, truth, accepted):
    """The pseudo-label diagnostics of all examples that steps drew, as lists over the draws."""
    label, truth, accepted = np.concatenate(label), np.concatenate(truth), np.concatenate(accepted)
    used, right = accepted.sum(), (accepted & (label == truth)).sum()
    return {
        "client/mask_rate": (used, len(label)),
        "diagnostics/label_ratio": (used, len(label)),
        "diagnostics/pseudo_label_accuracy": (right, used),
        "diagnostics/correct_ratio": (right, len(label)),
        "diagnostics/wrong_ratio": (used - right, len(label)),
        "diagnostics/correct_wrong_ratio": (right, used - right),
    }


def assert_trained(got, expected, seen, loss, unlabeled_loss, labels_at):
    """A client that trained by all STEPS on unlabeled examples and, with labels at the clients, on labeled ones beside them.

    got: of `Client.got`; expected: of `Client.trained`; seen: (label, truth, accepted) of each step; the losses of all examples
    that were averaged over, in the order of the steps.
    """
    paired = labels_at == "clients"
    update, weight, momentum, metrics = got
    for leaves, wanted in zip((update, momentum), expected, strict=True):
        assert_same(leaves, wanted)
    assert weight == (LABELED + UNLABELED if paired else 1)
    of_labeled, of_unlabeled = (sum(loss), len(loss)), (sum(unlabeled_loss), len(unlabeled_loss))
    losses = {"client/loss": of_labeled, "client/unlabeled_loss": of_unlabeled} if paired else {"client/loss": of_unlabeled}
    images = sum((len(a) if paired else 0) + len(b) for a, b in STEPS)
    rows = 2 * UNLABELED_BATCH + (BATCH if paired else 0)
    assert_metrics(metrics, diagnostics(*zip(*seen, strict=True)) | losses | traffic(images, rows))
