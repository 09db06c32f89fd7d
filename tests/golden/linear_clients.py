"""A client with labeled and unlabeled images and a linear softmax network, trained by hand in NumPy, in float64.

Batches come in order instead of shuffled, and the views draw nothing, so that one view in place of another shows: the weak one
is the image, the strong one its mirror image from left to right, the labeled one from top to bottom.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import models
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.batching import PairedSchedule, Schedule
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Broadcast, Server, Task, Training, Weights
from fedjax_ssl.local.forward_passes import forward_batches_of
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import ClientData
from fedjax_ssl.metrics import Mean
from fedjax_ssl.simulation.costs import with_passes
from fedjax_ssl.simulation.round import unrecorded

SIDE, CLASSES, LABELED, UNLABELED = 3, 3, 5, 7
BATCH, UNLABELED_BATCH, EPOCHS, RATE, MOMENTUM, DECAY = 3, 4, 2, 0.05, 0.9, 0.1
# What each step sees: two epochs over five labels, the second batch of each partial.
STEPS = 2 * [(np.arange(0, 3), np.arange(0, 4)), (np.arange(3, 5), np.arange(4, 7))]
BYTES = 4 * (SIDE * SIDE * CLASSES + CLASSES)  # of a linear network's parameters
# Softmax outputs of the unlabeled images at the broadcast model.
OUTPUTS = np.reshape([96, 3, 1, 60, 25, 15, 5, 91, 4, 2, 1, 97, 30, 62, 8, 10, 5, 85, 40, 25, 35], (7, 3)) / 100
LABELS = np.array([0, 2, 1, 1, 0])
TRUE_LABELS = np.array([0, 1, 1, 2, 1, 0, 2])


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def plain(images):
    return images / 100.0 - 1.0


def gradient(x, residual):
    """Of a linear layer, for the residual of its outputs."""
    return {"kernel": x.T @ residual, "bias": residual.sum(0)}


def outputs(w, x):
    """Of a linear softmax network."""
    return softmax(x @ w["kernel"] + w["bias"])


def cross_entropy(p, y):
    """Of each output, by its label."""
    return -np.log(p[np.arange(len(y)), y])


def residual(p, y):
    """The gradient of `cross_entropy` in the logits."""
    return p - np.eye(CLASSES)[y]


def sgd(w, g, m, rate=RATE, *, decay=0.0, nesterov=False):
    """(w, m) after a step of PyTorch's SGD: g <- g + decay w, m <- mu m + g, w <- w - rate (g + mu m), or - rate m."""
    g = jax.tree.map(lambda g, w: g + decay * w, g, w)
    m = jax.tree.map(lambda m, g: MOMENTUM * m + g, m, g)
    return jax.tree.map(lambda w, g, m: w - rate * (g + MOMENTUM * m if nesterov else m), w, g, m), m


def lars_gradient(w, g, decay):
    """What LARS, in SimCLR's form, has in a gradient's place: kernels decay and are scaled by .001 ||w|| / ||g||."""
    if "kernel" not in g:
        return g
    kernel, length = g["kernel"] + decay * w["kernel"], np.linalg.norm(w["kernel"])
    return g | {"kernel": kernel * (0.001 * length / np.linalg.norm(kernel) if length else 1)}


class Adam:
    """Kingma and Ba 2015, Algorithm 1, with PyTorch's constants and before the learning rate."""

    def __init__(self, m=0.0, v=0.0, t=0):
        self.m, self.v, self.t = m, v, t

    def __call__(self, g):
        self.t, self.m, self.v = self.t + 1, 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g**2
        return self.m / (1 - 0.9**self.t) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)

    def step(self, w, g, rate):
        return w - rate * self(g)


def random_layer(rng, scale=1.0, bias=None):
    """Parameters of the linear network; the bias is of the kernel's scale unless given."""
    kernel = scale * rng.standard_normal((SIDE * SIDE, CLASSES))
    return {"kernel": kernel, "bias": (scale if bias is None else bias) * rng.standard_normal(CLASSES)}


def combine(function, *trees):
    """`function` of the leaves of flat trees, name by name."""
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def norm(tree):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in tree.values()))


def flat(tree):
    """All leaves as one vector, by name."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def float32(tree):
    return jax.tree.map(jnp.float32, tree)


def named(layer):
    """The linear network's parameters."""
    return {"Dense_0": float32(layer)}


