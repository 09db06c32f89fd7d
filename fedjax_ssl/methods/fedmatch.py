"""FedMatch (ICLR 2021): parameters in two parts, one for labels and one for unlabeled data, and clients that help each other.

theta = sigma + psi. Labels train sigma; unlabeled data train psi, which is kept sparse and close to sigma. Every tenth round a
client also receives the psi of the two clients nearest to it, its helpers, whose outputs it follows and with whom it votes on
labels. Labels at the server: the server trains sigma and averages the clients' psi. Labels at the clients: they train both
parts in turns, and the server averages both.

The defaults are the paper's; where the paper is silent they are its released code's, for labels at the server. Of that code are
psi_0 = .2 sigma_0 (so theta_0 = 1.2 sigma_0), helper rounds, thresholds and weights. Different from it:

- Batches are shuffled, and an epoch goes through all of a client's data; the code's are fixed and leave out the remainder.
- The learning rate follows the round alone. The code divides it by 3, for each holder apart, when the loss on labeled
  validation data stops falling; that is not implemented, and what a split holds out for validation reaches no method here.
- Bytes: the code reports the share of entries that change by more than a threshold, and downloads all of psi nevertheless. Here
  what a client receives is exact, and every entry that differs is counted. sigma travels down whole: training moves all of it.
  An entry costs 8 bytes of a message, so that none are saved where half of psi changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.data.batching import Batch, Pair
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import (
    Fit,
    Gradients,
    Server,
    ServerState,
    ServerWork,
    Task,
    Trained,
    Training,
    Weights,
    apply_gradients,
    dropout_key,
)
from fedjax_ssl.local.server import requirements, server_step, with_statistics
from fedjax_ssl.method import Aggregate, ClientOutput, Cohort, DataSpec, Method, ServerData, Shard
from fedjax_ssl.metrics import Mean, Metrics, Sum, mean, num_bytes
from fedjax_ssl.models import decomposed
from fedjax_ssl.models.decomposed import Parts
from fedjax_ssl.options import Count, Fraction, Options, Positive, Weight
from fedjax_ssl.ssl import agreement, losses, pseudo_labels, thresholds

PyTree = Any
Carry = tuple[Weights, tuple[PyTree, ...]]
"""Weights whose params are Parts, and the optimizer states of both."""


class FedMatchOptions(Options):
    """FedMatch's own settings; weights and thresholds have its code's names."""

    confidence: Fraction = Field(
        default=0.85,
        description=(
            "The smallest probability of a confident prediction (.75 in the released code, .95 in FedSiam's comparison)."
        ),
    )
    helpers: Positive = Field(default=2, description="H, helpers per client.")
    helper_period: Positive = Field(default=10, description="Every so many rounds there are helpers.")
    unlabeled_batch_size: Count = Field(
        default=0,
        description=(
            "Unlabeled examples per step; 0: `client.batch_size`, which with labels at the clients counts the labeled "
            "ones. In the released code all of a client's are then shared out over an epoch's steps: 102 of 510 to "
            "each of 5."
        ),
    )
    lambda_s: Weight = Field(default=10.0, description="Weight of the labeled loss.")
    lambda_i: Weight = Field(default=0.01, description="Weight of inter-client consistency.")
    lambda_a: Weight = Field(default=0.01, description="Weight of the agreement's labels.")
    lambda_l1: Weight = Field(default=1e-5, description="Weight of ||psi||_1 (1e-4 with labels at the clients).")
    lambda_l2: Weight = Field(default=10.0, description="Weight of ||sigma - psi||_2^2.")
    l1_thres: Weight = Field(
        default=1e-5,
        description="Entries of psi up to this size are 0 in evaluation (5e-6 with labels at the clients).",
    )
    delta_thres: Weight = Field(
        default=1e-5,
        description="Entries that change by no more are not uploaded (5e-5 with labels at the clients).",
    )


class Setup(NamedTuple):
    """What the method is made of, as the factory receives it."""

    task: Task
    client: Training
    server: Server
    options: FedMatchOptions

    @property
    def labeled_clients(self) -> bool:
        """Whether clients have labels, and so train and send both parts."""
        return "clients" in self.task.labels_at


class Broadcast(NamedTuple):
    """What goes down to every client.

    Attributes:
        weights: the global model; its params are Parts.
        learning_rate: float32 scalar, this round's.
        helping: bool scalar, whether this is a round with helpers.
    """

    weights: Weights
    learning_rate: jax.Array
    helping: jax.Array


class Helpers(NamedTuple):
    """A client's helpers; with leading axis M, those of a cohort.

    Attributes:
        psi: psi with leading axis H; zeros in rounds without helpers.
        available: bool [H], which of them there are.
    """

    psi: PyTree
    available: jax.Array


class ClientState(NamedTuple):
    """What is kept of a client's last participation, by the server but for the optimizer's state.

    Attributes:
        seen: bool, whether it has taken part. If not, the next two mean nothing.
        embedding: float32 [C], its uploaded model's output on `agreement.embedding_image`.
        psi: as it uploaded it.
        optimizer: optimizer states of the parts that it trains, as a tuple; each `()` if not persistent.
    """

    seen: jax.Array
    embedding: jax.Array
    psi: PyTree
    optimizer: tuple[PyTree, ...]


def fedmatch(*, task: Task, client: Training, server: Server, options: FedMatchOptions = FedMatchOptions()) -> Method:
    """FedMatch, for labels at the server and for labels at the clients: `task.labels_at` says where they are.

    Labels at the server, a round: clients train psi, the server averages it and trains sigma; `server.pretrain` trainings of
    sigma precede round 1. A round of the released code begins with the server's training: with one of them, the same cycle.

    Args:
        task: network and views. Confidence, consistency and helpers see plain views.
        client: local training, of batches of unlabeled examples, or of labeled ones if the labels are at the clients.
        server: aggregation of what the clients train, the server's training of sigma, and statistics.
        options: weights, thresholds and helpers.

    Returns:
        The method. Its broadcast reads the states of all clients, so that they stay on the device.
    """
    setup = Setup(task, client, server, options)
    work = server_work(setup)
    return Method(
        init=partial(init, setup),
        prepare=work.prepare,
        broadcast=partial(broadcast, setup),
        client_update=partial(client_update, setup),
        server_update=work.finish_round,
        predict={"global": lambda state, images, mask: task.predict(evaluated(options, state.weights), images, mask)},
        requires=requirements(task, server, ("server", "clients"))._replace(all_states=True, server_training=("after",)),
    )


def init(setup: Setup, key: jax.Array, spec: DataSpec) -> tuple[ServerState, ClientState]:
    """A fresh server, and K clients that have not taken part."""
    task, client, server, _ = setup
    params, stats = task.init(key, spec.image_shape)
    parts = decomposed.split(params)
    k = spec.num_clients
    trained = parts if setup.labeled_clients else parts[1:]  # by clients
    optimizer = server.optimizer.init(parts if setup.labeled_clients else parts.psi)
    fine_tune = server.fine_tune.init(parts.sigma) if "server" in task.labels_at else ()
    clients = ClientState(
        seen=jnp.zeros(k, bool),
        embedding=jnp.zeros((k, task.num_classes)),
        psi=jax.tree.map(lambda x: jnp.broadcast_to(x, (k, *x.shape)), parts.psi),
        optimizer=tuple(client.init_clients(part, k) for part in trained),
    )
    return ServerState(Weights(parts, stats), optimizer, fine_tune), clients


def evaluated(options: FedMatchOptions, weights: Weights) -> Weights:
    """The network that is tested: sigma + sparse(psi)."""
    sigma, psi = weights.params
    return weights._replace(params=decomposed.add(sigma, decomposed.sparse(psi, options.l1_thres)))


# --- the server --------------------------------------------------------------------------------------------------------


def server_work(setup: Setup) -> ServerWork:
    """The server's work: it averages what the clients trained, trains sigma where it has labels, and collects statistics."""
    task, _, server, options = setup

    def step(state: ServerState, aggregate: Aggregate) -> ServerState:
        if setup.labeled_clients:
            weights, optimizer = server_step(server, state.weights, state.optimizer, aggregate)
            return state._replace(weights=weights, optimizer=optimizer)
        sigma, psi = state.weights.params
        trained = state.weights._replace(params=psi)
        (psi, stats), optimizer = server_step(server, trained, state.optimizer, aggregate)
        return state._replace(weights=Weights(Parts(sigma, psi), stats), optimizer=optimizer)

    def train(state: ServerState, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        """One training of sigma on the server's labels, if it has any; psi stays."""
        if "server" not in task.labels_at:
            return state, {}
        order_key, train_key = jax.random.split(key)
        training, (sigma, psi) = server.fine_tune, state.weights.params
        gradient = labeled_gradient(setup, data.labeled)
        rate, anchor = training.learning_rate(data.round), sigma

        def one(fit: Fit, batch: Batch, key: jax.Array) -> tuple[Fit, Metrics]:
            weights = fit.weights._replace(params=Parts(fit.weights.params, psi))
            gradients, taken = gradient(weights, batch, key)
            return apply_gradients(task, training, fit, gradients, rate, anchor=anchor, where=taken), gradients.metrics

        start = training.start(state.weights._replace(params=sigma), state.fine_tune)
        trained = local.train(start, one, training.schedule(order_key, data.labeled.mask), train_key)
        (sigma, stats), optimizer = trained.carry
        state = state._replace(weights=Weights(Parts(sigma, psi), stats), fine_tune=training.keep(optimizer))
        return state, {"server/loss": trained.metrics["loss"]}

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        stats = with_statistics(task, server.static_norm, evaluated(options, state.weights), data).stats
        return state._replace(weights=state.weights._replace(stats=stats))

    return ServerWork(step, train, statistics, server.pretrain)


def broadcast(setup: Setup, state: ServerState, clients: ClientState, cohort: Cohort) -> tuple[Broadcast, Helpers]:
    """The global model, and to each client its helpers: none in most rounds, and never any to a client that is new."""
    helping = (cohort.round + 1) % setup.options.helper_period == 0
    ids, found = agreement.nearest(clients.embedding, clients.seen, cohort.ids, setup.options.helpers)

    def gather() -> PyTree:
        return jax.tree.map(lambda x: x[ids], clients.psi)

    def nothing() -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros((*ids.shape, *x.shape[1:]), x.dtype), clients.psi)

    psi = jax.lax.cond(helping, gather, nothing)
    return Broadcast(state.weights, setup.client.learning_rate(cohort.round), helping), Helpers(psi, found & helping)


