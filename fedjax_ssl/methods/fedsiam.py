"""FedSiam (Long et al. 2020), in its forms Pi and MT: siamese networks whose outputs on two views of an image should agree.

Every client trains an online network theta_s by SGD on L + beta_k J (Eq. 7). L is the cross-entropy of its labeled examples,
and J is the distance between the outputs of the online network and of a target network theta_t, a moving average of theta_s.
With labels at the server the clients minimize J alone, and the server trains on L after it has averaged (Eq. 8).

- Pi: one network. The target is the second forward pass of the online network (alpha = 0).
- MT (mean teacher): both networks are sent and averaged.
- D (`fedsiam_d.py`): Pi in the first rounds, then MT whose clients upload only the layers that are far from the target's.

Where the paper is silent, we choose: alpha depends on m, the number of a client's SGD steps over all rounds; beta_k depends on
n, the number of the client's local epochs; both counts include the current one. The target is in training mode, with a view,
dropout and batch-norm statistics of its own (with the online network's statistics while alpha = 0). With labels at the server,
m counts the server's steps from round 1 on. Unlike in the released code, clients are averaged by size (Eq. 2), each epoch has
an order of its own, and the last model is the result, not the best one on test data.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Mixture, mix
from fedjax_ssl.local import Broadcast, Gradients, Server, ServerState, Setup, Task, Training, TrainState, Weights
from fedjax_ssl.local.server import ServerWork, with_statistics
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import ClientData, ClientOutput, DataSpec, Method, ServerData
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.options import MANY, SET, Divisor, LabeledRepeats, ReadWhere, Weight
from fedjax_ssl.ssl import ema, losses

RAMP_EPOCHS = 10  # local epochs over which beta_k rises, phi_l in Table 4


class FedSiamPiOptions(LabeledRepeats):
    """Settings of Pi, MT and D."""

    consistency: Annotated[Literal["mse", "kl"], ReadWhere(consistency_weight=SET)] = Field(
        default="mse",
        description="Distance of the two networks' outputs: mean squared error (`mse`, Eq. 4) or KL divergence (`kl`, Eq. 5).",
    )
    consistency_weight: Weight = Field(
        default=1.0, description="Factor of the consistency loss beta_k J. 0 leaves that loss out."
    )
    divisor: Divisor = Field(
        default="used",
        description="What the sum of the labeled loss over a batch is divided by: the number of labeled examples (`used`, as "
        "in the paper), or of all examples of the `batch`, as in the released code. With `batch`, two more rules of that code "
        "hold: `mse` is averaged over classes, and clients count epochs from `client.epochs` on, as after a round, not from 0.",
    )


class FedSiamMTOptions(FedSiamPiOptions):
    """Options of FedSiam-MT and -D: those of FedSiam-Pi, and how the target follows."""

    alpha_max: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.999, description="Largest decay of the target network, alpha."
    )
    alpha_counts: Literal["steps", "epochs"] = Field(
        default="steps", description="Whether alpha rises with a client's steps, or with its epochs (released code)."
    )


class Networks(NamedTuple):
    """The weights, parameters or statistics of two networks that train as one: the online network and its target.

    A `Weights` whose two fields are Networks is broadcast, subtracted and averaged as one network is.
    """

    online: PyTree
    target: PyTree


def join(online: Weights, *target: Weights) -> Weights:
    """Two networks as one `Weights`, or one network as it is."""
    return Weights(*map(Networks, online, *target)) if target else online


def each(weights: Weights) -> tuple[Weights, ...]:
    """The `Weights` of the online network and of the target, or those of one network alone."""
    return tuple(map(Weights, *weights)) if isinstance(weights.params, Networks) else (weights,)


class FedSiamClientState(NamedTuple):
    """How many SGD steps and epochs a client took in all rounds (int32), and its optimizer state, `()` if not persistent."""

    steps: jax.Array
    epochs: jax.Array
    optimizer: PyTree


AlphaMax = Callable[[jax.Array], jax.Array]  # a round's number, counted from 1 -> the largest alpha of that round
Finish = Callable[[ClientOutput, Weights, jax.Array], ClientOutput]  # see `method_of`


def fedsiam_pi(*, task: Task, client: Training, server: Server, options: FedSiamPiOptions = FedSiamPiOptions()) -> Method:
    """FedSiam-Pi: one network, whose second forward pass on another view is the target (alpha = 0)."""
    return method_of(Setup(task, client, server, options), lambda _: jnp.zeros(()))


def fedsiam_mt(*, task: Task, client: Training, server: Server, options: FedSiamMTOptions = FedSiamMTOptions()) -> Method:
    """FedSiam-MT: the target is a mean teacher (Eqs. 3, 9), which is sent and averaged as the online network is.

    The target is evaluated; the accuracy of the online network is logged as `eval/accuracy_online`.
    """
    return method_of(Setup(task, client, server, options), lambda _: jnp.float32(options.alpha_max))


def method_of(
    setup: Setup,
    alpha_max: AlphaMax,
    finish: Finish = lambda output, *_: output,
) -> Method:
    """FedSiam with one network or two, by the class of the options.

    The Broadcast's `extra` is the round's largest alpha; if it is 0 only one network is sent. `finish` changes what a client
    returns, given its trained networks and whether both networks are sent, a bool scalar.
    """
    task, client, server, options = setup
    paired = isinstance(options, FedSiamMTOptions)
    by_epochs = isinstance(options, FedSiamMTOptions) and options.alpha_counts == "epochs"
    if by_epochs and task.labels_at == ("server",):  # the server's training counts steps, whatever is asked for
        raise ValueError("method.alpha_counts: got epochs with labels at the server, accepted: steps")

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedSiamClientState]:
        state, optimizers = method.init(key, spec)
        if paired:
            weights = join(state.weights, state.weights)
            state = state._replace(weights=weights, optimizer=server.optimizer.init(weights.params))
        zeros = jnp.zeros(spec.num_clients, jnp.int32)
        return state, FedSiamClientState(zeros, zeros, optimizers)

    def predict(which: int) -> Callable[[ServerState, jax.Array, jax.Array], jax.Array]:
        return lambda state, images, mask: task.predict(each(state.weights)[which], images, mask)

    method = local.averaging_method(
        task,
        client,
        server,
        partial(client_update, setup, finish),
        labels_at=("server", "clients"),
        views=("labeled", "weak"),
        work=server_work(task, server, alpha_max),
        extra=lambda _, cohort: alpha_max(cohort.round + 1),
    )
    predictions = {"target": predict(-1), "online": predict(0)} if paired else {"online": predict(0)}
    requires = method.requires._replace(server_training=("after",))
    return method._replace(init=init, predict=predictions, requires=requires)


def client_update(
    setup: Setup, finish: Finish, shared: Broadcast, _: PyTree, state: FedSiamClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it trains the online network, which the target follows, and sends both networks or its only one."""
    task, client, _, options = setup
    order_key, train_key = jax.random.split(key)
    epochs = state.epochs + (client.epochs if options.divisor == "batch" else 0)
    examples = mix(data.labeled, data.unlabeled, options.labeled_repeats, local.client_repeats(options, data))
    # Without a siamese network a client learns from labels alone.
    learns = jnp.any(examples.mask & examples.labeled) | (options.consistency_weight > 0)
    schedule = client.schedule(order_key, examples.mask & learns)

    def alpha(batch: Batch) -> jax.Array:
        by_epochs = isinstance(options, FedSiamMTOptions) and options.alpha_counts == "epochs"
        before, number = (epochs, batch.epoch) if by_epochs else (state.steps, batch.step)
        return ema.warm_decay(before.astype(jnp.float32) + number + 1, shared.extra)

    online, *targets = each(shared.weights)
    gradient = client_gradient(task, options, examples, epochs, alpha)
    start = TrainState(online, state.optimizer, tuple(targets))
    trained = local.minimize(task, client, gradient, start, schedule, learning_rate=shared.learning_rate, key=train_key)
    new, optimizer, new_targets = trained.carry
    weights = join(new, *new_targets)
    taken = schedule._replace(steps=trained.steps)  # a client that runs out of time takes fewer
    most = MANY // 2  # counts stop here: larger ones would change no decay and no ramp
    steps = state.steps + jnp.minimum(taken.steps, most - state.steps)
    state = FedSiamClientState(steps, state.epochs + jnp.minimum(batching.num_epochs(taken), most - state.epochs), optimizer)
    weight = (data.labeled.count + data.unlabeled.count).astype(jnp.float32)
    output = local.output_of(task, shared.weights, weights, trained, weight, state)
    received = jnp.where(shared.extra > 0, num_bytes(shared.weights), num_bytes(online)).astype(jnp.int32)
    output = output._replace(metrics={**output.metrics, "comm/bytes_down": Sum(received)})
    return finish(output, weights, shared.extra > 0)


