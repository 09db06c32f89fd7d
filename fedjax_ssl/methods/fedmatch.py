"""FedMatch (Jeong et al. 2021): parameters in two parts, for labeled and for unlabeled data, and clients that help each other.

theta = sigma + psi. Labels train sigma; unlabeled data train psi, which is sparse and close to sigma. In some rounds a client
also receives the psi of the clients nearest to it, its helpers, whose outputs it follows and with whom it votes on labels. With
labels at the server, it trains sigma and averages the psi of the clients. With labels at the clients, they train both parts in
turn, and the server averages both.

Defaults are the paper's, or those of its released code. Unlike there, batches are shuffled and an epoch goes through all data
of a client, the learning rate depends on the round alone, and the bytes of changed entries are counted exactly.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch, Pair
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import (
    Broadcast,
    Gradients,
    Server,
    ServerState,
    ServerWork,
    Setup,
    Task,
    Trained,
    Training,
    TrainState,
    Weights,
)
from fedjax_ssl.local.server import server_step, with_statistics
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import EVERYWHERE, Aggregate, ClientData, ClientOutput, Cohort, DataSpec, Method, ServerData
from fedjax_ssl.metrics import Mean, Metrics, Sum, added, mean, num_bytes, whole
from fedjax_ssl.models import decomposed
from fedjax_ssl.models.decomposed import Parts
from fedjax_ssl.options import UNLABELED_BATCH, Fraction, LabeledRepeats, Positive, Size, Weight
from fedjax_ssl.ssl import agreement, losses, pseudo_labels


class FedMatchOptions(LabeledRepeats):
    """FedMatch's own settings; weights and thresholds have the names of its code."""

    confidence: Fraction = Field(default=0.85, description="Smallest probability of a prediction that counts as confident.")
    helpers: Positive = Field(default=2, description="Number H of other clients whose models help a client.")
    helper_period: Positive = Field(default=10, description="Number of rounds from one round with helpers to the next.")
    unlabeled_batch_size: Size = UNLABELED_BATCH
    lambda_s: Weight = Field(default=10.0, description="Weight of the cross-entropy on labeled examples.")
    lambda_i: Weight = Field(default=0.01, description="Weight of the consistency with the helpers' predictions.")
    lambda_a: Weight = Field(
        default=0.01, description="Weight of the cross-entropy with the labels on which client and helpers agree."
    )
    lambda_l1: Weight = Field(
        default=1e-5,
        description="Weight of the L1 norm that makes psi sparse, the part of the parameters that unlabeled data train.",
    )
    lambda_l2: Weight = Field(
        default=10.0, description="Weight of ||sigma - psi||_2^2, which keeps psi close to sigma, the part that labels train."
    )
    l1_thres: Weight = Field(
        default=1e-5,
        description="Entries of psi whose size is at most this count as 0, in evaluation and in deciding which entries a "
        "client uploads.",
    )
    delta_thres: Weight = Field(default=1e-5, description="Entries that a training changes by at most this are not uploaded.")


class Helpers(NamedTuple):
    """The psi of a client's H helpers, zeros in rounds without them, and which of them exist, bool [H]."""

    psi: PyTree
    available: jax.Array


class FedMatchClientState(NamedTuple):
    """Whether a client has taken part, the embedding and the psi of its last upload, and the optimizer states of its parts."""

    seen: jax.Array
    embedding: jax.Array  # [C], the model's output on `agreement.embedding_image`
    psi: PyTree
    optimizer: tuple[PyTree, ...]  # each `()` if not persistent


def fedmatch(*, task: Task, client: Training, server: Server, options: FedMatchOptions = FedMatchOptions()) -> Method:
    """FedMatch, for labels at the server or at the clients: parameters in two parts, and clients that help each other."""
    setup = Setup(task, client, server, options)
    update, work = partial(client_update, setup), server_work(setup)
    method = local.averaging_method(task, client, server, update, labels_at=EVERYWHERE, views=("labeled", "strong"), work=work)
    return method._replace(
        init=partial(init, setup),
        broadcast=partial(broadcast, setup),
        predict={"global": lambda state, images, mask: task.predict(evaluated(options, state.weights), images, mask)},
        predict_client={
            "last_upload": lambda state, own, images, mask: jnp.where(
                own.seen, task.predict(of_client(options, state.weights, own.psi), images, mask), jnp.nan
            )
        },
        requires=method.requires._replace(all_states=True, server_training=("after",)),
    )