# --- a client ----------------------------------------------------------------------------------------------------------


def client_update(
    setup: Setup, shared: Broadcast, helpers: Helpers, old: ClientState, shard: Shard, key: jax.Array
) -> ClientOutput:
    """One client's round: trains psi, or both parts where clients have labels, and uploads the entries that changed.

    The average is uniform over the clients that have data to train on.
    """
    task, options = setup.task, setup.options
    trained = train(setup, shared, helpers, old.optimizer, shard, key)
    ((new_sigma, new_psi), stats), optimizers = trained.carry
    sigma, psi = shared.weights.params
    of_sigma = decomposed.changed(new_sigma, sigma, threshold=0.0, delta=options.delta_thres)
    of_psi = decomposed.changed(new_psi, psi, threshold=options.l1_thres, delta=options.delta_thres)
    sent = [of_sigma, of_psi] if setup.labeled_clients else [of_psi]
    uploaded = Weights(Parts(of_sigma.value, of_psi.value), stats)
    update = task.update(shared.weights, uploaded)
    if not setup.labeled_clients:
        update = update._replace(params=update.params.psi)
    model = uploaded._replace(params=decomposed.add(*uploaded.params))
    image = agreement.embedding_image(shard.unlabeled.images.shape[1:])[None]
    embedding = jax.nn.softmax(task.predict(model, image, jnp.ones(1, bool)))[0]
    took_part = trained.images > 0
    new = ClientState(jnp.array(True), embedding, of_psi.value, optimizers)
    size = num_bytes(psi) // 4
    entries = jnp.stack([message.entries for message in sent])
    metrics = {
        **local.client_metrics(trained, down=(), up=()),
        "comm/bytes_down": Sum(bytes_down(shared, helpers, old)),
        "comm/bytes_up": Sum(jnp.sum(decomposed.message_bytes(entries, size)) + num_bytes(update.stats)),
        "client/upload_fraction": Mean(jnp.sum(entries, dtype=jnp.float32), jnp.float32(size * len(sent))),
    }
    state = jax.tree.map(lambda x, y: jnp.where(took_part, x, y), new, old)
    return ClientOutput(update, jnp.where(took_part, 1.0, 0.0), state, metrics)


