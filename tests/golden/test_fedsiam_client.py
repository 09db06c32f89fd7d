"""FedSiam against NumPy: whole client and server updates of Pi, MT and D, and how D chooses layers.

The network is linear, so that each gradient is written out. Batches come in a fixed order. A view is the image, or its mirror
image for labeled examples, plus a number drawn from the view's key: two views of an image differ, and a wrong one shows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.batching import Schedule
from fedjax_ssl.local import Server, Training, Weights
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import Aggregate, ClientData, Cohort, DataSpec, ServerData
from fedjax_ssl.methods import METHODS, fedsiam, options_class
from fedjax_ssl.methods.fedsiam_d import Upload
from tests import toy
from tests.golden import linear_clients as lc
from tests.golden.normalizing import in_front_of, normalized, tracked

SIDE, CLASSES, MOMENTUM = lc.SIDE, lc.CLASSES, lc.MOMENTUM
BATCH, EPOCHS, RATE, DECAY, SHARE = 4, 2, 0.1, 0.1, 0.3
STEPS, SO_FAR = 5, 3  # the client's steps and epochs before
KEY = jax.random.key(7)


def number(key) -> float:
    return 0.5 * jax.random.normal(key)


def order(n: int) -> list[int]:
    """The numbers below n: 2, 5, 8, ..., then 1, 4, ..., then 0, 3, ..."""
    return [i for first in (2, 1, 0) for i in range(first, n, 3)]


class InOrder(Training):
    """Local training whose batches are the real examples in `order`; the last one is filled up with the first example."""

    def schedule(self, key, mask):
        del key
        count = jnp.sum(mask, dtype=jnp.int32)
        ranks = jnp.array(order(len(mask)))
        ranks = ranks[jnp.argsort(ranks >= count, stable=True)]  # padding last
        positions = jnp.argsort(~mask, stable=True).astype(jnp.int32)[ranks]
        positions = jnp.where(jnp.arange(len(mask)) < count, positions, positions[0])
        positions = jnp.pad(positions, (0, -len(mask) % self.batch_size))
        steps = self.epochs * -(-count // self.batch_size)
        return Schedule(jnp.tile(positions, (self.epochs, 1)), count, steps, self.batch_size)


VIEWS = Views(
    plain=lc.upright,
    weak=lambda key, images: lc.upright(images) + number(key),
    strong=lambda key, images: 1 / 0,  # no method here may look at it
    labeled=lambda key, images: lc.upright(images)[:, :, ::-1] + number(key),
)
TASK = lc.linear_task(labels_at=("clients",), views=VIEWS)
SGD = torch_sgd(momentum=MOMENTUM, weight_decay=DECAY)
NORMED = TASK._replace(model=in_front_of(TASK.model), norm="running", norm_momentum=SHARE)


def kept_state(momentum):
    return lc.with_leaves(SGD.init(lc.named(momentum)), lc.named(momentum))


def momentum_of(state):
    return lc.with_leaves(lc.named({"bias": 0, "kernel": 0}), state)


class Data:
    """Three labeled and four unlabeled images of a pool of twelve, and two networks; float64."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.pool = rng.integers(0, 256, (12, SIDE, SIDE, 1)).astype(np.uint8)
        self.labels = np.array([0, 2, 1, 1, 0, 2, 1, 0, 2, 1, 0, 2])
        self.labeled, self.unlabeled = np.array([3, 11, 5, 0]), np.array([8, 1, 2, 7, 0])  # the last of each is padding
        self.online, self.target = (lc.random_layer(rng, 0.5) for _ in range(2))
        self.stats = [{"mean": rng.standard_normal(SIDE**2), "var": rng.uniform(0.5, 2, SIDE**2)} for _ in range(2)]
        self.momentum = {name: 0.5 * leaf[::-1] for name, leaf in self.online.items()}  # where it is kept
        image = lc.plain(self.pool.astype(float))
        self.x = {False: image.reshape(12, -1), True: image[:, :, ::-1].reshape(12, -1)}

    def weights(self, *nets, stats=({}, {})) -> Weights:
        """Weights of one network or of a pair."""
        given = [Weights(lc.named(network), lc.float32(its)) for network, its in zip(nets, stats, strict=False)]
        return given[0] if len(given) == 1 else fedsiam.join(*given)

    def client_data(self, num_labeled: int, num_unlabeled: int) -> ClientData:
        labeled = lc.examples(self.pool, self.labeled, num_labeled, self.labels[self.labeled])
        return ClientData(
            labeled, lc.examples(self.pool, self.unlabeled, num_unlabeled), jnp.asarray(self.labels[self.unlabeled])
        )


