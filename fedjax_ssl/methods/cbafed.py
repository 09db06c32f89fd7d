"""CBAFed (Li, Li and Wang, CVPR 2023): fixed pseudo-labels with class-balanced thresholds, for labels at some clients.

Equations and constants are those of the authors' released code, as the paper's text was not at hand. Unlike there, a client
shuffles its accepted examples.
"""

from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import of_kind
from fedjax_ssl.local import Broadcast, Gradients, Server, ServerState, ServerWork, Setup, Task, Training, TrainState, Weights
from fedjax_ssl.local.server import server_step
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, DataSpec, Method, parameters_of
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.options import Count, LabeledRepeats, Options
from fedjax_ssl.ssl import balanced, pseudo_labels


class CBAFedOptions(Options):
    """CBAFed's own settings."""

    largest_threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.95, description="Upper limit of the classes' thresholds (0.9 for SVHN)."
    )
    second_choice: bool = Field(
        default=True,
        description="Whether an example whose pseudo-label is not accepted gets its second most probable class, if that is a "
        "rare one.",
    )
    residual_epochs: Count = Field(
        default=5,
        description="Number of epochs between two residual connections of a labeled client. Each sets the weights to 0.8 times "
        "those after the last connection (at first, after one epoch) plus 0.2 times the present ones. 0 leaves them out.",
    )
    residual_rounds: Count = Field(
        default=5,
        description="Every so many rounds the global model becomes the mean of itself and of the model as many rounds earlier. "
        "0 leaves this residual connection out.",
    )


class ClassCounts(NamedTuple):
    """Numbers of examples of each class, float32 [C]: with labels, and with accepted pseudo-labels."""

    labeled: jax.Array
    pseudo: jax.Array


class Sent(NamedTuple):
    """What a client uploads: its update, and its counts divided by its weight, so that a weighted sum adds the counts up."""

    update: Weights
    counts: ClassCounts


class CBAFedExtra(NamedTuple):
    """What the server keeps beside the model: the last known counts, the model R of `server_work`, and the rounds done."""

    counts: ClassCounts
    residual: Weights
    rounds: jax.Array  # int32 scalar


def cbafed(*, task: Task, client: Training, server: Server, options: CBAFedOptions = CBAFedOptions()) -> Method:
    """CBAFed: labeled clients train on their labels, the others on what the received model labels once, at the beginning.

    Clients are weighted by their number of labeled, or accepted, examples. The Broadcast's `extra` is `balanced.Thresholds` by
    the counts of the last round (`fedjax_ssl.ssl.balanced`).
    """

    def thresholds(state: ServerState, _: PyTree) -> balanced.Thresholds:
        return balanced.class_balanced(state.extra.counts.labeled + state.extra.counts.pseudo, options.largest_threshold)

    setup = Setup(task, client, server, options)
    method = local.averaging_method(
        task, client, server, partial(client_update, setup), labels_at=("some_clients",), views=("labeled", "weak"),
        work=server_work(setup), extra=thresholds,
    )  # fmt: skip

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, PyTree]:
        state, clients = method.init(key, spec)
        none = jnp.zeros(spec.num_classes)
        return state._replace(extra=CBAFedExtra(ClassCounts(none, none), state.weights, jnp.int32(0))), clients

    return method._replace(init=init, parameters=lambda sent: parameters_of(sent.update))


