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
from fedjax_ssl.local import Server, ServerState, Training, Weights, networks
from fedjax_ssl.local.networks import Networks
from fedjax_ssl.local.optimizers import torch_sgd
from fedjax_ssl.method import Aggregate, Cohort, DataSpec, ServerData, Shard
from fedjax_ssl.methods import METHODS, fedsiam, options_class
from fedjax_ssl.methods.fedsiam_d import FedSiamDOptions, Upload, choose, upload_share
from fedjax_ssl.ssl import siamese
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
TASK = lc.linear_task(labels_at=("server",), views=VIEWS)
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
        return given[0] if len(given) == 1 else networks.join(*given)

    def shard(self, num_labeled: int, num_unlabeled: int) -> Shard:
        labeled = lc.examples(self.pool, self.labeled, num_labeled, self.labels[self.labeled])
        return Shard(labeled, lc.examples(self.pool, self.unlabeled, num_unlabeled), jnp.asarray(self.labels[self.unlabeled]))


def expected_client(data, name, options, num_labeled, largest, stats):
    """(online, target, statistics, momentum, metrics, steps) by the paper's equations; Pi's target is its online network."""
    w, t, m = dict(data.online), dict(data.target), dict(data.momentum)
    repeats = options.labeled_repeats if num_labeled else 0
    rows = [(i, True) for i in data.labeled[:num_labeled]] * repeats + [(i, False) for i in data.unlabeled[:4]]
    rows = [rows[i] for i in order(len(data.labeled) * options.labeled_repeats + len(data.unlabeled)) if i < len(rows)]
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    train_key = jax.random.split(KEY)[1]
    loss = consistency = count = 0
    released = options.normalization == "released"
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