def trains_both(task: Task) -> bool:
    """Whether clients have labels, and so train and send both parts."""
    return "clients" in task.labels_at


def init(setup: Setup, key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedMatchClientState]:
    """A fresh server, and K clients that have not taken part."""
    task, client, server, _ = setup
    params, stats = task.init(key, spec.image_shape)
    parts, k = decomposed.split(params), spec.num_clients
    optimizer = server.optimizer.init(parts if trains_both(task) else parts.psi)
    fine_tune = server.training.init(parts.sigma) if "server" in task.labels_at else ()
    optimizers = tuple(client.init(part) for part in (parts if trains_both(task) else parts[1:]))
    first = FedMatchClientState(jnp.zeros((), bool), jnp.zeros(task.num_classes), parts.psi, optimizers)
    clients = optax.tree.batch_shape(first, (k,))
    return ServerState(Weights(parts, stats), optimizer, fine_tune), clients


def evaluated(options: FedMatchOptions, weights: Weights) -> Weights:
    """The evaluated network: sigma + sparse(psi)."""
    sigma, psi = weights.params
    return weights._replace(params=optax.tree.add(sigma, decomposed.sparse(psi, options.l1_thres)))


def of_client(options: FedMatchOptions, weights: Weights, psi: PyTree) -> Weights:
    """A client's own network: the global sigma + sparse(psi of its last upload)."""
    return evaluated(options, weights._replace(params=weights.params._replace(psi=psi)))