Alpha = Callable[[Batch], jax.Array]  # the target's decay after the step on a batch


def client_gradient(task: Task, options: FedSiamPiOptions, examples: Mixture, epochs: jax.Array, alpha: Alpha) -> GradientFn:
    """The gradient of L + beta_k J on a batch (Eq. 7) for the online network; its companion is the target, if there is one.

    `epochs` is the number of local epochs that ramps count before this training. If J has no weight, there is no forward pass
    of the target, whose statistics are then those of the online network.
    """
    distance = {"mse": losses.squared_error, "kl": losses.kl_divergence}[options.consistency]
    released = options.divisor == "batch"
    scale = 1.0 / task.num_classes if released and options.consistency == "mse" else 1.0
    siamese = options.consistency_weight > 0

    def gradient(online: Weights, batch: Batch, key: jax.Array, *targets: Weights) -> Gradients:
        at = batch.positions
        images, labels, labeled = examples.take(at), examples.labels[at], examples.labeled[at]

        def logits(network: Weights, key: jax.Array) -> tuple[jax.Array, PyTree]:
            views, unlabeled_views = task.views.labeled(key, images), task.views.weak(key, images)
            views = jnp.where(labeled.reshape(-1, *[1] * (views.ndim - 1)), views, unlabeled_views)
            return task.train_logits(network, views, batch.mask, local.dropout_key(key))

        online_key, target_key = jax.random.split(key)
        if siamese:
            target_logits, target_stats = logits(targets[0] if targets else online, target_key)
        used = labeled & batch.mask
        beta = options.consistency_weight * ema.ramp_up(epochs + batch.epoch + 1, RAMP_EPOCHS)

        def loss(online: Weights) -> tuple[jax.Array, PyTree, Metrics]:
            outputs, stats = logits(online, online_key)
            ce = losses.cross_entropy(outputs, labels)
            supervised = losses.masked_mean(ce, used, jnp.sum(batch.mask) if released else None)  # Eq. 6
            if not siamese:
                return supervised, stats, {"loss": mean(ce, used)}
            j = scale * distance(target_logits, outputs)
            metrics = {"loss": mean(ce, used), "consistency_loss": mean(j, batch.mask)}
            return supervised + beta * losses.masked_mean(j, batch.mask), stats, metrics  # Eq. 7

        gradients = local.gradients(loss, online)
        follow = following(task, targets, target_stats if siamese else gradients.batch_stats, alpha(batch))
        return gradients._replace(follow=follow)

    return gradient


