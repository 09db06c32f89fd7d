"""FedMatch (Jeong et al. 2021): parameters in two parts, for labeled and for unlabeled data, and clients that help each other.

theta = sigma + psi. Labels train sigma; unlabeled data train psi, which is sparse and close to sigma. In some rounds a client
also receives the psi of the clients nearest to it, its helpers, whose outputs it follows and with whom it votes on labels. With
labels at the server, it trains sigma and averages the psi of the clients. With labels at the clients, they train both parts in
turn, and the server averages both.

Defaults are the paper's, or those of its released code. Unlike there, batches are shuffled and an epoch goes through all data
of a client, the learning rate depends on the round alone, and the bytes of changed entries are counted exactly.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch, Pair
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Fit, Gradients, Server, ServerState, ServerWork, Setup, Task, Trained, Training, Weights
from fedjax_ssl.local.server import server_step, with_statistics
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import Aggregate, ClientOutput, Cohort, DataSpec, Method, ServerData, Shard
from fedjax_ssl.metrics import Mean, Metrics, Sum, mean, num_bytes
from fedjax_ssl.models import decomposed
from fedjax_ssl.models.decomposed import Parts
from fedjax_ssl.options import Fraction, Options, Positive, Size, Weight
from fedjax_ssl.ssl import agreement, losses, pseudo_labels, thresholds

Carry = tuple[Weights, tuple[PyTree, ...]]  # weights whose params are Parts, and the optimizer states of both


class FedMatchOptions(Options):
    """FedMatch's own settings; weights and thresholds have the names of its code."""

    confidence: Fraction = Field(default=0.85, description="The smallest probability of a confident prediction.")
    helpers: Positive = Field(default=2, description="Helpers H per client.")
    helper_period: Positive = Field(default=10, description="A cohort gets helpers in every round that is a multiple of this.")
    unlabeled_batch_size: Size = Field(default=0, description="Unlabeled examples per step; 0: `client.batch_size`.")
    lambda_s: Weight = Field(default=10.0, description="Weight of the labeled loss.")
    lambda_i: Weight = Field(default=0.01, description="Weight of inter-client consistency.")
    lambda_a: Weight = Field(default=0.01, description="Weight of the cross-entropy of voted labels.")
    lambda_l1: Weight = Field(default=1e-5, description="Weight of ||psi||_1.")
    lambda_l2: Weight = Field(default=10.0, description="Weight of ||sigma - psi||_2^2.")
    l1_thres: Weight = Field(default=1e-5, description="Entries of psi up to this size are 0 in evaluation.")
    delta_thres: Weight = Field(default=1e-5, description="Entries that change by no more than this are not uploaded.")