def bytes_down(shared: Broadcast, helpers: Helpers, old: ClientState) -> jax.Array:
    """Bytes that a client receives, int32 scalar.

    sigma and the statistics whole; of psi what differs from the client's own copy, its last upload; of each helper's psi what
    differs from psi.
    """
    (sigma, psi), stats = shared.weights
    size = num_bytes(psi) // 4
    of_psi = jnp.where(old.seen, decomposed.differing(psi, old.psi), size)

    def of_helpers() -> jax.Array:
        entries = jax.vmap(decomposed.differing, (0, None))(helpers.psi, psi)
        return jnp.sum(jnp.where(helpers.available, decomposed.message_bytes(entries, size), 0))

    of_all = jax.lax.cond(shared.helping, of_helpers, lambda: jnp.zeros((), jnp.int32))
    return num_bytes((sigma, stats)) + decomposed.message_bytes(of_psi, size) + of_all


PartGradient = Callable[[Weights, Batch, jax.Array], tuple[Gradients, jax.Array | None]]
"""(weights whose params are Parts, batch, key) -> (gradients for one of them, bool: whether to take the step; None: yes)."""


def labeled_gradient(setup: Setup, examples: Examples) -> PartGradient:
    """The gradient for sigma of lambda_s CE(y, f(x)), at Parts. A batch without examples leaves sigma as it is.

    The metric `loss` is the cross-entropy, without the weight.
    """
    of_theta = local.supervised_gradient(setup.task, examples)

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> tuple[Gradients, jax.Array]:
        gradients = of_theta(weights._replace(params=decomposed.add(*weights.params)), batch, key)
        grad = jax.tree.map(lambda g: setup.options.lambda_s * g, gradients.grad)
        return gradients._replace(grad=grad), jnp.any(batch.mask)

    return gradient


