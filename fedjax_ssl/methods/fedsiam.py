"""FedSiam (Pi, MT and D): siamese networks whose outputs on two views of an image should agree.

Every client trains an online network theta_s by SGD on L + beta_k J: L is the cross-entropy of its labeled examples, J how far
the online network's outputs are from those of a target network theta_t, a moving average of theta_s. With labels at the server
the clients have J alone, and the server trains on L after it has averaged (Eqs. 7, 8).

- Pi: one network. The target is the online network's own second pass (alpha = 0).
- MT (mean teacher): both networks travel, and both are averaged.
- D (`fedsiam_d.py`): Pi for `pi_rounds` rounds, then MT whose clients upload layers that are far from the target's alone.

Where the paper is silent: alpha ramps with m, a client's SGD steps over all rounds, and beta_k with n, its local epochs (the
released code's), both with the one under way. The target passes in training mode with a view and dropout of its own, and tracks
batch-norm statistics of its own (the code's); while alpha = 0 they are the online network's. With labels at the server all
follows the paper, as the code's clients do not use their data there; m then counts the server's own steps, from round 1 on.

Where the released code differs and no option follows it: it averages clients uniformly (here by size, Eq. 2), draws one order
of batches a round for all epochs, and keeps the model that does best on the test set (here the last).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Mixture, mix
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
    networks,
)
from fedjax_ssl.local.networks import Networks
from fedjax_ssl.local.server import requirements, with_statistics
from fedjax_ssl.method import ClientOutput, Cohort, DataSpec, Method, ServerData, Shard
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.options import Options, Positive, Weight
from fedjax_ssl.ssl import ema, losses

PyTree = Any
RAMP_EPOCHS = 10  # phi_l (Table 4)


class FedSiamPiOptions(Options):
    """Settings of all three."""

    consistency: Literal["mse", "kl"] = Field(default="mse", description="J, `mse` (Eq. 4) or `kl` (Eq. 5).")
    consistency_weight: Weight = Field(default=1.0, description="A factor of beta_k J; 0: no siamese network.")
    normalization: Literal["paper", "released"] = Field(
        default="paper",
        description=(
            "`paper`: the squared error is summed over classes, L is the mean over a batch's labeled examples; "
            "`released`: both are smaller, by the number of classes, and divided by all of the batch's examples; and "
            "the epochs that beta_k and alpha ramp up with are one participation ahead, so that both start well up."
        ),
    )
    labeled_repeats: Positive = Field(
        default=1,
        description="How often an epoch goes through the labeled examples (`released`: 3 or 2).",
    )


class FedSiamMTOptions(FedSiamPiOptions):
    """Settings of MT and D, besides those of all three."""

    alpha_max: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.999,
        description="The largest decay of the target network, in (0, 1).",
    )
    alpha_counts: Literal["steps", "epochs"] = Field(
        default="steps",
        description="What a client's alpha ramps up with: its local `steps`, or its local `epochs` (`released`).",
    )


class Broadcast(NamedTuple):
    """What goes down to every client.

    Attributes:
        weights: the global network (Pi), or the pair of networks.
        learning_rate: float32 scalar, this round's.
        alpha_max: float32 scalar, the largest alpha of this round; 0: the target is the online network, and one travels.
    """

    weights: Weights
    learning_rate: jax.Array
    alpha_max: jax.Array


class ClientState(NamedTuple):
    """What a client keeps: its SGD steps and its epochs over all rounds, int32 scalars, and its optimizer's state."""

    steps: jax.Array
    epochs: jax.Array
    optimizer: PyTree


AlphaMax = Callable[[jax.Array], jax.Array]
"""A round's number, int32 scalar from 1 -> the largest alpha of that round, float32 scalar."""


def fedsiam_pi(*, task: Task, client: Training, server: Server, options: FedSiamPiOptions = FedSiamPiOptions()) -> Method:
    """FedSiam-Pi: one network, whose second pass over a view of its own is the target (alpha = 0).

    Args:
        task: network and views.
        client: local training.
        server: aggregation by data size (Eq. 2), training on labels at the server (Eq. 8), statistics.
        options: losses.

    Returns:
        The method, for labels at the server and at the clients. Its client state counts local steps and epochs, and has the
        local optimizer's state where `client` is persistent.
    """
    return method_of(task, client, server, options, lambda _: jnp.zeros(()))


def fedsiam_mt(*, task: Task, client: Training, server: Server, options: FedSiamMTOptions = FedSiamMTOptions()) -> Method:
    """FedSiam-MT: the target is a mean teacher (Eqs. 3, 9), which travels and is averaged beside the online network.

    The target is evaluated, and the online network's accuracy is logged besides (`eval/accuracy_online`).

    Args:
        task: network and views.
        client: local training.
        server: as in `fedsiam_pi`.
        options: losses, and the target's decay.

    Returns:
        The method, as of `fedsiam_pi`.
    """
    return method_of(task, client, server, options, lambda _: jnp.float32(options.alpha_max))


