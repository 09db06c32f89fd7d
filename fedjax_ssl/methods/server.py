"""The server's side of a method with one global model: aggregation step, fine-tuning on its labels, static batch norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.method import Aggregate, ClientOutput, Cohort, DataSpec, Method, ServerData, Shard, weighted_sum
from fedjax_ssl.methods import local
from fedjax_ssl.methods.local import Gradient, Training
from fedjax_ssl.methods.task import Task, Weights
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
        rounds: R, how many rounds the run has, for what is annealed over all of it.
        cohort_size: M, clients a round.
    """

    optimizer: optax.GradientTransformation
    fine_tune: Training
    pretrain: int
    static_norm: StaticNorm | None
    training: str = "after"
    rounds: int = 1
    cohort_size: int = 1


class Broadcast(NamedTuple):
    """What goes down to every client: the global model with its statistics, this round's learning rate, its number from 0."""

    weights: Weights
    learning_rate: jax.Array
    round: jax.Array = np.int32(0)  # type: ignore[assignment]


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
LabeledObjective = Callable[[ServerData], Gradient]
"""The server's data -> the gradient of a step of its training."""
Trainer = Callable[[Any, jax.Array], tuple[Any, Metrics]]
"""(state, key) -> (state, metrics): one of the server's trainings."""


def averaging_method(
    task: Task,
    client: Training,
    server: Server,
    client_update: ClientUpdate,
    *,
    labels_at: tuple[str, ...] = ("server",),
    objective: LabeledObjective | None = None,
) -> Method:
    """A method whose server broadcasts its model, averages, fine-tunes on labels it has, and is evaluated: all but the clients.

    Args:
        task: network and views.
        client: local training; its learning rate is broadcast, and its optimizer state is the client state.
        server: the server's settings.
        client_update: (what is broadcast, (), the client's state, Shard, key) -> ClientOutput; `Broadcast` and the optimizer's
            state, unless the method replaces `broadcast` and `init`.
        labels_at: where the method can read labels. Where the server has none it only averages and collects statistics.
        objective: of the fine-tuning; None: the cross-entropy of the labeled examples.
    """

    def init_(key: jax.Array, spec: DataSpec) -> tuple[ServerState, PyTree]:
        state = init(task, server, key, spec)
        return state, client.init_many(state.weights.params, spec.num_clients)

    def broadcast(state: ServerState, _: PyTree, cohort: Cohort) -> tuple[Broadcast, PyTree]:
        return Broadcast(state.weights, client.learning_rate(cohort.round), cohort.round), ()

    return Method(
        init=init_,
        prepare=partial(prepare, task, server, objective=objective),
        broadcast=broadcast,
        client_update=client_update,
        server_update=partial(finish_round, task, server, objective=objective),
        predict=lambda state, images, mask: task.predict(state.weights, images, mask),
        labels_at=labels_at,
        server_training=TRAINING if "server" in labels_at else ("after",),
        next_cohort=reads_next_cohort(task, server),
    )


def reads_next_cohort(task: Task, server: Server) -> bool:
    """Whether the server collects statistics over the data of the clients that take part next."""
    return task.norm == "static" and server.static_norm is not None and server.static_norm.data == "cohort"


def method_without_clients(
    *,
    init: Callable[[jax.Array, DataSpec], PyTree],
    train: Callable[[PyTree, ServerData, jax.Array], tuple[PyTree, Metrics]],
    predict: Callable[[PyTree, jax.Array, jax.Array], jax.Array],
) -> Method:
    """A method whose work is the server's alone: its clients keep nothing, receive nothing and send nothing.

    Args:
        init: (key, DataSpec) -> the server's state.
        train: (state, ServerData, key) -> (state, metrics): a round.
        predict: see Method.
    """
    return Method(
        init=lambda key, spec: (init(key, spec), ()),
        broadcast=lambda state, clients, cohort: ((), ()),
        client_update=lambda shared, own, kept, shard, key: ClientOutput((), jnp.zeros(()), (), {}),
        server_update=lambda state, aggregate, data, key: train(state, data, key),
        predict=predict,
    )


def init(task: Task, server: Server, key: jax.Array, spec: DataSpec) -> ServerState:
    """A fresh server."""
    weights = task.init(key, spec.image_shape)
    fine_tune = server.fine_tune.init(weights.params) if "server" in task.labels_at else ()
    return ServerState(weights, server.optimizer.init(weights.params), fine_tune)


def pretrain(server: Server, train: Trainer, state: Any, key: jax.Array) -> Any:
    """The state after `server.pretrain` trainings, each with a key of its own."""
    if not server.pretrain:
        return state
    return jax.lax.fori_loop(0, server.pretrain, lambda i, state: train(state, jax.random.fold_in(key, i))[0], state)


def prepare(
    task: Task,
    server: Server,
    state: ServerState,
    data: ServerData,
    key: jax.Array,
    *,
    objective: LabeledObjective | None = None,
) -> tuple[ServerState, Metrics]:
    """The server's work before round 1: `server.pretrain` supervised trainings, then the first sBN statistics."""

    def train(state: ServerState, key: jax.Array) -> tuple[ServerState, Metrics]:
        return fine_tune(task, server, state, data, key, objective=objective)

    state = pretrain(server, train, state, key)
    return state._replace(weights=with_statistics(task, server.static_norm, state.weights, data)), {}