def with_leaves(tree, leaves):
    """A tree, such as an optimizer's state, with other leaves: those of another tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(leaves))


def upright(images):
    return plain(images.astype(jnp.float32))


VIEWS = Views(
    plain=upright,
    weak=lambda key, images: upright(images),
    strong=lambda key, images: upright(images)[:, :, ::-1],
    labeled=lambda key, images: upright(images)[:, ::-1],
)
LABELED_ALONE = VIEWS._replace(weak=lambda key, images: jnp.nan * images, strong=lambda key, images: jnp.nan * images)
"""Of methods without augmentation."""


def linear_task(norm="static", labels_at=("clients",), views=VIEWS, **options):
    return Task(models.build("linear", num_classes=CLASSES), views, CLASSES, norm, labels_at=labels_at, **options)


def in_order(mask, batch_size: int, rows: int) -> Schedule:
    """The examples in `mask` in order, epoch after epoch; the last batch is filled up with the first of them."""
    count = jnp.sum(mask, dtype=jnp.int32)
    order = jnp.argsort(~mask, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -len(order) % batch_size))
    order = jnp.where(jnp.arange(len(order)) < count, order, order[0])
    return Schedule(jnp.tile(order, (rows, 1)), count, rows * -(-count // batch_size), batch_size)


class InOrder(Training):
    def schedule(self, key, mask):
        del key
        return in_order(mask, self.batch_size, self.epochs)

    def paired_schedule(self, key, labeled, unlabeled, unlabeled_batch_size, *, larger_counts=False):
        del key
        rows = 20 if larger_counts else self.epochs
        first, second = in_order(labeled, self.batch_size, rows), in_order(unlabeled, unlabeled_batch_size, 20)
        batches = [-(-order.size // order.batch_size) for order in (first, second)]
        return PairedSchedule(first, second, self.epochs * jnp.maximum(*batches) if larger_counts else first.steps)


def with_costs(client_update, forward_batch_size=4):
    """The jitted client update, with the costs among its metrics that the engine adds."""
    counted = jax.jit(with_passes(client_update))

    def update(*args):
        with forward_batches_of(forward_batch_size):
            output, passes = counted(*args)
        costs = {"cost/forward_passes": passes.forward, "cost/backward_passes": passes.backward}
        return output._replace(metrics={**output.metrics, **costs})

    return update


def examples(pool, index, count, labels=None):
    return Examples(jnp.asarray(pool), jnp.asarray(index), jnp.int32(count), None if labels is None else jnp.asarray(labels))


class Client:
    """Five labeled and seven unlabeled images of a pool, their tables padded, and a kernel that gives the latter `outputs`."""

    def __init__(self, outputs=OUTPUTS, true_labels=TRUE_LABELS):
        rng = np.random.default_rng(0)
        self.pool = rng.integers(0, 256, (16, SIDE, SIDE, 1)).astype(np.uint8)
        self.labeled_index, self.index = np.array([9, 4, 13, 6, 10, 14, 15]), np.array([3, 11, 5, 1, 8, 2, 7, 0])
        images = plain(self.pool[self.index[:UNLABELED]].astype(float))
        self.weak, self.strong = images.reshape(UNLABELED, -1), images[:, :, ::-1].reshape(UNLABELED, -1)
        self.labeled = plain(self.pool[self.labeled_index[:LABELED]].astype(float))[:, ::-1].reshape(LABELED, -1)
        bias = 0.3 * rng.standard_normal(CLASSES)
        self.params = {"kernel": np.linalg.pinv(self.weak) @ (np.log(outputs) - bias), "bias": bias}
        self.momentum = {name: 0.3 * rng.standard_normal(leaf.shape) for name, leaf in self.params.items()}
        self.true_labels = true_labels

    def client_data(self, labeled=LABELED, unlabeled=UNLABELED) -> ClientData:
        labels = np.append(LABELS, [2, 2]).astype(np.int32)  # two rows of padding
        return ClientData(
            examples(self.pool, self.labeled_index, labeled, labels),
            examples(self.pool, self.index, unlabeled),
            jnp.asarray(np.append(self.true_labels, 0), jnp.int32),
        )

    def trained(self, gradients, prox_mu: float = 0.0):
        """(update, momentum) after the STEPS; gradients: (w, labeled rows, unlabeled rows) -> [(images, residual), ...]."""
        w, m = dict(self.params), dict(self.momentum)
        for labeled, unlabeled in STEPS:
            parts = gradients(w, labeled, unlabeled)
            g = combine(lambda *of_parts: sum(of_parts), *(gradient(*part) for part in parts))
            # d/dw of mu/2 ||w - w_t||^2, towards the broadcast model and not towards the last step's.
            g = {name: g[name] + prox_mu * (w[name] - self.params[name]) for name in w}
            w, m = sgd(w, g, m, decay=DECAY, nesterov=True)
        return {name: self.params[name] - w[name] for name in w}, m

    def got(self, factory, options=None, *, labels_at=("clients",), at=(0, 1), views=VIEWS, rate=RATE, clip=0.0, **training):
        """(update, weight, momentum, metrics) of the method's client in the round `at` of so many."""
        sgd = torch_sgd(momentum=MOMENTUM, nesterov=True, weight_decay=DECAY, clip_norm=clip)
        client = InOrder(sgd, lambda _: None, **{"batch_size": BATCH, "epochs": EPOCHS} | training)
        given = {} if options is None else {"options": options}
        server = Server(None, None, 0, None)
        method = factory(task=linear_task(labels_at=labels_at, views=views), client=client, server=server, **given)
        params = named(self.params)
        optimizer = with_leaves(sgd.init(params), named(self.momentum))
        shared = Broadcast(Weights(params, {}), jnp.float32(rate), jnp.int32(at[0]), at[1])
        output = with_costs(method.client_update)(shared, (), optimizer, self.client_data(), jax.random.key(0))
        momentum = with_leaves(params, output.client_state)
        return output.update.params["Dense_0"], output.weight, momentum["Dense_0"], output.metrics