RELEASED = {"normalization": "released", "labeled_repeats": 2, "alpha_counts": "epochs", "alpha_max": 0.81}
CASES = {
    "mt": Case("fedsiam_mt", {"alpha_max": 0.87}),
    "mt, persistent": Case("fedsiam_mt", {"alpha_max": 0.87}, persistent=True),
    "mt, running statistics": Case("fedsiam_mt", {}, norm=True),
    "pi, running statistics": Case("fedsiam_pi", {}, norm=True),  # its views differ by a number: J is 0 then
    "d, running statistics": Case("fedsiam_d", {"pi_rounds": 1}, norm=True),
    "d, while it is pi, running statistics": Case("fedsiam_d", {"pi_rounds": 2}, norm=True),
    "mt, labels at the server, kl": Case("fedsiam_mt", {"consistency": "kl", "consistency_weight": 3.0}, 0),
    "mt, released": Case("fedsiam_mt", RELEASED),
    "mt, released, kl": Case("fedsiam_mt", RELEASED | {"consistency": "kl"}),
    "pi, labels at the server": Case("fedsiam_pi", {}, 0),
    "d": Case("fedsiam_d", {"pi_rounds": 1, "alpha_max": 0.87}),
    "d, while it is pi": Case("fedsiam_d", {"pi_rounds": 2}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_client_update_is_what_the_equations_say(case):
    name, options, num_labeled, norm, persistent = case
    data, options = Data(), toy.options(options_class(METHODS[name]), **options)
    method = build(name, options, task=NORMED if norm else TASK, persistent=persistent)
    if not persistent:
        data.momentum = dict.fromkeys(data.momentum, 0.0)
    one_net = getattr(options, "pi_rounds", 0) == 2  # the round is the second
    if one_net:
        data.target, data.stats[1] = data.online, data.stats[0]
    stats = data.stats if norm else [{}, {}]
    sent = data.weights(*([data.online] if name == "fedsiam_pi" else [data.online, data.target]), stats=stats)
    state = empty_state(method)._replace(weights=sent)
    shared, own = method.broadcast(state, (), Cohort(jnp.zeros(1, jnp.int32), jnp.int32(1)))  # round 2
    kept = fedsiam.FedSiamClientState(jnp.int32(STEPS), jnp.int32(SO_FAR), kept_state(data.momentum) if persistent else ())
    output = lc.with_costs(method.client_update)(shared, own, kept, data.shard(num_labeled, 4), KEY)

    largest = 0.0 if one_net else getattr(options, "alpha_max", 0.0)
    online, target, stats, momentum, metrics, steps = expected_client(
        data, name, options, num_labeled, largest, data.stats * norm
    )
    update = output.update.weights if name == "fedsiam_d" else output.update
    update = update if norm else update._replace(stats=sent.stats)  # none travel
    local = networks.networks(jax.tree.map(jnp.subtract, sent, update))
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
    ("name", "options"), [("fedsiam_pi", {}), ("fedsiam_mt", {"alpha_max": 0.93}), ("fedsiam_d", {"pi_rounds": 3})]
)
def test_the_server_averages_then_trains_on_its_labels_and_the_target_follows(name, options):
    data, pi, one_net = Data(), name == "fedsiam_pi", name == "fedsiam_d"
    if one_net:
        data.target = data.online
    method = build(name, toy.options(options_class(METHODS[name]), **options), persistent=True)
    rng = np.random.default_rng(5)
    nets = [data.online] if pi else [data.online, data.target]
    moves = [{key: rng.standard_normal(leaf.shape) for key, leaf in network.items()} for network in nets]
    if one_net:
        moves[0] = moves[1]
    sent, update = data.weights(*nets), data.weights(*moves)._replace(stats=())
    state = empty_state(method)._replace(weights=sent, fine_tune=kept_state(data.momentum))
    given = data.shard(3, 4)
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


def test_the_boundary_of_d_looks_back_on_as_many_rounds_as_pi_has():
    """phi_g = 2: in every round after them the boundary is a quantile of that round's distances and of the one's before."""
    rounds, rng = 6, np.random.default_rng(3)
    options = toy.options(FedSiamDOptions, rounds=rounds, pi_rounds=2, saved=0.4, curve="rectangle", end_round=rounds + 1)
    tau = 0.6 * rounds / (rounds + 1 - 2)  # Eq. 12
    method = build("fedsiam_d", options, task=TASK._replace(labels_at=("clients",)))
    data, sizes, window = Data(), np.array([2.0, 5.0, 3.0]), []
    nets = [data.online, data.target]
    state = jax.jit(lambda: method.init(KEY, DataSpec((SIDE, SIDE, 1), CLASSES, 3, 3)))()[0]
    state, update = state._replace(weights=data.weights(*nets)), jax.jit(method.server_update)
    told_apart = np.zeros(2, bool)
    # The distances rise, then fall: a longer memory or a shorter one chooses otherwise.
    for number, distances in ((3, [0.1, 0.2, 0.3]), (4, [0.6, 0.5, 0.4]), (5, [0.25, 0.45, 0.35])):
        window.append(distances)
        chosen, *others = (distances >= np.quantile(window[-length:], 1 - tau) for length in (2, 1, 3))
        told_apart |= [np.any(other != chosen) for other in others]
        online, target = ({key: rng.standard_normal((3, *leaf.shape)) for key, leaf in net.items()} for net in nets)
        moves = ({key: net[key] - own[key] for key in net} for net, own in zip(nets, (online, target), strict=True))
        upload = Upload(data.weights(*moves)._replace(stats=()), jnp.float32(distances)[:, None])  # the network is one layer
        server = ServerData(None, None, None, None, jnp.int32(number - 1), rounds)
        state, metrics = update(state, Aggregate(upload, jnp.float32(sizes)), server, KEY)
        assert metrics["client/upload_fraction"] == (chosen.sum(), 3)
        taken = {key: np.stack([(online if own else target)[key][k] for k, own in enumerate(chosen)]) for key in online}
        nets = [{key: np.average(leaf, 0, sizes) for key, leaf in own.items()} for own in (taken, target)]  # Eq. 2
        for got, expected in zip(state.weights.params, nets, strict=True):
            close(got, expected)
    assert told_apart.all()


def test_fsm_is_a_relative_distance_of_a_module_with_all_its_parameters():
    rng = np.random.default_rng(1)
    shapes = {
        "Conv_0": {"kernel": (2, 3), "bias": 3},
        "Block_0": {"Conv_0": {"kernel": (4, 1)}},
        "BatchNorm_0": {"scale": 3, "bias": 3},
    }
    target, online = (
        jax.tree.map(lambda shape: jnp.float32(rng.standard_normal(shape)), shapes, is_leaf=lambda x: not isinstance(x, dict))
        for _ in range(2)
    )
    names = siamese.layers(online)
    assert names == ("['BatchNorm_0']", "['Block_0']['Conv_0']", "['Conv_0']")

    def flat(tree):
        parts = [tree["BatchNorm_0"].values(), tree["Block_0"]["Conv_0"].values(), tree["Conv_0"].values()]
        return [np.concatenate([leaf.ravel() for leaf in part]) for part in parts]

    expected = [np.linalg.norm(t - s) / np.linalg.norm(s) for t, s in zip(flat(target), flat(online), strict=True)]
    np.testing.assert_allclose(siamese.layer_distances(target, online), expected, rtol=1e-5)
    assert siamese.layer_bytes(names, online).tolist() == [24, 16, 36]
    assert siamese.layer_bytes(names, online, {"BatchNorm_0": {"mean": np.zeros(3, np.float32)}}).tolist() == [36, 16, 36]


def test_fsm_of_equal_layers_and_of_a_layer_of_zeros_is_finite():
    zeros, ones = {"a": {"kernel": jnp.zeros(2)}}, {"a": {"kernel": jnp.ones(2)}}
    assert siamese.layer_distances(zeros, zeros).tolist() == [0]
    assert 1e6 < float(siamese.layer_distances(ones, zeros)[0]) < np.inf


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.8, 1.0])
def test_tau_follows_its_curve(mu):
    for rounds, phi, varphi in ((50, 3, 40), (12, 5, 11), (4, 0, 3)):
        for number in range(1, rounds + 1):
            # Eqs. 11 and 12 as printed, cut to [0, 1] below.
            expected = {"linear": -2 * (1 - mu) * rounds / (rounds - phi) ** 2 * (number - rounds) * (number > phi)}
            expected["rectangle"] = (1 - mu) * rounds / (varphi - phi) * (phi < number < varphi)
            for curve, tau in expected.items():
                given = {"curve": curve, "saved": mu, "pi_rounds": phi, "end_round": varphi}
                options = FedSiamDOptions().model_copy(update=given)
                got = upload_share(options, rounds, jnp.int32(number))
                np.testing.assert_allclose(got, np.clip(tau, 0, 1), rtol=1e-5, atol=1e-7)