def following(
    task: Task, targets: tuple[Weights, ...], batch_stats: PyTree, alpha: jax.Array
) -> Callable[[Weights], tuple[Weights, ...]]:
    """How targets follow the online network in a step: theta_t <- alpha theta_t + (1 - alpha) theta_s (Eqs. 3 and 9).

    `batch_stats` are the norm statistics of the target's own batch, `()` if there is none. Where alpha is 0 the target is the
    online network, with the statistics of that network.
    """

    def follow(target: Weights, online: Weights) -> Weights:
        of_target = task.update_stats(target.stats, batch_stats) if batch_stats != () else target.stats
        stats = jax.tree.map(lambda mine, other: jnp.where(alpha > 0, mine, other), of_target, online.stats)
        return Weights(ema.update(target.params, online.params, alpha), stats)

    return lambda online: tuple(follow(target, online) for target in targets)


def server_work(task: Task, server: Server, alpha_max: AlphaMax) -> ServerWork:
    """The server's work: the average (Eq. 2), training where it has labels (Eqs. 8, 9), and statistics of every network."""

    def train(state: ServerState, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        online, *targets = each(state.weights)

        def gradient(steps: jax.Array, online: Weights, batch: Batch, key: jax.Array, *targets: Weights) -> Gradients:
            before = data.round.astype(jnp.float32) * steps  # which may be more than an int32 holds
            alpha = ema.warm_decay(before + batch.step + 1, alpha_max(data.round + 1))
            gradients = local.supervised_gradient(task, data.labeled)(online, batch, key)
            return gradients._replace(follow=following(task, targets, (), alpha))

        start = TrainState(online, state.fine_tune, tuple(targets))
        end, metrics = local.train_server(task, server, lambda steps: partial(gradient, steps), start, data, key)
        return state._replace(weights=join(end.weights, *end.companions), fine_tune=end.optimizer), metrics

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        new = (with_statistics(task, server.static_norm, one, data) for one in each(state.weights))
        return state._replace(weights=join(*new))

    return local.server_work(task, server)._replace(train=train, statistics=statistics)