def method_of(
    task: Task,
    client: Training,
    server: Server,
    options: FedSiamPiOptions,
    alpha_max: AlphaMax,
    finish: Callable[[ClientOutput, Networks, jax.Array], ClientOutput] = lambda output, *_: output,
) -> Method:
    """A method of one network, or of two.

    `finish` makes what a client returns of `train_client`'s results and of whether both networks travel, a bool scalar.
    """
    paired = isinstance(options, FedSiamMTOptions)

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, ClientState]:
        one = task.init(key, spec.image_shape)
        weights = networks.join(one, one) if paired else one
        fine_tune = server.fine_tune.init(one.params) if "server" in task.labels_at else ()
        state = ServerState(weights, server.optimizer.init(weights.params), fine_tune)
        none = jnp.zeros(spec.num_clients, jnp.int32)
        return state, ClientState(none, none, client.init_clients(one.params, spec.num_clients))

    def broadcast(state: ServerState, _: PyTree, cohort: Cohort) -> tuple[Broadcast, PyTree]:
        return Broadcast(state.weights, client.learning_rate(cohort.round), alpha_max(cohort.round + 1)), ()

    def client_update(shared: Broadcast, _: PyTree, state: ClientState, shard: Shard, key: jax.Array) -> ClientOutput:
        return finish(*train_client(task, client, options, shared, state, shard, key), shared.alpha_max > 0)

    def predict(which: str) -> Callable[[ServerState, jax.Array, jax.Array], jax.Array]:
        return lambda state, images, mask: task.predict(getattr(networks.networks(state.weights), which), images, mask)

    work = server_work(task, server, alpha_max)
    return Method(
        init=init,
        prepare=work.prepare,
        broadcast=broadcast,
        client_update=client_update,
        server_update=work.finish_round,
        predict={which: predict(which) for which in (("target", "online") if paired else ("online",))},
        requires=requirements(task, server, ("server", "clients"))._replace(server_training=("after",)),
    )


def train_client(
    task: Task, client: Training, options: FedSiamPiOptions, shared: Broadcast, state: ClientState, shard: Shard, key: jax.Array
) -> tuple[ClientOutput, Networks]:
    """A client's local training: what it returns, and the two networks that it ends with."""
    order_key, train_key = jax.random.split(key)
    epochs = state.epochs + (client.epochs if options.normalization == "released" else 0)
    examples = mix(shard.labeled, shard.unlabeled, options.labeled_repeats)
    schedule = client.schedule(order_key, examples.mask)

    def alpha(batch: Batch) -> jax.Array:
        by_epochs = isinstance(options, FedSiamMTOptions) and options.alpha_counts == "epochs"
        so_far = epochs + batch.epoch if by_epochs else state.steps + batch.step
        return ema.warm_decay(so_far + 1, shared.alpha_max)

    trained = train_pair(
        task,
        client,
        client_gradient(task, options, examples, epochs),
        Fit(shared.weights, state.optimizer),
        schedule,
        alpha,
        learning_rate=shared.learning_rate,
        key=train_key,
    )
    weights, optimizer = trained.carry
    update = task.update(shared.weights, weights)
    one = networks.networks(shared.weights).target
    both_travel = shared.alpha_max > 0
    metrics = {
        **local.client_metrics(trained, down=shared.weights, up=update),
        "comm/bytes_down": Sum(jnp.where(both_travel, num_bytes(shared.weights), num_bytes(one)).astype(jnp.int32)),
    }
    state = ClientState(state.steps + schedule.steps, state.epochs + batching.num_epochs(schedule), optimizer)
    weight = (shard.labeled.count + shard.unlabeled.count).astype(jnp.float32)
    return ClientOutput(update, weight, state, metrics), networks.networks(weights)


PairGradient = Callable[[Weights, Batch, jax.Array, Weights], tuple[Gradients, PyTree]]
"""(online network, batch, key, target network) -> (its gradients, norm statistics of the target's own batch or `()`)."""


