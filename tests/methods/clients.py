"""The client of a tiny experiment, with as many labeled and unlabeled examples as a test wants, and what is traced of one."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import Examples
from fedjax_ssl.experiment.plan import plan_of
from fedjax_ssl.local import Task
from fedjax_ssl.method import ClientData, Cohort
from fedjax_ssl.simulation.round import attach, gather
from tests import tiny
from tests.golden.linear_clients import flat, with_costs


class Client:
    """The first client of a tiny experiment, its update jitted once; what it has may be changed between calls.

    labeled, unlabeled: how many examples it has unless a call says otherwise; scale: of the first weights.
    """

    def __init__(self, method, labeled=None, unlabeled=None, *, scale=1.0, **overrides):
        self.experiment = tiny.experiment(method, **overrides)
        self.method, data, spec = self.experiment.method, self.experiment.problem.data, self.experiment.problem.spec
        server, self.clients = jax.jit(lambda key: self.method.init(key, spec))(jax.random.key(0))
        self.weights, self.task = jax.tree.map(lambda x: scale * x, server.weights), task_of(self.experiment)
        measured = {"extra": jnp.float32(0.1)} if method == "fedtrinet" else {}  # its base confidence
        self.server = server._replace(weights=self.weights, **measured)
        self.kept = jax.tree.map(lambda x: x[0], self.clients)
        self.images, self.labels = jnp.asarray(data.train.images), jnp.asarray(data.train.labels)
        self.labeled, self.unlabeled = (jnp.asarray(table.index[0]) for table in (data.labeled, data.unlabeled))
        in_all = int(data.labeled.count[0]), int(data.unlabeled.count[0])
        self.counts = [own if given is None else given for given, own in zip((labeled, unlabeled), in_all, strict=True)]
        self.update, self.broadcast = with_costs(self.method.client_update), jax.jit(self.method.broadcast)

    def biased(self, bias: float):
        """Weights whose output is the same for every image: class 3 leads by `bias`."""
        weights = jax.tree.map(jnp.zeros_like, self.weights)
        name = max(weights.params, key=lambda n: weights.params[n]["bias"].shape == (10,))
        weights.params[name]["bias"] = jnp.zeros(10).at[3].set(bias)
        return weights

    def client_data(self, labeled=None, unlabeled=None) -> ClientData:
        """Its data, or the first so many of either kind."""
        counts = [own if given is None else given for given, own in zip((labeled, unlabeled), self.counts, strict=True)]
        return ClientData(
            Examples(self.images, self.labeled, jnp.int32(counts[0]), self.labels[self.labeled]),
            Examples(self.images, self.unlabeled, jnp.int32(counts[1]), None),
            self.labels[self.unlabeled],
        )

    def arguments(self, labeled=None, unlabeled=None, *, round=0, weights=None, kept=None):
        server = self.server if weights is None else self.server._replace(weights=weights)
        shared, per_client = self.broadcast(server, self.clients, Cohort(jnp.arange(5), jnp.int32(round), jnp.int32(8)))
        per_client = jax.tree.map(lambda x: x[0], per_client)
        return shared, per_client, self.kept if kept is None else kept, self.client_data(labeled, unlabeled), jax.random.key(1)

    def __call__(self, *counts, **call):
        return self.update(*self.arguments(*counts, **call))

    def trace(self):
        return jax.eval_shape(self.method.client_update, *self.arguments())

    def without_what_lies_beyond(self, **call):
        """What it returns where images beyond the counts are white, and all labels but those of its labeled examples wrong."""
        images, labels, client_data = self.images, self.labels, self.client_data(call.get("labeled"), call.get("unlabeled"))
        labeled, unlabeled = int(client_data.labeled.count), int(client_data.unlabeled.count)
        self.images = images.at[self.labeled[labeled:]].set(255).at[self.unlabeled[unlabeled:]].set(255)
        self.labels = (labels + 1).at[self.labeled[:labeled]].set(labels[self.labeled[:labeled]])
        try:
            return self(**call)
        finally:
            self.images, self.labels = images, labels


def task_of(experiment) -> Task:
    return plan_of(experiment.settings, None).task()


def server_data(experiment, ids):
    """What the server may read at the end of the first round; ids: the next cohort."""
    cohort = Cohort(np.array(ids), np.int32(0), experiment.problem.rounds)
    rows = gather(experiment.problem.data, cohort, cohort)
    return jax.tree.map(jnp.asarray, attach(rows.server, rows.images))


def traced_round(experiment):
    """The shapes of a run's state before a round and after it, and of the round's metrics."""
    simulator = experiment.simulator
    before, _ = simulator._initialize.eval_shape(simulator._inputs, simulator._key, simulator._pools)
    after, _, metrics = simulator._round.eval_shape(before, simulator._inputs, simulator._pools)
    return before, after, metrics


def recorded_passes(monkeypatch) -> list:
    """(examples, mask, dropout key) of all passes in training mode that are traced or run from now on."""
    passes = []
    for name in ("train_logits", "train_features"):

        def recorded(self, weights, images, mask, key=None, original=getattr(Task, name)):
            passes.append((len(images), mask, key))
            return original(self, weights, images, mask, key)

        monkeypatch.setattr(Task, name, recorded)
    return passes


def norm(tree) -> float:
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def finite(output) -> bool:
    return bool(np.isfinite(flat((output.update, output.client_state, output.metrics))).all())