def expected_client(data, name, options, num_labeled, largest, stats):
    """(online, target, statistics, momentum, metrics, steps) by the paper's equations; Pi's target is its online network."""
    w, t, m = dict(data.online), dict(data.target), dict(data.momentum)
    few = num_labeled / (num_labeled + 4) < options.repeats_below
    repeats = 0 if not num_labeled else options.labeled_repeats if few else 1
    rows = [(i, True) for i in data.labeled[:num_labeled]] * repeats + [(i, False) for i in data.unlabeled[:4]]
    rows = [rows[i] for i in order(len(data.labeled) * options.labeled_repeats + len(data.unlabeled)) if i < len(rows)]
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    train_key = jax.random.split(KEY)[1]
    loss = consistency = count = 0
    released = options.divisor == "batch"
    for s in range(EPOCHS * len(batches)):
        batch, epoch = batches[s % len(batches)], s // len(batches)
        keys = jax.random.split(jax.random.fold_in(train_key, s))
        own, other = (np.stack([data.x[labeled][i] for i, labeled in batch]) + float(number(key)) for key in keys)
        has_label = np.array([labeled for _, labeled in batch])
        y = data.labels[[i for i, _ in batch]]
        if stats:
            stats = [tracked(its, x, SHARE) for its, x in zip(stats, (own, other), strict=True)]
            stats = stats if largest else [stats[0]] * 2
            own, other = normalized(own), normalized(other)
        q, p = lc.outputs(w, own), lc.outputs(w if name == "fedsiam_pi" else t, other)
        d = q - p
        j, dj = (d**2).sum(1), 2 * q * (d - (d * q).sum(1, keepdims=True))  # Eq. 4
        if options.consistency == "kl":
            j, dj = (p * np.log(p / q)).sum(1), d  # Eq. 5
        elif released:
            j, dj = j / CLASSES, dj / CLASSES
        ce = lc.cross_entropy(q, y)[has_label]
        ahead = EPOCHS if released else 0
        beta = np.exp(-5 * (1 - min(SO_FAR + ahead + epoch + 1, 10) / 10) ** 2)
        share = has_label / (len(batch) if released else max(has_label.sum(), 1))  # Eq. 6
        residual = share[:, None] * lc.residual(q, y) + options.consistency_weight * beta / len(batch) * dj  # Eq. 7
        w, m = lc.sgd(w, lc.gradient(own, residual), m, RATE, decay=DECAY)
        by_epochs = getattr(options, "alpha_counts", "") == "epochs"
        ramp = SO_FAR + ahead + epoch + 1 if by_epochs else STEPS + s + 1
        alpha = min(1 - 1 / (ramp + 1), largest)
        t = lc.combine(lambda t, w, a=alpha: a * t + (1 - a) * w, t, w)  # Eq. 3
        loss, consistency, count = loss + ce.sum(), consistency + j.sum(), count + len(batch)
    size = 4 * sum(leaf.size for leaf in (*w.values(), *(stats[0].values() if stats else ())))
    down = size * (1 if name == "fedsiam_pi" or not largest else 2)
    if name == "fedsiam_d" and largest:
        down += 4  # the boundary
    up, back = size if name == "fedsiam_pi" else 2 * size, EPOCHS * len(batches) * BATCH  # forward through both networks
    metrics = lc.costs(down, up, count, 2 * back, back)
    metrics |= {"client/loss": (loss, EPOCHS * repeats * num_labeled), "client/consistency_loss": (consistency, count)}
    if name == "fedsiam_d":
        del metrics["comm/bytes_up"]  # the server counts them
    return w, t, stats, m, metrics, EPOCHS * len(batches)


def build(name, options, task=TASK, persistent=False):
    training = InOrder(SGD, lambda _: jnp.float32(RATE), BATCH, epochs=EPOCHS, persistent=persistent)
    server = Server(optax.sgd(1.0), training._replace(batch_size=2), 0, None)
    return METHODS[name](task=task, client=training, server=server, options=options)