def server_work(setup: Setup) -> ServerWork:
    """The server's work, whose step has a residual connection and keeps the clients' counts.

    Every `residual_rounds` rounds W <- (R + W) / 2, and R <- W; R begins as the model after the first round.
    """
    task, _, server, options = setup

    def step(state: ServerState, aggregate: Aggregate) -> ServerState:
        (counts, residual, rounds), sent = state.extra, aggregate.update
        weights, optimizer = server_step(server, state.weights, state.optimizer, Aggregate(sent.update, aggregate.weight))
        is_due = (rounds > 0) & (rounds % max(options.residual_rounds, 1) == 0) & (options.residual_rounds > 0)
        weights = optax.tree.where(is_due, jax.tree.map(lambda r, w: (r + w) / 2, residual, weights), weights)
        residual = optax.tree.where(is_due | (rounds == 0), weights, residual)
        new = jax.tree.map(lambda x: x * aggregate.weight, sent.counts)
        # Labels do not change: where no labeled client took part, the counts are those of the last one that did.
        labeled = jnp.where(jnp.sum(new.labeled) > 0, new.labeled, counts.labeled)
        extra = CBAFedExtra(ClassCounts(labeled, new.pseudo), residual, rounds + 1)
        return state._replace(weights=weights, optimizer=optimizer, extra=extra)

    return local.server_work(task, server)._replace(step=step)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it trains on its labels, or on pseudo-labels that the received model makes of one weak view each."""
    task, client, _, options = setup
    view_key, order_key, train_key = jax.random.split(key, 3)
    mask, is_labeled = data.unlabeled.mask, data.labeled.count > 0
    probs = local.class_probabilities(task, shared.weights, data.unlabeled, view_key)
    (label, confidence), accepted = balanced.accept(probs, mask, shared.extra, second=options.second_choice)
    examples = of_kind(data.labeled, data.unlabeled, label, accepted)

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        images = examples.take(batch.positions)
        # The view that was labeled, whose key is that of the example's row.
        keys = jax.vmap(lambda i: jax.random.fold_in(view_key, i))(batch.positions)
        same = jax.vmap(lambda key, image: task.views.weak(key, image[None])[0])(keys, images)
        shape = (-1, *[1] * (same.ndim - 1))
        views = jnp.where(is_labeled.reshape(shape), task.views.labeled(key, images), same)
        labels = examples.labels[batch.positions]
        return local.cross_entropy_gradients(task, weights, views, labels, batch.mask, batch.mask, key)

    schedule = local.repeated(LabeledRepeats(), data, client, lambda client: client.schedule(order_key, examples.mask))
    per_epoch = -(-data.labeled.count // client.batch_size)
    anchor, rate = shared.weights.params, shared.learning_rate

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        found = gradient(state.weights, batch, key)
        new = local.apply_gradients(task, client, state, found, rate, anchor=anchor)
        return with_residual(options, new, batch, jnp.where(is_labeled, per_epoch, 0)), found.metrics

    start = TrainState(shared.weights, client.start(anchor, optimizer), (shared.weights,))
    trained = local.train(start, step, schedule, train_key)
    weight = jnp.where(is_labeled, data.labeled.count, jnp.sum(accepted)).astype(jnp.float32)
    stored = client.stored(trained.carry.optimizer)
    down = shared.weights, shared.extra.per_class, shared.extra.rare
    output = local.output_of(task, shared.weights, trained.carry.weights, trained, weight, stored, down=down)
    classes = jnp.arange(task.num_classes)[:, None]
    counts = ClassCounts(
        jnp.sum((data.labeled.labels == classes) & data.labeled.mask, axis=1) / jnp.maximum(weight, 1.0),
        jnp.sum((label == classes) & accepted, axis=1) / jnp.maximum(weight, 1.0),
    )
    sent = Sent(output.update, counts)
    metrics = {
        **output.metrics,
        **pseudo_labels.diagnostics(label, data.true_labels, accepted, mask),
        **pseudo_labels.examples(label, accepted, confidence),
        "client/mask_rate": mean(accepted, mask),
        "comm/bytes_up": Sum(jnp.int32(num_bytes(output.update) + num_bytes(counts.pseudo))),
    }
    return output._replace(update=sent, metrics=metrics)


def with_residual(options: CBAFedOptions, state: TrainState, batch: Batch, per_epoch: jax.Array) -> TrainState:
    """The state after a step, with the residual connection where the step ends an epoch of `per_epoch` steps; 0: never.

    R are the weights after the first epoch; after every `residual_epochs` further ones W <- .8 R + .2 W, and R <- W. The
    optimizer's state does not change.
    """
    (residual,), every = state.companions, max(options.residual_epochs, 1)
    ends = (per_epoch > 0) & ((batch.step + 1) % jnp.maximum(per_epoch, 1) == 0)
    is_due = ends & (batch.epoch > 0) & (batch.epoch % every == 0) & (options.residual_epochs > 0)
    weights = optax.tree.where(is_due, jax.tree.map(lambda r, w: 0.8 * r + 0.2 * w, residual, state.weights), state.weights)
    kept = optax.tree.where(is_due | (ends & (batch.epoch == 0)), weights, residual)
    return state._replace(weights=weights, companions=(kept,))