def finish_round(
    task: Task,
    server: Server,
    state: ServerState,
    aggregate: Aggregate,
    data: ServerData,
    key: jax.Array,
    *,
    objective: LabeledObjective | None = None,
) -> tuple[ServerState, Metrics]:
    """The server's work at the end of a round: aggregation step and training, sBN statistics for the next broadcast."""
    if server.training == "after":
        return train_alone(task, server, step(server, state, aggregate), data, key, objective=objective)
    sent = state.weights
    state, metrics = fine_tune(task, server, state, data, key, objective=objective)
    state = step(server, state, with_server(sent, state.weights, aggregate))
    return state._replace(weights=with_statistics(task, server.static_norm, state.weights, data)), metrics


def train_alone(
    task: Task,
    server: Server,
    state: ServerState,
    data: ServerData,
    key: jax.Array,
    *,
    objective: LabeledObjective | None = None,
) -> tuple[ServerState, Metrics]:
    """The server's work without an aggregation: fine-tuning, then sBN statistics."""
    state, metrics = fine_tune(task, server, state, data, key, objective=objective)
    return state._replace(weights=with_statistics(task, server.static_norm, state.weights, data)), metrics


def step(server: Server, state: ServerState, aggregate: Aggregate) -> ServerState:
    """`move` of the state's weights."""
    weights, optimizer = move(server, state.weights, state.optimizer, aggregate)
    return state._replace(weights=weights, optimizer=optimizer)


def move(server: Server, weights: Weights, optimizer: PyTree, aggregate: Aggregate) -> tuple[Weights, PyTree]:
    """The server optimizer's step along the aggregated update d = W_t - sum_k beta_k W_k: (weights, optimizer's state).

    With momentum .5: v <- .5 v + d, W <- W_t - v ((FL)^2, Table 4; SemiFL). Statistics, where clients send them, are
    averaged without momentum. If no client took part, nothing changes, the momentum neither.
    """
    d = aggregate.update
    change, moved = server.optimizer.update(d.params, optimizer, weights.params)
    params = optax.apply_updates(weights.params, change)
    stats = jax.tree.map(lambda s, u: s - u, weights.stats, d.stats) if d.stats != () else weights.stats
    new, old = (Weights(params, stats), moved), (weights, optimizer)
    return jax.tree.map(lambda x, y: jnp.where(aggregate.weight > 0, x, y), new, old)


def mean_of_stack(stacked: Aggregate) -> Aggregate:
    """Stacked updates [M, ...] as the aggregator `sum` gives them: their weighted mean, zeros where all weights are 0."""
    weight = jnp.sum(stacked.weight)
    safe = jnp.where(weight > 0, weight, 1.0)
    return Aggregate(jax.tree.map(lambda u: weighted_sum(u, stacked.weight) / safe, stacked.update), weight)


def with_server(sent: Weights, trained: Weights, aggregate: Aggregate) -> Aggregate:
    """The aggregate in which the server's own model counts one half, and the clients' average the other (SemiFL's ablation).

    The server optimizer then steps from W_s, the model that the server trained from the sent one, W_t:

        d = W_s - (W_s + sum_k beta_k W_k) / 2 = (W_s - W_t + sum_k beta_k (W_t - W_k)) / 2

    Where no client took part the weight stays 0: the server keeps W_s, and its momentum does not move.

    Args:
        sent: W_t.
        trained: W_s.
        aggregate: of the clients, its update sum_k beta_k (W_t - W_k).
    """

    def halves(update: PyTree, trained: PyTree, sent: PyTree) -> PyTree:
        return jax.tree.map(lambda u, s, t: (s - t + u) / 2, update, trained, sent)

    update = aggregate.update
    stats = halves(update.stats, trained.stats, sent.stats) if update.stats != () else ()
    return aggregate._replace(update=Weights(halves(update.params, trained.params, sent.params), stats))


def fine_tune(
    task: Task,
    server: Server,
    state: ServerState,
    data: ServerData,
    key: jax.Array,
    *,
    objective: LabeledObjective | None = None,
) -> tuple[ServerState, Metrics]:
    """Training on the server's labeled data, by their cross-entropy ((FL)^2, Eq. 2) unless another objective is given.

    Where it has none there is no training, and no loss.
    """
    if "server" not in task.labels_at:
        return state, {}
    order_key, train_key = jax.random.split(key)
    training = server.fine_tune
    trained = local.train(
        task,
        training,
        objective(data) if objective else local.supervised_gradient(task, data.labeled),
        (state.weights, state.fine_tune),
        training.schedule(order_key, data.labeled.mask),
        learning_rate=training.learning_rate(data.round),
        key=train_key,
    )
    new = state._replace(weights=trained.weights, fine_tune=trained.kept)
    return new, {"server/loss": trained.metrics["loss"]}


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