def empty_state(method):
    spec = DataSpec((SIDE, SIDE, 1), CLASSES, 1, 1)
    state = jax.eval_shape(lambda: method.init(KEY, spec))[0]
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)


def close(got, expected):
    """Parameters, in one layer, or statistics."""
    layer = next(iter(got.values())) if len(got) == 1 else got
    lc.assert_same(layer, expected)


class Case(NamedTuple):
    """A method with its options, the client's labeled examples, whether there is batch norm and a momentum that is kept."""

    name: str
    options: dict
    labeled: int = 3
    norm: bool = False
    persistent: bool = False


RELEASED = {"divisor": "batch", "labeled_repeats": 2, "alpha_counts": "epochs", "alpha_max": 0.81}
CASES = {
    "mt": Case("fedsiam_mt", {"alpha_max": 0.87}),
    "mt, persistent": Case("fedsiam_mt", {"alpha_max": 0.87}, persistent=True),
    "mt, running statistics": Case("fedsiam_mt", {}, norm=True),
    "pi, running statistics": Case("fedsiam_pi", {}, norm=True),  # its views differ by a number: J is 0 then
    "d, running statistics": Case("fedsiam_d", {"pi_rounds": 1}, norm=True),
    "d, while it is pi, running statistics": Case("fedsiam_d", {"pi_rounds": 2}, norm=True),
    "mt, labels at the server, kl": Case("fedsiam_mt", {"consistency": "kl", "consistency_weight": 3.0}, 0),
    "mt, released": Case("fedsiam_mt", RELEASED),
    "mt, released, labels of 3/7 repeat": Case("fedsiam_mt", RELEASED | {"repeats_below": 0.43}),
    "mt, released, labels of 3/7 do not": Case("fedsiam_mt", RELEASED | {"repeats_below": 0.42}),
    "mt, released, kl": Case("fedsiam_mt", RELEASED | {"consistency": "kl"}),
    "pi, labels at the server": Case("fedsiam_pi", {}, 0),
    "d": Case("fedsiam_d", {"pi_rounds": 1, "alpha_max": 0.87}),
    "d, while it is pi": Case("fedsiam_d", {"pi_rounds": 2}),
    "d, released, while it is pi": Case("fedsiam_d", {"pi_rounds": 1, "target_delay": 1}),
}


