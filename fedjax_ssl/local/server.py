"""What the server does in a method with one global model: aggregation, training on its labels, batch-norm statistics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Int32, Shaped

from fedjax_ssl.arrays import Count, Key, Logits, Mask, Number, PyTree, check_alike
from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import Array, Examples
from fedjax_ssl.local.counters import count_examples
from fedjax_ssl.local.objectives import supervised_gradient
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.local.training import GradientFn, Training, TrainState, minimize
from fedjax_ssl.method import VIEWS, Aggregate, ClientData, ClientOutput, Cohort, DataSpec, Method, Requires, ServerData
from fedjax_ssl.metrics import Metrics
from fedjax_ssl.models import norm
from fedjax_ssl.options import MANY


class StaticNorm(NamedTuple):
    """How static batch-norm statistics (sBN) are collected: a cumulative average of the statistics of batches.

    They are collected over the server's `labeled` data; over these and all data of the next round's `cohort` ((FL)^2, Appendix
    E); or over these and `all` unlabeled data ((FL)^2's released code, SemiFL). Labeled examples come first; they are sorted by
    class if the order is `joined` or `class`. Where it is `joined`, labeled and other examples are one sequence, and a batch of
    the unlabeled size may hold both (SemiFL). For `class` the pool comes sorted by class, too.
    """

    data: str
    weighting: str  # whether a batch counts with its number of `examples`, or all `batches` alike ((FL)^2's released code)
    labeled_batch_size: int
    unlabeled_batch_size: int
    order: str = "apart"


class Server(NamedTuple):
    """The server's settings.

    It trains `after` the aggregation (fine-tuning), or in `parallel` with the clients, from the broadcast model, and is then
    averaged with them (SemiFL's ablation).
    """

    optimizer: optax.GradientTransformation  # any of optax; its gradient is the aggregated update, broadcast minus local
    training: Training  # supervised training on the server's labels, each round, where it has any
    pretrain: int  # number of such trainings before round 1
    static_norm: StaticNorm | None  # None: no sBN statistics are collected, even where the task uses them
    when: str = "after"


class Broadcast(NamedTuple):
    """What every client receives."""

    weights: Weights  # the global model
    learning_rate: Number
    round: Array = 0  # the index of the round, from 0
    rounds: Any = None  # how many rounds the run has; None unless `Requires.rounds`
    extra: PyTree = ()  # what a method adds


class ServerState(NamedTuple):
    """The server's state."""

    weights: Weights  # the global model
    optimizer: PyTree  # state of the server optimizer (its momentum)
    fine_tune: PyTree  # state of the optimizer of the training on labels; `()` without labels
    extra: PyTree = ()  # what a method adds


class ServerWork(NamedTuple):
    """The server's work in a round, of which a method may replace parts.

    Where the server trains in `parallel` with its clients, `average_with_server` joins its model with theirs.
    """

    step: Callable[[PyTree, Aggregate], PyTree]  # from one state to the next, by the clients' updates
    train: Callable[[PyTree, ServerData, Key], tuple[PyTree, Metrics]]  # one training on the server's labels
    statistics: Callable[[PyTree, ServerData], PyTree]  # gives a state the static batch-norm statistics for the next broadcast
    pretrain: int  # how many trainings come before round 1
    parallel: bool = False  # whether the server trains beside its clients, not after them

    def prepare(self, state: PyTree, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
        """The work before round 1: the trainings, each with its own key, then the first batch-norm statistics."""
        if self.pretrain:
            state = jax.lax.fori_loop(0, self.pretrain, lambda i, s: self.train(s, data, jax.random.fold_in(key, i))[0], state)
        return self.statistics(state, data), {}

    def finish_round(self, state: PyTree, aggregate: Aggregate, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
        """The work at the end of a round: the aggregation step and the training, then the statistics."""
        if self.parallel:
            trained, metrics = self.train(state, data, key)
            state = self.step(trained, average_with_server(state, trained, aggregate))
        else:
            state, metrics = self.train(self.step(state, aggregate), data, key)
        return self.statistics(state, data), metrics

    def train_alone(self, state: PyTree, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
        """The work of a round without clients: the training, then the statistics."""
        state, metrics = self.train(state, data, key)
        return self.statistics(state, data), metrics


def server_work(task: Task, server: Server) -> ServerWork:
    """The usual work of a server with one global model, which trains it by `supervised_gradient`."""

    def step(state: ServerState, aggregate: Aggregate) -> ServerState:
        weights, optimizer = server_step(server, state.weights, state.optimizer, aggregate)
        return state._replace(weights=weights, optimizer=optimizer)

    def train(state: ServerState, data: ServerData, key: Key) -> tuple[ServerState, Metrics]:
        start = TrainState(state.weights, state.fine_tune)
        end, metrics = train_server(task, server, lambda _: supervised_gradient(task, data.labeled), start, data, key)
        return state._replace(weights=end.weights, fine_tune=end.optimizer), metrics

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        return state._replace(weights=with_statistics(task, server.static_norm, state.weights, data))

    return ServerWork(step, train, statistics, server.pretrain, server.when == "parallel")


def train_server(
    task: Task, server: Server, objective: Callable[[Count], GradientFn], start: TrainState, data: ServerData, key: Key
) -> tuple[TrainState, Metrics]:
    """Trains on the server's labels: the new TrainState, and metrics; `start` itself where the server has no labels.

    `objective` makes the GradientFn of a step, given how many steps the training has. Metrics have the group `server/`.
    """
    if "server" not in task.labels_at:
        return start, {}
    order_key, train_key = jax.random.split(key)
    training = server.training
    schedule, rate = training.schedule(order_key, data.labeled.mask), training.learning_rate(data.round)
    gradient = objective(schedule.steps)
    end, metrics, *_ = minimize(task, training, gradient, start, schedule, learning_rate=rate, key=train_key)
    return end, {f"server/{name}": value for name, value in metrics.items()}


def averaging_method(
    task: Task,
    client: Training,
    server: Server,
    client_update: Callable[[PyTree, PyTree, PyTree, ClientData, Key], ClientOutput],
    *,
    labels_at: tuple[str, ...] = ("server",),
    views: tuple[str, ...] = VIEWS,
    work: ServerWork | None = None,
    extra: Callable[[ServerState, Cohort], PyTree] = lambda state, cohort: (),
) -> Method:
    """A method with one global model, from what its clients do: the server broadcasts, averages and trains on its labels.

    `client_update`: (Broadcast, (), the client's optimizer state, ClientData, key) -> ClientOutput, unless the method replaces
    `broadcast` or `init`. `labels_at` is where the method can read labels, and `views` are the views that its clients train on.
    `work` is `server_work` unless given. `extra` computes the Broadcast's field of that name.
    """
    work = work or server_work(task, server)

    def init_all(key: Key, spec: DataSpec) -> tuple[ServerState, PyTree]:
        state = init(task, server, key, spec)
        return state, optax.tree.batch_shape(client.init(state.weights.params), (spec.num_clients,))

    def broadcast(state: ServerState, _: PyTree, cohort: Cohort) -> tuple[Broadcast, PyTree]:
        rate = client.learning_rate(cohort.round)
        return Broadcast(state.weights, rate, cohort.round, cohort.rounds, extra(state, cohort)), ()

    return Method(
        init=init_all,
        prepare=work.prepare,
        broadcast=broadcast,
        client_update=client_update,
        server_update=work.finish_round,
        predict={"global": lambda state, images, mask: task.predict(state.weights, images, mask)},
        requires=requirements(task, server, labels_at, views),
    )


def requirements(
    task: Task, server: Server, labels_at: tuple[str, ...] = ("server",), views: tuple[str, ...] = VIEWS
) -> Requires:
    """The Requires of a method whose server trains and collects batch-norm statistics as its settings say."""
    norm_data = server.static_norm.data if task.norm == "static" and server.static_norm is not None else ""
    return Requires(
        labels_at=labels_at,
        next_cohort=norm_data == "cohort",
        pool=norm_data == "all",
        server_training=("after", "parallel") if "server" in labels_at else ("after",),
        views=views,
    )


def method_without_clients(
    *,
    init: Callable[[Key, DataSpec], PyTree],
    train: Callable[[PyTree, ServerData, Key], tuple[PyTree, Metrics]],
    predict: Callable[[PyTree, Shaped[Array, " B *_"], Mask], Logits],
    requires: Requires,
) -> Method:
    """A method whose rounds are the server's `train` alone: clients have no state, receive nothing and send nothing."""
    return Method(
        init=lambda key, spec: (init(key, spec), ()),
        broadcast=lambda state, clients, cohort: ((), ()),
        client_update=lambda shared, per_client, state, data, key: ClientOutput((), jnp.zeros(()), (), {}),
        server_update=lambda state, aggregate, data, key: train(state, data, key),
        predict={"global": predict},
        requires=requires._replace(clients=False, server_training=("after",)),
    )


def init(task: Task, server: Server, key: Key, spec: DataSpec) -> ServerState:
    """The server's state before round 1."""
    weights = task.init(key, spec.image_shape)
    optimizer = server.training.init(weights.params) if "server" in task.labels_at else ()
    return ServerState(weights, server.optimizer.init(weights.params), optimizer)


def server_step(server: Server, weights: Weights, optimizer: PyTree, aggregate: Aggregate) -> tuple[Weights, PyTree]:
    """The server optimizer's step along the aggregated update d = W_t - sum_k beta_k W_k: (weights, optimizer state).

    With momentum .5: v <- .5 v + d, W <- W_t - v ((FL)^2, Table 4; SemiFL). Statistics that clients send are averaged without
    momentum. If no client took part, neither the weights nor the momentum change. ValueError for an update that is no `Weights`
    like the server's own; its statistics may be `()`.
    """
    d = aggregate.update
    check_update(d, weights)
    change, new_optimizer = server.optimizer.update(d.params, optimizer, weights.params)
    params = optax.apply_updates(weights.params, change)
    stats = jax.tree.map(lambda s, u: s - u, weights.stats, d.stats) if d.stats != () else weights.stats
    return optax.tree.where(aggregate.weight > 0, (Weights(params, stats), new_optimizer), (weights, optimizer))


def check_update(update: PyTree, weights: Weights) -> None:
    """Raises ValueError, with one line, where an update is not like `weights`, with their statistics or without."""
    if not isinstance(update, Weights):
        accepted = "Weights of parameters and statistics, such as task.update(received, trained)"
        raise ValueError(f"client_update: update: got {type(update).__name__}, accepted: {accepted}")
    like = weights if update.stats != () else weights._replace(stats=())
    check_alike("client_update: update", update, like, "the global model's weights")


def average_with_server(sent: ServerState, trained: ServerState, aggregate: Aggregate) -> Aggregate:
    """The aggregate in which the server's own model counts one half, and the clients' average the other (SemiFL's ablation).

    The server optimizer then steps from W_s, the model obtained by training W_t, the sent model, on the server:

        d = W_s - (W_s + sum_k beta_k W_k) / 2 = (W_s - W_t + sum_k beta_k (W_t - W_k)) / 2

    Where no client took part the weight stays 0, so that the result is W_s.
    """
    update, after, before = aggregate.update, trained.weights, sent.weights
    check_update(update, before)
    if update.stats == ():
        after, before = after._replace(stats=()), before._replace(stats=())
    return aggregate._replace(update=jax.tree.map(lambda u, s, t: (s - t + u) / 2, update, after, before))


def with_statistics(task: Task, settings: StaticNorm | None, weights: Weights, data: ServerData) -> Weights:
    """`weights` with static batch-norm statistics, where the task uses them, over the data that `settings` name.

    They are collected on images without augmentation. Meanwhile each layer normalizes by the statistics of its batch.
    """
    if settings is None or task.norm != "static" or not weights.stats:
        return weights
    labeled = data.labeled if settings.order == "apart" else _by_class(data.labeled)
    parts = [(labeled, settings.labeled_batch_size)] if "server" in task.labels_at else []
    if settings.data != "labeled":
        others = flatten(data.next_cohort) if settings.data == "cohort" else data.unlabeled
        if settings.order == "joined" and parts:
            both = labeled, others
            index, mask = (jnp.concatenate([getattr(one, key) for one in both]) for key in ("index", "mask"))
            others, parts = _real_first(others, index, mask), []
        parts.append((others, settings.unlabeled_batch_size))
    total = norm.start(weights.stats)
    for examples, batch_size in parts:
        total = _collect(task, settings, weights, examples, batch_size, total)
    return weights._replace(stats=norm.finish(total, weights.stats))


def _by_class(examples: Examples) -> Examples:
    """Labeled examples in the order of their labels, padding last; the labels themselves are left out."""
    order = jnp.argsort(jnp.where(examples.mask, examples.labels, MANY), stable=True)
    return examples._replace(index=examples.index[order], labels=None)


def flatten(examples: Examples) -> Examples:
    """The examples of M clients [M, n] as those of one, real ones first, in order."""
    return _real_first(examples, examples.index.ravel(), examples.mask.ravel())


def _real_first(examples: Examples, index: Int32[Array, " n"], mask: Mask) -> Examples:
    """Examples with another index, those in `mask` first, in order."""
    order = jnp.argsort(~mask, stable=True)
    return examples._replace(index=index[order], count=jnp.sum(mask, dtype=jnp.int32))


def _collect(
    task: Task, settings: StaticNorm, weights: Weights, examples: Examples, batch_size: int, total: norm.Cumulative
) -> norm.Cumulative:
    """Adds the statistics of all batches of `examples`."""
    n = examples.index.shape[0]
    size = min(batch_size, n)

    def step(s: Count, total: norm.Cumulative) -> norm.Cumulative:
        batch = batching.in_order(s, examples.count, n, size)
        mask = count_examples(batch.mask)  # `train_logits` marks the logits, which are not used
        _, stats = task.train_logits(weights, task.views.plain(examples.take(batch.positions)), mask)
        weight = jnp.sum(batch.mask, dtype=jnp.float32) if settings.weighting == "examples" else 1.0
        return norm.add(total, stats, weight)

    return jax.lax.fori_loop(0, -(-examples.count // size), step, total)
