"""The server's side of a method with one global model: aggregation step, fine-tuning on its labels, static batch norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import Array, Examples
from fedjax_ssl.local.objectives import supervised_gradient
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.local.training import Fit, GradientFn, Training, minimize
from fedjax_ssl.method import Aggregate, ClientOutput, Cohort, DataSpec, Method, Requires, ServerData, Shard, weighted_sum
from fedjax_ssl.metrics import Metrics
from fedjax_ssl.models import norm

PyTree = Any
SBN_DATA = ("cohort", "all", "labeled")
SBN_WEIGHTING = ("examples", "batches")
TRAINING = ("after", "parallel")


class StaticNorm(NamedTuple):
    """How static batch-norm statistics (sBN) are collected: a cumulative average of the statistics of batches.

    Attributes:
        data: `cohort`: the server's labeled data and all data of the clients of the round to come ((FL)^2, Appendix E); `all`:
            its labeled data and the whole unlabeled pool (its released code, SemiFL); `labeled`: its labeled data. With the
            labels at the clients only `cohort` has what is trained on.
        weighting: whether a batch counts with its number of `examples`, or all `batches` alike as in the released code,
            where small labeled batches then weigh more than their share.
        labeled_batch_size: batch size of the labeled data.
        unlabeled_batch_size: batch size of the unlabeled data.
    """

    data: str
    weighting: str
    labeled_batch_size: int
    unlabeled_batch_size: int


class Server(NamedTuple):
    """The server's settings.

    Attributes:
        optimizer: any optax optimizer; its gradient is the aggregated update, broadcast minus local.
        fine_tune: supervised training on the labeled data, each round, where the server has any.
        pretrain: number of such trainings before round 1.
        static_norm: how sBN statistics are collected, where the task uses them; None: they are not.
        training: the server trains `after` it has averaged the clients, starting from what that gave (fine-tuning), or in
            `parallel` with them, starting from the model that was sent, and is then averaged with them (SemiFL's ablation).
    """

    optimizer: optax.GradientTransformation
    fine_tune: Training
    pretrain: int
    static_norm: StaticNorm | None
    training: str = "after"


class Broadcast(NamedTuple):
    """What goes down to every client.

    Attributes:
        weights: the global model, with its statistics.
        learning_rate: float32 scalar, this round's.
        round: int32 scalar, the round's number, from 0.
        rounds: how many rounds the run has.
    """

    weights: Weights
    learning_rate: jax.Array
    round: Array = 0
    rounds: Array = 1


class ServerState(NamedTuple):
    """What the server keeps.

    Attributes:
        weights: the global model, with the statistics that are sent out and tested with.
        optimizer: state of the server optimizer (its momentum).
        fine_tune: state of the fine-tuning optimizer; it persists through pre-training and all rounds. `()` without labels.
        own: what a method keeps besides, `()` if nothing.
    """

    weights: Weights
    optimizer: PyTree
    fine_tune: PyTree
    own: PyTree = ()


ClientUpdate = Callable[[Any, PyTree, Any, Shard, jax.Array], ClientOutput]
LabeledObjective = Callable[[ServerData], GradientFn]
"""The server's data -> the gradient of a step of its training."""


class ServerWork(NamedTuple):
    """The server's work, bound to a task, its settings and an objective. A method replaces the parts that it does otherwise.

    Attributes:
        step: (state, Aggregate) -> state: what is done with the clients' updates.
        train: (state, ServerData, key) -> (state, metrics): one training on the server's labels.
        statistics: (state, ServerData) -> state: the static batch-norm statistics for the next broadcast.
        pretrain: how many trainings come before round 1.
        average_with_server: (the state that was sent, the state after the server's training, Aggregate) -> Aggregate, where
            the server trains in parallel with its clients; None: it trains after them.
    """

    step: Callable[[Any, Aggregate], Any]
    train: Callable[[Any, ServerData, jax.Array], tuple[Any, Metrics]]
    statistics: Callable[[Any, ServerData], Any]
    pretrain: int
    average_with_server: Callable[[Any, Any, Aggregate], Aggregate] | None = None

    def prepare(self, state: Any, data: ServerData, key: jax.Array) -> tuple[Any, Metrics]:
        """The work before round 1: trainings, each with a key of its own, then the first statistics."""
        if self.pretrain:

            def one(i: jax.Array, state: Any) -> Any:
                return self.train(state, data, jax.random.fold_in(key, i))[0]

            state = jax.lax.fori_loop(0, self.pretrain, one, state)
        return self.statistics(state, data), {}

    def finish_round(self, state: Any, aggregate: Aggregate, data: ServerData, key: jax.Array) -> tuple[Any, Metrics]:
        """The work at the end of a round: the aggregation step and the training, then the statistics."""
        if self.average_with_server is None:
            state, metrics = self.train(self.step(state, aggregate), data, key)
        else:
            trained, metrics = self.train(state, data, key)
            state = self.step(trained, self.average_with_server(state, trained, aggregate))
        return self.statistics(state, data), metrics

    def train_alone(self, state: Any, data: ServerData, key: jax.Array) -> tuple[Any, Metrics]:
        """The work of a round without clients: the training, then the statistics."""
        state, metrics = self.train(state, data, key)
        return self.statistics(state, data), metrics


def server_work(task: Task, server: Server, objective: LabeledObjective | None = None) -> ServerWork:
    """The usual work of a server with one global model, whose state is a ServerState.

    Args:
        task: network and views.
        server: the server's settings.
        objective: of its training; None: the cross-entropy of the labeled examples ((FL)^2, Eq. 2).
    """
    objective = objective or (lambda data: supervised_gradient(task, data.labeled))

    def step(state: ServerState, aggregate: Aggregate) -> ServerState:
        weights, optimizer = server_step(server, state.weights, state.optimizer, aggregate)
        return state._replace(weights=weights, optimizer=optimizer)

    def train(state: ServerState, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        return fine_tune(task, server, state, data, key, objective(data))

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        return state._replace(weights=with_statistics(task, server.static_norm, state.weights, data))

    in_parallel = average_with_server if server.training == "parallel" else None
    return ServerWork(step, train, statistics, server.pretrain, in_parallel)


def averaging_method(
    task: Task,
    client: Training,
    server: Server,
    client_update: ClientUpdate,
    *,
    labels_at: tuple[str, ...] = ("server",),
    work: ServerWork | None = None,
) -> Method:
    """A method whose server broadcasts its model, averages, fine-tunes on labels it has, and is evaluated: all but the clients.

    Args:
        task: network and views.
        client: local training; its learning rate is broadcast, and its optimizer state is the client state.
        server: the server's settings.
        client_update: (what is broadcast, (), the client's state, Shard, key) -> ClientOutput; `Broadcast` and the optimizer
            state, unless the method replaces `broadcast` and `init`.
        labels_at: where the method can read labels. Where the server has none it only averages and collects statistics.
        work: the server's work; None: the usual one.
    """
    work = work or server_work(task, server)

    def init_(key: jax.Array, spec: DataSpec) -> tuple[ServerState, PyTree]:
        state = init(task, server, key, spec)
        return state, client.init_clients(state.weights.params, spec.num_clients)

    def broadcast(state: ServerState, _: PyTree, cohort: Cohort) -> tuple[Broadcast, PyTree]:
        return Broadcast(state.weights, client.learning_rate(cohort.round), cohort.round, cohort.rounds), ()

    return Method(
        init=init_,
        prepare=work.prepare,
        broadcast=broadcast,
        client_update=client_update,
        server_update=work.finish_round,
        predict={"global": lambda state, images, mask: task.predict(state.weights, images, mask)},
        requires=requirements(task, server, labels_at),
    )


def requirements(task: Task, server: Server, labels_at: tuple[str, ...] = ("server",)) -> Requires:
    """What a method reads whose server trains on labels and collects statistics as its settings say."""
    norm_data = server.static_norm.data if task.norm == "static" and server.static_norm is not None else ""
    return Requires(
        labels_at=labels_at,
        next_cohort=norm_data == "cohort",
        pool=norm_data == "all",
        server_training=TRAINING if "server" in labels_at else ("after",),
    )


def method_without_clients(
    *,
    init: Callable[[jax.Array, DataSpec], PyTree],
    train: Callable[[PyTree, ServerData, jax.Array], tuple[PyTree, Metrics]],
    predict: Callable[[PyTree, jax.Array, jax.Array], jax.Array],
    requires: Requires,
) -> Method:
    """A method whose work is the server's alone: its clients keep nothing, receive nothing and send nothing.

    Args:
        init: (key, DataSpec) -> the server's state.
        train: (state, ServerData, key) -> (state, metrics): a round.
        predict: see Method.
        requires: what the server reads.
    """
    return Method(
        init=lambda key, spec: (init(key, spec), ()),
        broadcast=lambda state, clients, cohort: ((), ()),
        client_update=lambda shared, own, state, shard, key: ClientOutput((), jnp.zeros(()), (), {}),
        server_update=lambda state, aggregate, data, key: train(state, data, key),
        predict={"global": predict},
        requires=requires._replace(clients=False, server_training=("after",)),
    )


def init(task: Task, server: Server, key: jax.Array, spec: DataSpec) -> ServerState:
    """A fresh server."""
    weights = task.init(key, spec.image_shape)
    optimizer = server.fine_tune.init(weights.params) if "server" in task.labels_at else ()
    return ServerState(weights, server.optimizer.init(weights.params), optimizer)


def server_step(server: Server, weights: Weights, optimizer: PyTree, aggregate: Aggregate) -> tuple[Weights, PyTree]:
    """The server optimizer's step along the aggregated update d = W_t - sum_k beta_k W_k: (weights, optimizer state).

    With momentum .5: v <- .5 v + d, W <- W_t - v ((FL)^2, Table 4; SemiFL). Statistics, where clients send them, are
    averaged without momentum. If no client took part, nothing changes, the momentum neither.
    """
    d = aggregate.update
    change, new_optimizer = server.optimizer.update(d.params, optimizer, weights.params)
    params = optax.apply_updates(weights.params, change)
    stats = jax.tree.map(lambda s, u: s - u, weights.stats, d.stats) if d.stats != () else weights.stats
    new, old = (Weights(params, stats), new_optimizer), (weights, optimizer)
    return jax.tree.map(lambda x, y: jnp.where(aggregate.weight > 0, x, y), new, old)


def mean_of_stack(stacked: Aggregate) -> Aggregate:
    """Stacked updates [M, ...] as the aggregator `sum` gives them: their weighted mean, zeros where all weights are 0."""
    weight = jnp.sum(stacked.weight)
    safe = jnp.where(weight > 0, weight, 1.0)
    return Aggregate(jax.tree.map(lambda u: weighted_sum(u, stacked.weight) / safe, stacked.update), weight)


def average_with_server(sent: ServerState, trained: ServerState, aggregate: Aggregate) -> Aggregate:
    """The aggregate in which the server's own model counts one half, and the clients' average the other (SemiFL's ablation).

    The server optimizer then steps from W_s, the model that the server trained from the sent one, W_t:

        d = W_s - (W_s + sum_k beta_k W_k) / 2 = (W_s - W_t + sum_k beta_k (W_t - W_k)) / 2

    Where no client took part the weight stays 0: the server keeps W_s, and its momentum does not change.

    Args:
        sent: with W_t.
        trained: with W_s.
        aggregate: of the clients, its update sum_k beta_k (W_t - W_k).
    """

    def halves(update: PyTree, trained: PyTree, sent: PyTree) -> PyTree:
        return jax.tree.map(lambda u, s, t: (s - t + u) / 2, update, trained, sent)

    update, (params, stats), (sent_params, sent_stats) = aggregate.update, trained.weights, sent.weights
    of_stats = halves(update.stats, stats, sent_stats) if update.stats != () else ()
    return aggregate._replace(update=Weights(halves(update.params, params, sent_params), of_stats))


def fine_tune(
    task: Task, server: Server, state: ServerState, data: ServerData, key: jax.Array, gradient: GradientFn
) -> tuple[ServerState, Metrics]:
    """Training on the server's labeled data. Where it has none there is no training, and no loss."""
    if "server" not in task.labels_at:
        return state, {}
    order_key, train_key = jax.random.split(key)
    training = server.fine_tune
    trained = minimize(
        task,
        training,
        gradient,
        Fit(state.weights, state.fine_tune),
        training.schedule(order_key, data.labeled.mask),
        learning_rate=training.learning_rate(data.round),
        key=train_key,
    )
    weights, optimizer = trained.carry
    return state._replace(weights=weights, fine_tune=optimizer), {"server/loss": trained.metrics["loss"]}


def with_statistics(task: Task, settings: StaticNorm | None, weights: Weights, data: ServerData) -> Weights:
    """`weights` with static batch-norm statistics, where the task uses them: `settings` says over which data.

    Every layer normalizes by the batch's own statistics while they are collected, on images without augmentation.
    """
    if settings is None or task.norm != "static" or not weights.stats:
        return weights
    total = norm.start(weights.stats)
    if "server" in task.labels_at:
        total = _collect(task, settings, weights, data.labeled, settings.labeled_batch_size, total)
    if settings.data == "cohort":
        total = _collect(task, settings, weights, flatten(data.next_cohort), settings.unlabeled_batch_size, total)
    elif settings.data == "all":
        total = _collect(task, settings, weights, data.unlabeled, settings.unlabeled_batch_size, total)
    return weights._replace(stats=norm.finish(total, weights.stats))


def flatten(examples: Examples) -> Examples:
    """The examples of M holders [M, n] as those of one, real ones first, in order."""
    order = jnp.argsort(~examples.mask.ravel(), stable=True)
    return examples._replace(index=examples.index.ravel()[order], count=jnp.sum(examples.count))


def _collect(
    task: Task, settings: StaticNorm, weights: Weights, examples: Examples, batch_size: int, total: norm.Cumulative
) -> norm.Cumulative:
    """Adds the statistics of all batches of `examples`."""
    n = examples.index.shape[0]
    size = min(batch_size, n)

    def step(s: jax.Array, total: norm.Cumulative) -> norm.Cumulative:
        batch = batching.in_order(s, examples.count, n, size)
        _, stats = task.train_logits(weights, task.views.plain(examples.take(batch.positions)), batch.mask)
        weight = jnp.sum(batch.mask, dtype=jnp.float32) if settings.weighting == "examples" else 1.0
        return norm.add(total, stats, weight)

    return jax.lax.fori_loop(0, -(-examples.count // size), step, total)