OFTEN = ("mt", "mt, labels at the server, kl", "mt, released", "pi, labels at the server", "d", "d, running statistics")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=() if name in OFTEN else pytest.mark.slow) for name, case in CASES.items()]
)
def test_a_client_update_is_what_the_equations_say(case):
    name, options, num_labeled, norm, persistent = case
    data, options = Data(), toy.options(options_class(METHODS[name]), **options)
    method = build(name, options, task=NORMED if norm else TASK, persistent=persistent)
    if not persistent:
        data.momentum = dict.fromkeys(data.momentum, 0.0)
    one_net = name == "fedsiam_d" and options.pi_rounds + options.target_delay == 2  # the round is the second
    if one_net:
        data.target, data.stats[1] = data.online, data.stats[0]
    stats = data.stats if norm else [{}, {}]
    sent = data.weights(*([data.online] if name == "fedsiam_pi" else [data.online, data.target]), stats=stats)
    state = empty_state(method)._replace(weights=sent)
    shared, per_client = method.broadcast(state, (), Cohort(jnp.zeros(1, jnp.int32), jnp.int32(1)))  # round 2
    kept = fedsiam.FedSiamClientState(jnp.int32(STEPS), jnp.int32(SO_FAR), kept_state(data.momentum) if persistent else ())
    output = lc.with_costs(method.client_update)(shared, per_client, kept, data.client_data(num_labeled, 4), KEY)

    largest = 0.0 if one_net else getattr(options, "alpha_max", 0.0)
    online, target, stats, momentum, metrics, steps = expected_client(
        data, name, options, num_labeled, largest, data.stats * norm
    )
    update = output.update.weights if name == "fedsiam_d" else output.update
    update = update if norm else update._replace(stats=sent.stats)  # none travel
    local = (2 * fedsiam.each(jax.tree.map(jnp.subtract, sent, update)))[:2]
    for got, params, its in zip(local, (online, online if name == "fedsiam_pi" else target), stats or [{}] * 2, strict=True):
        close(got.params, params)
        close(got.stats, its)
    if name == "fedsiam_d":
        apart, whole = ([np.sum(v**2) for v in tree.values()] for tree in ({k: target[k] - online[k] for k in online}, online))
        fsm = np.sqrt(sum(apart) / sum(whole))  # Eq. 10; the network is one layer
        np.testing.assert_allclose(output.update.distances, [fsm], rtol=1e-4)
        assert bool(fsm) == (not one_net)
    assert output.weight == num_labeled + 4  # n_k, Eq. 2
    assert (int(output.client_state.steps), int(output.client_state.epochs)) == (STEPS + steps, SO_FAR + EPOCHS)
    if persistent:
        close(momentum_of(output.client_state.optimizer), momentum)
    else:
        assert output.client_state.optimizer == ()
    lc.assert_metrics(output.metrics, metrics)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedsiam_pi", {}),
        ("fedsiam_mt", {"alpha_max": 0.93}),
        ("fedsiam_d", {"pi_rounds": 3}),
        ("fedsiam_d", {"pi_rounds": 2, "target_delay": 1}),
    ],
)
def test_the_server_averages_then_trains_on_its_labels_and_the_target_follows(name, options):
    data, pi, one_net = Data(), name == "fedsiam_pi", name == "fedsiam_d"
    if one_net:
        data.target = data.online
    task = TASK._replace(labels_at=("server",))
    method = build(name, toy.options(options_class(METHODS[name]), **options), task, persistent=True)
    rng = np.random.default_rng(5)
    nets = [data.online] if pi else [data.online, data.target]
    moves = [{key: rng.standard_normal(leaf.shape) for key, leaf in network.items()} for network in nets]
    if one_net:
        moves[0] = moves[1]
    sent, update = data.weights(*nets), data.weights(*moves)._replace(stats=())
    state = empty_state(method)._replace(weights=sent, fine_tune=kept_state(data.momentum))
    given = data.client_data(3, 4)
    aggregate = Aggregate(update, jnp.float32(9))
    if one_net:
        stacked = jax.tree.map(lambda u: u[None], Upload(update, jnp.zeros(1)))
        aggregate = Aggregate(stacked, jnp.float32([9]))
    server = ServerData(given.labeled, given.unlabeled, None, given.unlabeled, jnp.int32(2), 4)
    state, metrics = jax.jit(method.server_update)(state, aggregate, server, KEY)

    averaged = [lc.combine(np.subtract, a, b) for a, b in zip(nets, moves, strict=True)]
    w, t = averaged[0], averaged[-1]
    m, total = data.momentum, 0
    train_key = jax.random.split(KEY)[1]
    rows = [i for i in order(4) if i < 3]
    for s in range(EPOCHS * 2):  # batches of two and one
        at = data.labeled[rows[:2] if s % 2 == 0 else rows[2:]]
        x = data.x[True][at] + float(number(jax.random.fold_in(train_key, s)))
        q, y = lc.outputs(w, x), data.labels[at]
        total += lc.cross_entropy(q, y).sum()
        w, m = lc.sgd(w, lc.gradient(x, lc.residual(q, y) / len(at)), m, RATE, decay=DECAY)  # Eq. 8
        steps = 2 * EPOCHS * 2 + s + 1  # two rounds before
        alpha = 0 if one_net else min(1 - 1 / (steps + 1), 0.93)
        t = lc.combine(lambda t, w, a=alpha: a * t + (1 - a) * w, t, w)  # Eq. 9
    np.testing.assert_allclose(metrics["server/loss"], (total, 6), rtol=1e-4)
    close(momentum_of(state.fine_tune), m)
    if pi:
        close(state.weights.params, w)
    else:
        close(state.weights.params.online, w)
        close(state.weights.params.target, t)
    images, real = jnp.asarray(data.pool), jnp.ones(12, bool)
    z = {key: data.x[False] @ v["kernel"] + v["bias"] for key, v in (("target", w if pi else t), ("online", w))}
    assert list(method.predict) == (["online"] if pi else ["target", "online"])
    for which, predict in method.predict.items():
        np.testing.assert_allclose(predict(state, images, real), z[which], rtol=1e-3, atol=1e-4)