def assert_same(got, expected, tolerance=1e-5):
    """Two trees, such as updates or momenta; beside rtol, the tolerance is relative to the norm of the whole tree."""
    atol = tolerance * np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected)))
    jax.tree.map(lambda x, leaf: np.testing.assert_allclose(x, leaf, rtol=1e-4, atol=atol), got, expected)


def numbers(metric):
    """A metric as (total, weight) or (total,)."""
    return metric if isinstance(metric, Mean) else (int(metric),)


def assert_metrics(got, expected, rtol=1e-4):
    """Metrics as (total, weight) or (total,); those that are recorded alone have tests of their own."""
    got = unrecorded(got)
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(numbers(got[name]), value, rtol=rtol, atol=1e-6, err_msg=name)


def costs(down, up, images, forward, backward):
    """What every client reports besides: bytes, images, and rows that pass the network."""
    names = ("comm/bytes_down", "comm/bytes_up", "perf/client_images", "cost/forward_passes", "cost/backward_passes")
    return {name: (value,) for name, value in zip(names, (down, up, images, forward, backward), strict=True)}


def ratios(right, used, total):
    """The pseudo-label diagnostics of `total` examples, of which `used` have a label and `right` the right one."""
    names = ("label_ratio", "pseudo_label_accuracy", "correct_ratio", "wrong_ratio", "correct_wrong_ratio")
    values = (used, total), (right, used), (right, total), (used - right, total), (right, used - right)
    return {f"diagnostics/{name}": value for name, value in zip(names, values, strict=True)}


def diagnostics(label, true_labels, accepted):
    """`ratios` of all examples that steps drew, as lists over the draws, and the mask rate."""
    label, true_labels, accepted = map(np.concatenate, (label, true_labels, accepted))
    used, right = accepted.sum(), (accepted & (label == true_labels)).sum()
    return {"client/mask_rate": (used, len(label)), **ratios(right, used, len(label))}


def assert_trained(got, expected, seen, loss, unlabeled_loss, labels_at):
    """`Client.got` is what `Client.trained` expects; seen: (label, true label, accepted) of steps; losses: of examples."""
    paired = labels_at == "clients"
    update, weight, momentum, metrics = got
    for leaves, wanted in zip((update, momentum), expected, strict=True):
        assert_same(leaves, wanted)
    assert weight == (LABELED + UNLABELED if paired else 1)
    of_labeled, of_unlabeled = (sum(loss), len(loss)), (sum(unlabeled_loss), len(unlabeled_loss))
    losses = {"client/loss": of_labeled, "client/unlabeled_loss": of_unlabeled} if paired else {"client/loss": of_unlabeled}
    images = sum((len(a) if paired else 0) + len(b) for a, b in STEPS)
    backward = len(STEPS) * (UNLABELED_BATCH + (BATCH if paired else 0))
    forward = backward + len(STEPS) * UNLABELED_BATCH  # weak views, which only go forward without batch norm
    expected = diagnostics(*zip(*seen, strict=True)) | costs(BYTES, BYTES, images, forward, backward)
    assert_metrics(metrics, expected | losses)