class FedMatchBroadcast(NamedTuple):
    """The global model, whose params are Parts, the learning rate, and whether this is a round with helpers."""

    weights: Weights
    learning_rate: jax.Array
    helping: jax.Array


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
    update, places, work = partial(client_update, setup), ("server", "clients"), server_work(setup)
    method = local.averaging_method(task, client, server, update, labels_at=places, work=work)
    return method._replace(
        init=partial(init, setup),
        broadcast=partial(broadcast, setup),
        predict={"global": lambda state, images, mask: task.predict(evaluated(options, state.weights), images, mask)},
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
    fine_tune = server.fine_tune.init(parts.sigma) if "server" in task.labels_at else ()
    psi = jax.tree.map(lambda x: jnp.broadcast_to(x, (k, *x.shape)), parts.psi)
    optimizers = tuple(client.init_clients(part, k) for part in (parts if trains_both(task) else parts[1:]))
    clients = FedMatchClientState(jnp.zeros(k, bool), jnp.zeros((k, task.num_classes)), psi, optimizers)
    return ServerState(Weights(parts, stats), optimizer, fine_tune), clients


def evaluated(options: FedMatchOptions, weights: Weights) -> Weights:
    """The evaluated network: sigma + sparse(psi)."""
    sigma, psi = weights.params
    return weights._replace(params=decomposed.add(sigma, decomposed.sparse(psi, options.l1_thres)))


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
        if "server" not in task.labels_at:
            return state, {}
        order_key, train_key = jax.random.split(key)
        training, sigma = server.fine_tune, state.weights.params.sigma
        gradient, rate = labeled_gradient(setup, data.labeled), training.learning_rate(data.round)
        step = step_of_part(task, training, gradient, 0, rate, sigma)
        _, optimizer = training.start(Weights(sigma, state.weights.stats), state.fine_tune)
        schedule = training.schedule(order_key, data.labeled.mask)
        (weights, (optimizer, _)), metrics, _ = local.train((state.weights, (optimizer, ())), step, schedule, train_key)
        state = state._replace(weights=weights, fine_tune=training.stored(optimizer))
        return state, {"server/loss": metrics["loss"]}

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        stats = with_statistics(task, server.static_norm, evaluated(options, state.weights), data).stats
        return state._replace(weights=state.weights._replace(stats=stats))

    return ServerWork(step, train, statistics, server.pretrain)


def broadcast(
    setup: Setup, state: ServerState, clients: FedMatchClientState, cohort: Cohort
) -> tuple[FedMatchBroadcast, Helpers]:
    """The global model, and the helpers of each client; only rounds with helpers have any, and new clients never do."""
    helping = (cohort.round + 1) % setup.options.helper_period == 0
    ids, found = agreement.nearest(clients.embedding, clients.seen, cohort.ids, setup.options.helpers)
    psi = jax.lax.cond(
        helping,
        lambda: jax.tree.map(lambda x: x[ids], clients.psi),
        lambda: jax.tree.map(lambda x: jnp.zeros((*ids.shape, *x.shape[1:]), x.dtype), clients.psi),
    )
    return FedMatchBroadcast(state.weights, setup.client.learning_rate(cohort.round), helping), Helpers(psi, found & helping)


def client_update(
    setup: Setup, shared: FedMatchBroadcast, helpers: Helpers, old: FedMatchClientState, shard: Shard, key: jax.Array
) -> ClientOutput:
    """One client's round: it trains, and uploads the entries that changed. The average is uniform over clients with data."""
    task, _, _, options = setup
    trained = train(setup, shared, helpers, old.optimizer, shard, key)
    ((new_sigma, new_psi), stats), optimizers = trained.carry
    sigma, psi = shared.weights.params
    of_sigma = decomposed.changed(new_sigma, sigma, threshold=0.0, delta=options.delta_thres)
    of_psi = decomposed.changed(new_psi, psi, threshold=options.l1_thres, delta=options.delta_thres)
    sent = [of_sigma, of_psi] if trains_both(task) else [of_psi]
    update = task.update(shared.weights, Weights(Parts(of_sigma.value, of_psi.value), stats))
    update = update if trains_both(task) else update._replace(params=update.params.psi)
    model = Weights(decomposed.add(of_sigma.value, of_psi.value), stats)
    image = agreement.embedding_image(shard.unlabeled.images.shape[1:])[None]
    embedding = jax.nn.softmax(task.predict(model, image, jnp.ones(1, bool)))[0]
    new, took_part = FedMatchClientState(jnp.array(True), embedding, of_psi.value, optimizers), trained.images > 0
    entries, size = jnp.stack([message.entries for message in sent]), num_bytes(psi) // 4
    metrics = {
        **local.client_metrics(trained, down=(), up=()),
        "comm/bytes_down": Sum(bytes_down(shared, helpers, old)),
        "comm/bytes_up": Sum(jnp.sum(decomposed.message_bytes(entries, size)) + num_bytes(update.stats)),
        "client/upload_fraction": Mean(jnp.sum(entries, dtype=jnp.float32), jnp.float32(size * len(sent))),
    }
    state = jax.tree.map(lambda x, y: jnp.where(took_part, x, y), new, old)
    return ClientOutput(update, jnp.where(took_part, 1.0, 0.0), state, metrics)


def bytes_down(shared: FedMatchBroadcast, helpers: Helpers, old: FedMatchClientState) -> jax.Array:
    """Bytes that a client receives: sigma, statistics, what is new in psi since its last upload, and how helpers differ."""
    (sigma, psi), stats = shared.weights
    size = num_bytes(psi) // 4
    of_psi = jnp.where(old.seen, decomposed.differing(psi, old.psi), size)

    def of_helpers() -> jax.Array:
        entries = jax.vmap(decomposed.differing, (0, None))(helpers.psi, psi)
        return jnp.sum(jnp.where(helpers.available, decomposed.message_bytes(entries, size), 0))

    of_all = jax.lax.cond(shared.helping, of_helpers, lambda: jnp.zeros((), jnp.int32))
    return num_bytes((sigma, stats)) + decomposed.message_bytes(of_psi, size) + of_all


def labeled_gradient(setup: Setup, examples: Examples) -> GradientFn:
    """The gradient for sigma of lambda_s CE(y, f(x)) at Parts, with the unweighted metric `loss`. An empty batch is no step."""
    of_theta = local.supervised_gradient(setup.task, examples)

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        gradients = of_theta(weights._replace(params=decomposed.add(*weights.params)), batch, key)
        grad = jax.tree.map(lambda g: setup.options.lambda_s * g, gradients.grad)
        return gradients._replace(grad=grad, taken=jnp.any(batch.mask))

    return gradient


def unlabeled_gradient(setup: Setup, shared: FedMatchBroadcast, helpers: Helpers, shard: Shard) -> GradientFn:
    """The gradient for psi, at Parts, of the loss of a batch of unlabeled examples.

        lambda_i mean 1/H sum_h KL(f_h(u) || f(u)) + lambda_a mean CE(y, f(strong(u)))
            + lambda_l1 ||psi||_1 + lambda_l2 ||sigma - psi||_2^2

    Means are over the batch's confident examples, max f(u) >= confidence on the plain view u. f_h is helper h's model, the
    broadcast sigma plus its psi, in evaluation mode and without gradient; without helpers there is no first term. y is the vote
    of client and helpers. Running statistics are those of plain views. Metrics are unweighted means.
    """
    task, options = setup.task, setup.options

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        (sigma, psi), stats = weights
        images = shard.unlabeled.take(batch.positions)
        plain, strong = task.views.plain(images), task.views.strong(key, images)

        def forward(theta: PyTree, views: jax.Array) -> tuple[jax.Array, PyTree]:
            return task.train_logits(Weights(theta, stats), views, batch.mask, local.dropout_key(key))

        theta = decomposed.add(sigma, psi)
        logits, pullback, batch_stats = jax.vjp(lambda theta: forward(theta, plain), theta, has_aux=True)
        own_label, confidence = pseudo_labels.harden(jax.nn.softmax(logits))
        confident = batch.mask & thresholds.passes(confidence, options.confidence, strict=False)

        def helped() -> tuple[PyTree, jax.Array, jax.Array]:
            def outputs_of(psi: PyTree) -> jax.Array:
                helper = Weights(decomposed.add(shared.weights.params.sigma, psi), shared.weights.stats)
                return task.eval_logits(helper, plain, batch.mask)

            outputs = jax.lax.map(outputs_of, helpers.psi)

            def consistency(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
                divergence = agreement.divergence(logits, outputs, helpers.available)
                return options.lambda_i * losses.masked_mean(divergence, confident), divergence

            cotangent, divergence = jax.grad(consistency, has_aux=True)(logits)
            return *pullback(cotangent), divergence, agreement.label(logits, outputs, helpers.available)

        def alone() -> tuple[PyTree, jax.Array, jax.Array]:
            return jax.tree.map(jnp.zeros_like, theta), jnp.zeros(confident.shape), own_label

        grad_i, divergence, label = jax.lax.cond(shared.helping, helped, alone)

        def loss(psi: PyTree) -> tuple[jax.Array, jax.Array]:
            ce = losses.cross_entropy(forward(decomposed.add(sigma, psi), strong)[0], label)
            penalty = decomposed.penalty(Parts(sigma, psi), options.lambda_l1, options.lambda_l2)
            return options.lambda_a * losses.masked_mean(ce, confident) + penalty, ce

        grad, ce = jax.grad(loss, has_aux=True)(psi)
        metrics = {
            "unlabeled_loss" if trains_both(task) else "loss": mean(ce, confident),
            "consistency_loss": mean(divergence, confident & jnp.any(helpers.available)),
            **local.semi_supervised.step_metrics(label, confident, shard, batch),
        }
        return Gradients(jax.tree.map(jnp.add, grad, grad_i), batch_stats, metrics)

    return gradient


def train(
    setup: Setup, shared: FedMatchBroadcast, helpers: Helpers, optimizers: tuple[PyTree, ...], shard: Shard, key: jax.Array
) -> Trained:
    """A client's training, whose carry is (weights with Parts as params, optimizer states of the trained parts).

    Where clients have labels, a step updates sigma on a labeled batch and then psi on an unlabeled one; else psi alone.
    """
    order_key, train_key = jax.random.split(key)
    task, client, _, options = setup
    ((sigma, psi), stats), rate = shared.weights, shared.learning_rate
    size = options.unlabeled_batch_size or client.batch_size
    of_psi = step_of_part(task, client, unlabeled_gradient(setup, shared, helpers, shard), 1, rate, psi)
    parts = (sigma, psi) if trains_both(task) else (psi,)
    states = [client.start(Weights(part, stats), state).optimizer for part, state in zip(parts, optimizers, strict=True)]
    if not trains_both(task):
        schedule = client._replace(batch_size=size).schedule(order_key, shard.unlabeled.mask)
        trained = local.train((shared.weights, ((), *states)), of_psi, schedule, train_key)
        weights, (_, state) = trained.carry
        return trained._replace(carry=(weights, (client.stored(state),)))
    of_sigma = step_of_part(task, client, labeled_gradient(setup, shard.labeled), 0, rate, sigma)

    def of_both(carry: Carry, pair: Pair, key: jax.Array) -> tuple[Carry, Metrics]:
        first, second = jax.random.split(key)
        carry, labeled_metrics = of_sigma(carry, pair.labeled, first)
        carry, metrics = of_psi(carry, pair.unlabeled, second)
        return carry, {**labeled_metrics, **metrics}

    pairs = client.paired_schedule(order_key, shard.labeled.mask, shard.unlabeled.mask, size)
    trained = local.train((shared.weights, tuple(states)), of_both, pairs, train_key)
    weights, states = trained.carry
    return trained._replace(carry=(weights, tuple(map(client.stored, states))))


def step_of_part(
    task: Task, training: Training, gradient: GradientFn, index: int, rate: jax.Array, anchor: PyTree
) -> Callable[[Carry, Batch, jax.Array], tuple[Carry, Metrics]]:
    """The local step of one part, sigma (index 0) or psi (index 1); `anchor` is what FedProx's term pulls it towards."""

    def step(carry: Carry, batch: Batch, key: jax.Array) -> tuple[Carry, Metrics]:
        (parts, stats), states = carry
        gradients = gradient(Weights(parts, stats), batch, key)
        fit = Fit(Weights(parts[index], stats), states[index])
        (part, stats), state = local.apply_gradients(task, training, fit, gradients, rate, anchor=anchor)
        parts = Parts(*(part if i == index else other for i, other in enumerate(parts)))
        states = tuple(state if i == index else other for i, other in enumerate(states))
        return (Weights(parts, stats), states), gradients.metrics

    return step