def train_pair(
    task: Task,
    training: Training,
    gradient: PairGradient,
    fit: Fit,
    schedule: batching.Schedule,
    alpha: Callable[[Batch], jax.Array],
    *,
    learning_rate: jax.Array,
    key: jax.Array,
) -> Trained:
    """Trains the online network; of a pair, the target follows it after every step.

    Args:
        task: the network.
        training: of the online network.
        gradient: of the online network.
        fit: weights of one network or of a pair, and the optimizer state that was kept.
        schedule: the batches.
        alpha: a step's batch -> the target's decay after that step.
        learning_rate: float32 scalar.
        key: PRNG key.

    Returns:
        Trained, its carry like `fit`.
    """
    online, target = networks.networks(fit.weights)
    paired, anchor = networks.is_pair(fit.weights), online.params

    def step(carry: tuple[Fit, Any], batch: Batch, key: jax.Array) -> tuple[tuple[Fit, Any], Metrics]:
        one, target = carry
        gradients, target_stats = gradient(one.weights, batch, key, target if paired else one.weights)
        one = apply_gradients(task, training, one, gradients, learning_rate, anchor=anchor)
        if paired:
            target = networks.follow(task, target, one.weights, target_stats, alpha(batch))
        return (one, target), gradients.metrics

    start = training.start(online, fit.optimizer), target if paired else ()
    trained = local.train(start, step, schedule, key)
    (online, optimizer), target = trained.carry
    weights = networks.join(online, target) if paired else online
    return trained._replace(carry=Fit(weights, training.keep(optimizer)))


def client_gradient(task: Task, options: FedSiamPiOptions, examples: Mixture, epochs: jax.Array) -> PairGradient:
    """The gradient of L + beta_k J on a batch (Eq. 7), with respect to the online network.

    Args:
        task: network and views.
        options: losses.
        examples: the client's.
        epochs: int32 scalar, the client's local epochs before this training.

    Where J has no weight the target has no pass: batch-norm statistics of its own would be the online network's.
    """
    distance = {"mse": losses.squared_error, "kl": losses.kl_divergence}[options.consistency]
    released = options.normalization == "released"
    scale = 1.0 / task.num_classes if released and options.consistency == "mse" else 1.0
    siamese = options.consistency_weight > 0

    def gradient(online: Weights, batch: Batch, key: jax.Array, target: Weights) -> tuple[Gradients, PyTree]:
        at = batch.positions
        images, labels, labeled = examples.take(at), examples.labels[at], examples.labeled[at]

        def logits(network: Weights, key: jax.Array) -> tuple[jax.Array, PyTree]:
            views, unlabeled_views = task.views.labeled(key, images), task.views.weak(key, images)
            views = jnp.where(labeled.reshape(-1, *[1] * (views.ndim - 1)), views, unlabeled_views)
            return task.train_logits(network, views, batch.mask, dropout_key(key))

        online_key, target_key = jax.random.split(key)
        if siamese:
            target_logits, target_stats = logits(target, target_key)
        used = labeled & batch.mask
        beta = options.consistency_weight * ema.ramp_up(epochs + batch.epoch + 1, RAMP_EPOCHS)

        def loss(params: PyTree) -> tuple[jax.Array, tuple[Metrics, PyTree]]:
            outputs, stats = logits(online._replace(params=params), online_key)
            ce = losses.cross_entropy(outputs, labels)
            supervised = losses.masked_mean(ce, used, jnp.sum(batch.mask) if released else None)  # Eq. 6
            if not siamese:
                return supervised, ({"loss": mean(ce, used)}, stats)
            j = scale * distance(target_logits, outputs)
            metrics = {"loss": mean(ce, used), "consistency_loss": mean(j, batch.mask)}
            return supervised + beta * losses.masked_mean(j, batch.mask), (metrics, stats)  # Eq. 7

        grad, (metrics, stats) = jax.grad(loss, has_aux=True)(online.params)
        return Gradients(grad, stats, metrics), target_stats if siamese else stats

    return gradient


def server_work(task: Task, server: Server, alpha_max: AlphaMax) -> ServerWork:
    """The server's work: the average (Eq. 2), its training on labels, if it has any, statistics of every network.

    The target takes a step after each of the online network's (Eqs. 8, 9).
    """
    usual = local.server_work(task, server)

    def train(state: ServerState, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        if "server" not in task.labels_at:
            return state, {}
        order_key, train_key = jax.random.split(key)
        training, on_labels = server.fine_tune, local.supervised_gradient(task, data.labeled)
        schedule = training.schedule(order_key, data.labeled.mask)

        def gradient(online: Weights, batch: Batch, key: jax.Array, target: Weights) -> tuple[Gradients, PyTree]:
            return on_labels(online, batch, key), ()

        trained = train_pair(
            task,
            training,
            gradient,
            Fit(state.weights, state.fine_tune),
            schedule,
            lambda batch: ema.warm_decay(data.round * schedule.steps + batch.step + 1, alpha_max(data.round + 1)),
            learning_rate=training.learning_rate(data.round),
            key=train_key,
        )
        weights, optimizer = trained.carry
        return state._replace(weights=weights, fine_tune=optimizer), {"server/loss": trained.metrics["loss"]}

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        if not networks.is_pair(state.weights):
            return usual.statistics(state, data)
        both = (with_statistics(task, server.static_norm, one, data) for one in networks.networks(state.weights))
        return state._replace(weights=networks.join(*both))

    return usual._replace(train=train, statistics=statistics, average_with_server=None)
