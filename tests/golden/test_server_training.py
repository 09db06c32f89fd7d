"""The server's supervised training as it is built from a config, against NumPy, after its clients' or in parallel.

The network is linear, views are plain, and the one batch holds all labeled images: neither order nor augmentation matters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import ServerState, Weights, server
from fedjax_ssl.method import Aggregate, Cohort, ServerData
from tests import tiny
from tests.golden import linear_clients as lc

ROUNDS, LABELS, STEPS = 8, 20, 2
RATE = 0.03
PLAIN = {"data__weak": "none", "server__training__batch_size": LABELS, "server__training__epochs": STEPS, "rounds": ROUNDS}


def cosine(t: int) -> float:
    """The learning rate of round t of R, counted from 1: RATE at first, half of it in the middle."""
    return 0.015 * (1 + np.cos(np.pi * (t - 1) / ROUNDS))


class Server:
    """The server of a tiny experiment with a linear network, and its labeled data in float64."""

    def __init__(self, method="fixmatch", *, pretrain=0, training="after", momentum=0.5, **overrides):
        keys = {f"server__training__optimizer__{key}": value for key, value in overrides.items()}
        keys |= {"server__training__pretrain": pretrain, "server__training__when": training}
        keys |= {"server__optimizer__momentum": momentum}
        experiment = tiny.experiment(method, network="linear", labels_at="server", **PLAIN, **keys)
        self.method, self.data = experiment.method, experiment.problem.data
        self.state, _ = jax.jit(lambda key: self.method.init(key, experiment.problem.spec))(jax.random.key(0))
        self.rows = self.data.server.index[0]
        assert len(self.rows) == LABELS
        pixels = self.data.train.images.astype(float) / 255
        self.x = ((pixels[self.rows] - pixels.mean()) / pixels.std()).reshape(LABELS, -1)
        self.y = np.eye(10)[self.data.train.labels[self.rows]]

    def given(self, number: int) -> ServerData:
        """What the server may read at the end of round `number`, counted from 0."""
        labeled = lc.examples(self.data.train.images, self.rows, LABELS, np.asarray(self.data.train.labels)[self.rows])
        return ServerData(labeled, labeled, None, labeled, jnp.int32(number), ROUNDS)

    def prepared(self) -> dict[str, np.ndarray]:
        state, _ = jax.jit(self.method.prepare)(self.state, self.given(0), jax.random.key(1))
        return self.layer(state)

    def trained(self, number: int) -> dict[str, np.ndarray]:
        """The layer after the server's work at the end of a round in which no client took part."""
        nothing = Aggregate(Weights(jax.tree.map(jnp.zeros_like, self.state.weights.params), ()), 0.0)
        state, _ = jax.jit(self.method.server_update)(self.state, nothing, self.given(number), jax.random.key(1))
        return self.layer(state)

    @staticmethod
    def layer(state) -> dict[str, np.ndarray]:
        (layer,) = state.weights.params.values()
        return {name: np.asarray(leaf, np.float64) for name, leaf in layer.items()}

    def expected(self, step, rate: float, steps: int = STEPS) -> dict[str, np.ndarray]:
        """The weights after steps from the state's."""
        w = self.layer(self.state)
        for _ in range(steps):
            w = step(w, lc.gradient(self.x, (lc.outputs(w, self.x) - self.y) / LABELS), rate)
        return w


def optimizer(kind="sgd", *, clip=0.0, decay=5e-4, nesterov=True):
    """An optimizer's step with moments of its own, (w, g, rate) -> w: it clips, then decays, then accumulates."""
    m, of_leaf = {"kernel": 0.0, "bias": 0.0}, {"kernel": lc.Adam(), "bias": lc.Adam()}

    def step(w, g, rate):
        length = lc.norm(g)
        assert not clip or length > 2 * clip  # clipping acts
        g = {name: leaf * (clip / length if clip else 1) for name, leaf in g.items()}
        # Weight decay is a part of the gradient, of Adam's too (not AdamW).
        g = lc.lars_gradient(w, g, decay) if kind == "lars" else lc.combine(lambda g, w: g + decay * w, g, w)
        if kind == "adam":
            return {name: of_leaf[name].step(w[name], g[name], rate) for name in w}
        w, moved = lc.sgd(w, g, m, rate, nesterov=nesterov)
        m.update(moved)
        return w

    return step