def test_all_layers_are_uploaded_at_tau_1_none_at_0_and_none_of_an_empty_window():
    distances = jnp.array([[0.1, 0.5], [0.3, 0.2]])
    window = siamese.remember(siamese.empty_window(1, 2, 2), jnp.int32(0), distances, jnp.ones(2, bool))
    for tau, expected in ((0.0, 0), (1.0, 4)):
        assert int(siamese.uploaded(distances, siamese.boundary(window, jnp.float32(tau)), jnp.float32(tau)).sum()) == expected
    empty = siamese.boundary(siamese.empty_window(1, 2, 2), jnp.float32(1))
    assert not np.any(siamese.uploaded(distances, empty, jnp.float32(1)))


class Round:
    """A round of D with three clients and three layers a, b, c of 8, 8 and 12 bytes; the third client is broken."""

    def __init__(self):
        rng = np.random.default_rng(4)

        def draw(*lead):
            shapes = {"a": {"kernel": (2,)}, "b": {"bias": (1,), "kernel": (1,)}, "c": {"kernel": (3, 1)}}
            return {layer: {n: rng.standard_normal((*lead, *s)) for n, s in own.items()} for layer, own in shapes.items()}

        self.sent, self.local = Networks(draw(), draw()), Networks(draw(3), draw(3))
        for leaf in jax.tree.leaves(self.local):
            leaf[2] = np.nan

    def choose(self, distances, tau=0.5, *, sizes=(2.0, 1.0, 0.0), both_sent=True, stats=Networks({}, {}), update_stats=()):
        """(state, aggregate, metrics) of `choose` in a round after none."""
        update = jax.tree.map(lambda sent, local: jnp.float32(sent - local), self.sent, self.local)
        state = ServerState(Weights(lc.float32(self.sent), stats), (), (), siamese.empty_window(2, 3, 3))
        aggregate = Aggregate(Upload(Weights(update, update_stats), jnp.float32(distances)), jnp.array(sizes))
        return CHOOSE(state, aggregate, jnp.float32(tau), round=jnp.int32(0), both_sent=jnp.array(both_sent))

    def assert_averaged(self, update, chosen):
        """Layer j of client k is the online one's where chosen[k][j], else the target's; both networks are averaged by size."""
        for layer, taken in zip("abc", np.transpose(chosen), strict=True):
            online, target = (network[layer] for network in self.local)
            online = lc.combine(lambda s, t, own=taken: [s[k] if own[k] else t[k] for k in (0, 1)], online, target)
            for sent, moved, of_clients in zip(self.sent, update, (online, target), strict=True):
                expected = lc.combine(lambda x: (2 * x[0] + x[1]) / 3, of_clients)
                lc.assert_same(lc.combine(np.subtract, sent[layer], moved[layer]), expected)