def server_work(setup: Setup) -> ServerWork:
    """The server's work: it averages what the clients trained, trains sigma where it has labels, and collects statistics."""
    task, _, server, options = setup

    def step(state: ServerState, aggregate: Aggregate) -> ServerState:
        parts, stats = state.weights
        trained = parts if trains_both(task) else parts.psi
        (trained, stats), optimizer = server_step(server, Weights(trained, stats), state.optimizer, aggregate)
        parts = trained if trains_both(task) else parts._replace(psi=trained)
        return state._replace(weights=Weights(parts, stats), optimizer=optimizer)

    def train(state: ServerState, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        (sigma, psi), stats = state.weights
        start = TrainState(Weights(sigma, stats), state.fine_tune, (psi,))
        end, metrics = local.train_server(task, server, lambda _: labeled_gradient(setup, data.labeled), start, data, key)
        weights = Weights(Parts(end.weights.params, psi), end.weights.stats)
        return state._replace(weights=weights, fine_tune=end.optimizer), metrics

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        stats = with_statistics(task, server.static_norm, evaluated(options, state.weights), data).stats
        return state._replace(weights=state.weights._replace(stats=stats))

    return ServerWork(step, train, statistics, server.pretrain)


def broadcast(setup: Setup, state: ServerState, clients: FedMatchClientState, cohort: Cohort) -> tuple[Broadcast, Helpers]:
    """The global model, whose params are Parts, and whether the round has helpers; and the helpers of each client.

    In other rounds no client has helpers, and a client that never took part has none in any round.
    """
    helping = (cohort.round + 1) % setup.options.helper_period == 0
    ids, found = agreement.nearest(clients.embedding, clients.seen, cohort.ids, setup.options.helpers)
    psi = jax.lax.cond(
        helping,
        lambda: jax.tree.map(lambda x: x[ids], clients.psi),
        lambda: jax.tree.map(lambda x: jnp.zeros((*ids.shape, *x.shape[1:]), x.dtype), clients.psi),
    )
    return Broadcast(state.weights, setup.client.learning_rate(cohort.round), extra=helping), Helpers(psi, found & helping)


def client_update(
    setup: Setup, shared: Broadcast, helpers: Helpers, old: FedMatchClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it trains, and uploads the entries that changed. The average is uniform over clients with data."""
    task, _, _, options = setup
    trained = train(setup, shared, helpers, old.optimizer, data, key)
    ((new_sigma, new_psi), stats), optimizers, _ = trained.carry
    sigma, psi = shared.weights.params
    of_sigma = decomposed.changed(new_sigma, sigma, threshold=0.0, delta=options.delta_thres)
    of_psi = decomposed.changed(new_psi, psi, threshold=options.l1_thres, delta=options.delta_thres)
    sent = [of_sigma, of_psi] if trains_both(task) else [of_psi]
    model = Weights(optax.tree.add(of_sigma.value, of_psi.value), stats)
    image = agreement.embedding_image(data.unlabeled.images.shape[1:])[None]
    embedding = jax.nn.softmax(task.predict(model, image, jnp.ones(1, bool)))[0]
    new, took_part = FedMatchClientState(jnp.array(True), embedding, of_psi.value, optimizers), trained.steps > 0
    state = optax.tree.where(took_part, new, old)
    weights, weight = Weights(Parts(of_sigma.value, of_psi.value), stats), jnp.where(took_part, 1.0, 0.0)
    output = local.output_of(task, shared.weights, weights, trained, weight, state)
    update = output.update if trains_both(task) else output.update._replace(params=output.update.params.psi)
    entries, size = jnp.stack([message.entries for message in sent]), num_bytes(psi) // 4
    metrics = {
        **output.metrics,
        "comm/bytes_down": bytes_down(shared, helpers, old),
        "comm/bytes_up": Sum(jnp.sum(decomposed.message_bytes(entries, size)) + num_bytes(update.stats)),
        "client/upload_fraction": Mean(jnp.sum(entries, dtype=jnp.float32), jnp.float32(size * len(sent))),
    }
    return output._replace(update=update, metrics=metrics)


def bytes_down(shared: Broadcast, helpers: Helpers, old: FedMatchClientState) -> Sum:
    """The bytes that a client receives; those of its helpers may be more than an int32 holds.

    A client receives sigma, the statistics, the entries of psi that differ from its last upload, or all of psi if there is
    none, and, in rounds with helpers, the entries in which its helpers differ from the global psi.
    """
    (sigma, psi), stats = shared.weights
    size = num_bytes(psi) // 4
    of_psi = jnp.where(old.seen, decomposed.differing(psi, old.psi), size)

    def of_helpers() -> Sum:
        entries = jax.vmap(decomposed.differing, (0, None))(helpers.psi, psi)
        return added(jnp.where(helpers.available, decomposed.message_bytes(entries, size), 0))

    of_all = jax.lax.cond(shared.extra, of_helpers, lambda: whole(0))
    return whole(num_bytes((sigma, stats))).plus(Sum(decomposed.message_bytes(of_psi, size))).plus(of_all)


def labeled_gradient(setup: Setup, examples: Examples) -> GradientFn:
    """The gradient of lambda_s CE(y, f(x)) for sigma; its companion is psi. An empty batch is no step. Metric `loss` is CE."""
    of_theta = local.supervised_gradient(setup.task, examples)

    def gradient(weights: Weights, batch: Batch, key: jax.Array, psi: PyTree) -> Gradients:
        gradients = of_theta(weights._replace(params=optax.tree.add(weights.params, psi)), batch, key)
        grad = jax.tree.map(lambda g: setup.options.lambda_s * g, gradients.grad)
        return gradients._replace(grad=grad, taken=jnp.any(batch.mask))

    return gradient


def unlabeled_gradient(setup: Setup, shared: Broadcast, helpers: Helpers, data: ClientData) -> GradientFn:
    """The gradient of the loss of a batch of unlabeled examples for psi; its companion is sigma.

        lambda_i mean 1/H sum_h KL(f_h(u) || f(u)) + lambda_a mean CE(y, f(strong(u)))
            + lambda_l1 ||psi||_1 + lambda_l2 ||sigma - psi||_2^2

    Means are over the batch's confident examples, max f(u) >= confidence on the plain view u. f_h is helper h's model, the
    broadcast sigma plus its psi, in evaluation mode and without gradient; without helpers there is no first term. y is the vote
    of client and helpers. Running statistics are those of plain views. Metrics are unweighted means. An empty batch is no step:
    without unlabeled examples the penalties do not move psi.
    """
    task, options = setup.task, setup.options

    def gradient(weights: Weights, batch: Batch, key: jax.Array, sigma: PyTree) -> Gradients:
        psi, stats = weights
        images = data.unlabeled.take(batch.positions)
        plain, strong = task.views.plain(images), task.views.strong(key, images)

        def forward(theta: PyTree, views: jax.Array) -> tuple[jax.Array, PyTree]:
            return task.train_logits(Weights(theta, stats), views, batch.mask, local.dropout_key(key))

        theta = optax.tree.add(sigma, psi)
        logits, pullback, batch_stats = jax.vjp(lambda theta: forward(theta, plain), theta, has_aux=True)
        own_label, confidence = pseudo_labels.harden(jax.nn.softmax(logits))
        confident = batch.mask & (confidence >= options.confidence)

        def helped() -> tuple[PyTree, jax.Array, jax.Array]:
            def outputs_of(psi: PyTree) -> jax.Array:
                helper = Weights(optax.tree.add(shared.weights.params.sigma, psi), shared.weights.stats)
                return task.eval_logits(helper, plain, batch.mask)

            outputs = jax.lax.map(outputs_of, helpers.psi)

            def consistency(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
                divergence = agreement.divergence(logits, outputs, helpers.available)
                return options.lambda_i * losses.masked_mean(divergence, confident), divergence

            cotangent, divergence = jax.grad(consistency, has_aux=True)(logits)
            return *pullback(cotangent), divergence, agreement.label(logits, outputs, helpers.available)

        def alone() -> tuple[PyTree, jax.Array, jax.Array]:
            return jax.tree.map(jnp.zeros_like, theta), jnp.zeros(confident.shape), own_label

        grad_i, divergence, label = jax.lax.cond(shared.extra, helped, alone)

        def loss(psi: PyTree) -> tuple[jax.Array, jax.Array]:
            ce = losses.cross_entropy(forward(optax.tree.add(sigma, psi), strong)[0], label)
            penalty = decomposed.penalty(Parts(sigma, psi), options.lambda_l1, options.lambda_l2)
            return options.lambda_a * losses.masked_mean(ce, confident) + penalty, ce

        grad, ce = jax.grad(loss, has_aux=True)(psi)
        metrics = {
            "unlabeled_loss" if trains_both(task) else "loss": mean(ce, confident),
            "consistency_loss": mean(divergence, confident & jnp.any(helpers.available)),
            **local.semi_supervised.step_metrics(label, confident, data, batch),
        }
        return Gradients(jax.tree.map(jnp.add, grad, grad_i), batch_stats, metrics, taken=jnp.any(batch.mask))

    return gradient


def train(
    setup: Setup, shared: Broadcast, helpers: Helpers, optimizers: tuple[PyTree, ...], data: ClientData, key: jax.Array
) -> Trained:
    """A client's training, whose carry is a TrainState of Parts, with the optimizer states of the trained parts.

    Where clients have labels, a step updates sigma on a labeled batch and then psi on an unlabeled one; else it updates psi.
    """
    order_key, train_key = jax.random.split(key)
    task, client, _, options = setup
    (start, stats), rate = shared.weights, shared.learning_rate
    size = options.unlabeled_batch_size or client.batch_size
    of_psi = unlabeled_gradient(setup, shared, helpers, data)
    if not trains_both(task):
        schedule = client._replace(batch_size=size).schedule(order_key, data.unlabeled.mask)
        before = TrainState(Weights(start.psi, stats), optimizers[0], (start.sigma,))
        trained = local.minimize(task, client, of_psi, before, schedule, learning_rate=rate, key=train_key)
        (psi, stats), state, _ = trained.carry
        return trained._replace(carry=TrainState(Weights(start._replace(psi=psi), stats), (state,)))
    of_sigma = labeled_gradient(setup, data.labeled)
    apply = partial(local.apply_gradients, task, client, learning_rate=rate)

    def step(before: TrainState, pair: Pair, key: jax.Array) -> tuple[TrainState, Metrics]:
        ((sigma, psi), stats), states, _ = before
        first, second = jax.random.split(key)
        on_labels = of_sigma(Weights(sigma, stats), pair.labeled, first, psi)
        (sigma, stats), of_labels, _ = apply(TrainState(Weights(sigma, stats), states[0]), on_labels, anchor=start.sigma)
        on_others = of_psi(Weights(psi, stats), pair.unlabeled, second, sigma)
        (psi, stats), of_others, _ = apply(TrainState(Weights(psi, stats), states[1]), on_others, anchor=start.psi)
        return TrainState(Weights(Parts(sigma, psi), stats), (of_labels, of_others)), {**on_labels.metrics, **on_others.metrics}

    masks = data.labeled.mask, data.unlabeled.mask
    pairs = local.repeated(options, data, client, lambda client: client.paired_schedule(order_key, *masks, size))
    trained = local.train(TrainState(shared.weights, tuple(map(client.start, start, optimizers))), step, pairs, train_key)
    weights, states, _ = trained.carry
    return trained._replace(carry=TrainState(weights, tuple(map(client.stored, states))))