def test_the_servers_learning_rate_follows_the_cosine():
    server = Server(schedule="cosine")
    for t in (1, ROUNDS // 2 + 1, ROUNDS):
        lc.assert_same(server.trained(t - 1), server.expected(optimizer(), cosine(t)))


def test_the_clients_learning_rate_follows_the_cosine_and_is_broadcast():
    rates = {
        "cosine": cosine,
        "constant": lambda t: RATE,
        "cosine_7_16": lambda t: RATE * np.cos(7 * np.pi * (t - 1) / 16 / ROUNDS),
    }
    for schedule, expected in rates.items():
        experiment = tiny.experiment("fixmatch", network="linear", **PLAIN, client__optimizer__schedule=schedule)
        method = experiment.method
        server, clients = method.init(jax.random.key(0), experiment.problem.spec)
        for t in (1, ROUNDS // 2 + 1, ROUNDS):
            shared, _ = method.broadcast(server, clients, Cohort(jnp.arange(5), jnp.int32(t - 1)))
            np.testing.assert_allclose(shared.learning_rate, expected(t), rtol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        ({"clip_norm": 0.2, "weight_decay": 0.5}, optimizer(clip=0.2, decay=0.5)),
        ({"weight_decay": 0.5, "nesterov": False}, optimizer(decay=0.5, nesterov=False)),
        # Weight decay outweighs the gradient: Adam hides the scale of either, not of their sum.
        ({"name": "adam", "clip_norm": 0.2, "weight_decay": 0.5}, optimizer("adam", clip=0.2, decay=0.5)),
        # With a rate that makes LARS' small steps count.
        (
            {"name": "lars", "clip_norm": 0.2, "weight_decay": 0.5, "nesterov": False, "learning_rate": 100.0},
            optimizer("lars", clip=0.2, decay=0.5, nesterov=False),
        ),
    ],
    ids=["sgd, clipped before weight decay", "sgd without nesterov", "adam", "lars"],
)
def test_optimizers_clip_then_decay_then_accumulate(overrides, step):
    server = Server(**overrides)
    lc.assert_same(server.trained(3), server.expected(step, overrides.get("learning_rate", RATE)))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pretraining_is_that_many_trainings_with_one_momentum(count):
    server = Server(pretrain=count)
    lc.assert_same(server.prepared(), server.expected(optimizer(), RATE, count * STEPS))


def test_the_servers_model_is_half_of_the_average_and_the_step_starts_from_it():
    parallel = Server(training="parallel", momentum=0.5)
    finish = jax.jit(parallel.method.server_update)
    mu, rng = 0.5, np.random.default_rng(0)
    (name,) = parallel.state.weights.params
    v = {leaf: np.zeros_like(x) for leaf, x in parallel.layer(parallel.state).items()}
    step = optimizer()  # its momentum persists over the rounds
    for number, weight in enumerate([3.0, 0.0, 2.0]):  # nobody takes part in the second round
        sent = parallel.layer(parallel.state)
        mean = {leaf: x + 0.1 * rng.standard_normal(x.shape) for leaf, x in sent.items()}
        update = {name: {leaf: jnp.float32(sent[leaf] - mean[leaf]) * bool(weight) for leaf in sent}}
        aggregate = Aggregate(Weights(update, ()), jnp.float32(weight))
        own = parallel.expected(step, RATE)  # W_s
        if weight:
            average = {leaf: own[leaf] / 2 + mean[leaf] / 2 for leaf in own}
            v = {leaf: mu * v[leaf] + own[leaf] - average[leaf] for leaf in own}
            expected = {leaf: own[leaf] - v[leaf] for leaf in own}
        else:
            expected = own  # the momentum neither moves nor is applied
        parallel.state, metrics = finish(parallel.state, aggregate, parallel.given(number), jax.random.key(1))
        got = parallel.layer(parallel.state)
        lc.assert_same(got, expected)
        momentum = parallel.layer(parallel.state._replace(weights=Weights(parallel.state.optimizer[0].trace, {})))
        for leaf in v:
            np.testing.assert_allclose(momentum[leaf], v[leaf], rtol=1e-3, atol=1e-5)
        assert metrics["server/loss"].weight == STEPS * LABELS


def test_tracked_statistics_are_averaged_alike():
    def of(x):
        return Weights({"w": jnp.float32(x)}, {"mean": jnp.float32(10 * x)})

    clients = Aggregate(of(4.0), jnp.float32(1.0))  # W_t - mean_k W_k
    states = (ServerState(of(x), (), ()) for x in (1.0, 3.0))
    got = server.average_with_server(*states, clients).update  # (3 - 1 + 4) / 2
    assert (got.params["w"], got.stats["mean"]) == (3.0, 30.0)


def test_each_training_before_round_1_has_its_own_key():
    def train(state, data, key):
        number, drawn = state
        return (number + 1, drawn.at[number].set(jax.random.bits(key))), {}

    work = server.ServerWork(step=None, train=train, statistics=lambda state, _: state, pretrain=3)
    key = jax.random.key(5)
    (_, drawn), _ = work.prepare((0, jnp.zeros(3, jnp.uint32)), ServerData(*[None] * len(ServerData._fields)), key)
    assert drawn.tolist() == [int(jax.random.bits(jax.random.fold_in(key, i))) for i in range(3)]