CHOOSE = jax.jit(choose)
DISTANCES = [[0.1, 0.4, 0.2], [0.3, 0.0, 0.6], [np.nan] * 3]
# tau = .5: the median of (0, .1, .2, .3, .4, .6) is .25.
CHOSEN = [[0, 1, 0], [1, 0, 1], [0, 0, 0]]


def test_d_takes_the_targets_layers_under_the_boundary_and_averages_by_size():
    example = Round()
    _, aggregate, metrics = example.choose(DISTANCES)
    assert aggregate.weight == 3
    example.assert_averaged(aggregate.update.params, CHOSEN)
    # The target's 28 bytes, three distances, and layers b; a and c; none.
    assert metrics["comm/bytes_up"].total.tolist() == [28 + 12 + 8, 28 + 12 + 20, 28 + 12]
    assert [float(x) for x in metrics["client/upload_fraction"]] == [3, 6]
    np.testing.assert_allclose(metrics["client/upload_bytes_fraction"], [(20 + 32) / 28, 2], rtol=1e-6)  # of two clients


def test_while_one_network_travels_the_target_alone_is_sent_and_becomes_both():
    example = Round()
    state, aggregate, metrics = example.choose(np.zeros((3, 3)), 0.0, both_sent=False)
    assert metrics["comm/bytes_up"].total.tolist() == [28, 28, 28]
    assert metrics["client/upload_fraction"].total == 0
    assert not np.any(state.own.used)
    example.assert_averaged(aggregate.update.params, np.zeros((3, 3)))


def test_batch_norm_statistics_go_with_their_layer_where_they_travel():
    sent = Networks({"b": {"mean": jnp.array([1.0])}}, {"b": {"mean": jnp.array([2.0])}})
    local = Networks({"b": {"mean": jnp.array([[10.0], [20.0], [5.0]])}}, {"b": {"mean": jnp.array([[11.0], [22.0], [5.0]])}})
    _, aggregate, metrics = Round().choose(DISTANCES, stats=sent, update_stats=jax.tree.map(jnp.subtract, sent, local))
    got = [s["b"]["mean"] - u["b"]["mean"] for s, u in zip(sent, aggregate.update.stats, strict=True)]
    np.testing.assert_allclose(got, [[(2 * 10 + 22) / 3], [(2 * 11 + 22) / 3]], rtol=1e-5)
    assert metrics["comm/bytes_up"].total.tolist() == [32 + 12 + 12, 32 + 12 + 20, 32 + 12]


def test_clients_of_weight_zero_leave_the_model_alone():
    state, aggregate, metrics = Round().choose(np.full((3, 3), np.nan), 1.0, sizes=(0.0, 0.0, 0.0))
    assert aggregate.weight == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(aggregate.update.params))
    assert metrics["client/upload_fraction"].weight == 0
    assert np.all(np.isfinite(state.own.values))