def unlabeled_gradient(setup: Setup, shared: Broadcast, helpers: Helpers, shard: Shard) -> PartGradient:
    """The gradient for psi, at Parts, of the loss of a batch of unlabeled examples.

        lambda_i mean 1/H sum_h KL(f_h(u) || f(u)) + lambda_a mean CE(y, f(strong(u)))
            + lambda_l1 ||psi||_1 + lambda_l2 ||sigma - psi||_2^2

    Means are over the batch's confident examples: max f(u) >= confidence on the plain view u. Helper h is the sigma of the
    broadcast plus h's psi, outside of training and without gradient; y is what client and helpers agree on. The first term, and
    its cost, are there in rounds with helpers alone, the last two always. Tracked statistics are the plain views'. In metrics
    the two means are without their weights.
    """
    task, options = setup.task, setup.options

    def helper_logits(views: jax.Array, mask: jax.Array) -> jax.Array:
        def one(psi: PyTree) -> jax.Array:
            weights = Weights(decomposed.add(shared.weights.params.sigma, psi), shared.weights.stats)
            return task.eval_logits(weights, views, mask)

        return jax.lax.map(one, helpers.psi)

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> tuple[Gradients, None]:
        (sigma, psi), stats = weights
        theta = decomposed.add(sigma, psi)
        images = shard.unlabeled.take(batch.positions)
        plain, strong = task.views.plain(images), task.views.strong(key, images)

        def forward(theta: PyTree, views: jax.Array) -> tuple[jax.Array, PyTree]:
            return task.train_logits(Weights(theta, stats), views, batch.mask, dropout_key(key))

        logits, pullback, batch_stats = jax.vjp(lambda theta: forward(theta, plain), theta, has_aux=True)
        own_label, confidence = pseudo_labels.harden(jax.nn.softmax(logits))
        confident = batch.mask & thresholds.passes(confidence, options.confidence, strict=False)

        def alone() -> tuple[PyTree, jax.Array, jax.Array]:
            return jax.tree.map(jnp.zeros_like, theta), jnp.zeros(confident.shape), own_label

        def helped() -> tuple[PyTree, jax.Array, jax.Array]:
            outputs = helper_logits(plain, batch.mask)

            def consistency(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
                divergence = agreement.divergence(logits, outputs, helpers.available)
                return options.lambda_i * losses.masked_mean(divergence, confident), divergence

            cotangent, divergence = jax.grad(consistency, has_aux=True)(logits)
            return *pullback(cotangent), divergence, agreement.label(logits, outputs, helpers.available)

        grad_i, divergence, label = jax.lax.cond(shared.helping, helped, alone)

        def loss(psi: PyTree) -> tuple[jax.Array, jax.Array]:
            ce = losses.cross_entropy(forward(decomposed.add(sigma, psi), strong)[0], label)
            penalty = decomposed.penalty(Parts(sigma, psi), options.lambda_l1, options.lambda_l2)
            return options.lambda_a * losses.masked_mean(ce, confident) + penalty, ce

        grad, ce = jax.grad(loss, has_aux=True)(psi)
        metrics = {
            "unlabeled_loss" if setup.labeled_clients else "loss": mean(ce, confident),
            "consistency_loss": mean(divergence, confident & jnp.any(helpers.available)),
            "mask_rate": mean(confident, batch.mask),
            **pseudo_labels.diagnostics(label, shard.true_labels[batch.positions], confident, batch.mask),
        }
        return Gradients(jax.tree.map(jnp.add, grad, grad_i), batch_stats, metrics), None

    return gradient


def train(
    setup: Setup, shared: Broadcast, helpers: Helpers, optimizers: tuple[PyTree, ...], shard: Shard, key: jax.Array
) -> Trained:
    """A client's training; the result's carry is (weights whose params are Parts, the optimizer states to keep).

    Where clients have labels, in every step sigma on a batch of labeled examples and then psi on one of unlabeled ones; the
    labeled ones count the steps (`batching.paired`). Else psi alone.
    """
    order_key, train_key = jax.random.split(key)
    task, client, _, options = setup
    (_, psi), stats = shared.weights
    of_psi = unlabeled_gradient(setup, shared, helpers, shard)
    size = options.unlabeled_batch_size or client.batch_size
    rate, anchors = shared.learning_rate, shared.weights.params

    def update(gradient: PartGradient, index: int, carry: Carry, batch: Batch, key: jax.Array) -> tuple[Carry, Metrics]:
        """The step of one of the parts, sigma or psi, on its batch."""
        (parts, stats), states = carry
        gradients, taken = gradient(Weights(parts, stats), batch, key)
        fit = Fit(Weights(parts[index], stats), states[index])
        fit = apply_gradients(task, client, fit, gradients, rate, anchor=anchors[index], where=taken)
        (part, stats), state = fit
        parts = Parts(*(part if i == index else other for i, other in enumerate(parts)))
        states = tuple(state if i == index else other for i, other in enumerate(states))
        return (Weights(parts, stats), states), gradients.metrics

    def on_unlabeled(carry: Carry, batch: Batch, key: jax.Array) -> tuple[Carry, Metrics]:
        return update(of_psi, 1, carry, batch, key)

    def on_both(carry: Carry, pair: Pair, key: jax.Array) -> tuple[Carry, Metrics]:
        first, second = jax.random.split(key)
        carry, of_sigma = update(labeled_gradient(setup, shard.labeled), 0, carry, pair.labeled, first)
        carry, metrics = update(of_psi, 1, carry, pair.unlabeled, second)
        return carry, {**of_sigma, **metrics}

    def begin(part: PyTree, state: PyTree) -> PyTree:
        return client.start(Weights(part, stats), state).optimizer

    if setup.labeled_clients:
        start = (shared.weights, tuple(map(begin, anchors, optimizers)))
        pairs = client.paired_schedule(order_key, shard.labeled.mask, shard.unlabeled.mask, size)
        trained = local.train(start, on_both, pairs, train_key)
        weights, states = trained.carry
    else:
        start = (shared.weights, ((), begin(psi, *optimizers)))
        schedule = client._replace(batch_size=size).schedule(order_key, shard.unlabeled.mask)
        trained = local.train(start, on_unlabeled, schedule, train_key)
        weights, (_, *states) = trained.carry
    return trained._replace(carry=(weights, tuple(map(client.keep, states))))
