"""FedCon (Long et al. 2021): labels at the server, contrastive learning without negatives at the clients.

The server trains on its labels and on consistency with a teacher, a slow moving average of its network. Each client trains the
backbone, the layers before the classifier, to predict what the backbone's slow moving average makes of another view of the same
image (BYOL). Only backbones are sent; a client keeps its predictor and average (off the device with `execution.data=host`).
A client trains no classifier, and in `client.optimizer.layers` the paths of its parameters begin with `backbone/` or `head/`.

Losses are the paper's; optimizers and schedules are those of its released code without what seem to be its mistakes. In the
released code the server's average is never used, LARS has no momentum and its schedule starts anew each round (here one cosine
spans the run), client states are stored by the index of a batch, and the last partial batch is dropped.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Broadcast, Gradients, Server, Setup, Task, Training, TrainState, Weights, dropout_key
from fedjax_ssl.local.objectives import View
from fedjax_ssl.local.server import ServerState, ServerWork, server_step
from fedjax_ssl.local.task import join
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, Cohort, DataSpec, Method, ServerData
from fedjax_ssl.metrics import Metrics, mean
from fedjax_ssl.models import Predictor, pure
from fedjax_ssl.options import MANY, Fraction, Options, Positive, Size
from fedjax_ssl.ssl import ema, losses


class FedConOptions(Options):
    """FedCon's own settings."""

    head_hidden: Size = Field(
        default=0, description="Hidden units of the clients' predictors; 0: three times the number of features."
    )
    target_decay: Fraction = Field(
        default=0.999, description="Decay per step of the moving average of a client's backbone, which is its target network."
    )
    teacher_rate: Fraction = Field(
        default=4e-4,
        description="How fast the server's teacher follows at first: its decay rises from 1 minus this number to 1.",
    )
    ramp_rounds: Positive = Field(
        default=100, description="Rounds over which the weight of the server's consistency loss rises to 1."
    )


class Teacher(NamedTuple):
    """What the server's state adds: the moving average of its network's parameters, and the number k of steps so far."""

    params: PyTree
    steps: jax.Array


class FedConClientState(NamedTuple):
    """A client's predictor h, the average f' of its backbones, whether it took part before, and its optimizer state."""

    head: PyTree
    target: PyTree  # not read in the client's first round, in which f' begins as the backbone that it receives
    seen: jax.Array
    optimizer: PyTree


def fedcon(*, task: Task, client: Training, server: Server, options: FedConOptions = FedConOptions()) -> Method:
    """FedCon: a round averages the backbones of the clients that have data, uniformly, then the server trains.

    Both views of an image are drawn from the same recipe: the labeled one at the server, and the weak one at the clients.
    ValueError for a network without layers before its classifier.
    """
    task.check_backbone("fedcon")

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedConClientState]:
        weights = task.init(key, spec.image_shape)
        backbone, _ = task.split(weights)
        num_features = task.num_features(backbone, spec.image_shape)
        head, _ = pure(Predictor(options.head_hidden or 3 * num_features)).init(jax.random.fold_in(key, 1), (num_features,))
        optimizers = server.optimizer.init(backbone.params), server.training.init(weights.params)
        state = ServerState(weights, *optimizers, extra=Teacher(weights.params, jnp.zeros((), jnp.int32)))
        optimizer = client.init({"backbone": backbone.params, "head": head})
        one = FedConClientState(head, backbone.params, jnp.zeros((), bool), optimizer)
        return state, optax.tree.batch_shape(one, (spec.num_clients,))

    def broadcast(state: ServerState, _: PyTree, cohort: Cohort) -> tuple[Broadcast, PyTree]:
        return Broadcast(task.split(state.weights)[0], client.learning_rate(cohort.round)), ()

    update = partial(client_update, Setup(task, client, server, options))
    method = local.averaging_method(task, client, server, update, views=("weak",), work=server_work(task, server, options))
    requires = method.requires._replace(rounds=True, server_training=("after",))
    return method._replace(init=init, broadcast=broadcast, requires=requires)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, state: FedConClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it trains backbone and predictor, its average follows, and it sends the backbone."""
    task, client, _, options = setup
    order_key, train_key = jax.random.split(key)
    received = shared.weights
    target = optax.tree.where(state.seen, state.target, received.params)
    gradient = client_gradient(task, options, data.unlabeled)
    start = TrainState(received._replace(params={"backbone": received.params, "head": state.head}), state.optimizer, (target,))
    schedule, takes_part = client.schedule(order_key, data.unlabeled.mask), data.unlabeled.count > 0
    trained = local.minimize(task, client, gradient, start, schedule, learning_rate=shared.learning_rate, key=train_key)
    (params, stats), optimizer, (target,) = trained.carry
    state = optax.tree.where(takes_part, FedConClientState(params["head"], target, jnp.array(True), optimizer), state)
    weight = jnp.where(takes_part, 1.0, 0.0)
    return local.output_of(task, received, Weights(params["backbone"], stats), trained, weight, state)


def client_gradient(task: Task, options: FedConOptions, examples: Examples) -> GradientFn:
    """The gradient of a client's step for its backbone f and predictor h, with the moving average f' of the backbone.

        L = -1/2 cos(h(f(x1)), f'(x2)) - 1/2 cos(h(f(x2)), f'(x1)), mean over the batch

    f' is in training mode, with dropout keys of its own; its batch statistics are dropped.
    """

    def gradient(weights: Weights, batch: Batch, key: jax.Array, target: PyTree) -> Gradients:
        views, keys, target_keys = _two_views(task.views.weak, examples.take(batch.positions), key)
        (t1, t2), _ = _both(task.train_features, weights._replace(params=target), views, batch.mask, target_keys)

        def loss(weights: Weights) -> tuple[jax.Array, PyTree, Metrics]:
            backbone = weights._replace(params=weights.params["backbone"])
            features, batch_stats = _both(task.train_features, backbone, views, batch.mask, keys)
            head = pure(Predictor(options.head_hidden or 3 * t1.shape[-1])).apply
            p1, p2 = (head(weights.params["head"], {}, f, mask=batch.mask, train=True)[0] for f in features)
            value, metric = local.mean_loss((losses.negative_cosine(p1, t2) + losses.negative_cosine(p2, t1)) / 2, batch.mask)
            return value, batch_stats, {"loss": metric}

        def follow(new: Weights) -> tuple[PyTree]:
            return (ema.update(target, new.params["backbone"], options.target_decay),)

        return local.gradients(loss, weights)._replace(follow=follow)

    return gradient


def server_gradient(
    task: Task, examples: Examples, consistency_weight: jax.Array, decay: Callable[[jax.Array], jax.Array]
) -> GradientFn:
    """The gradient of a server's step, for outputs z of its network and z' of its teacher on two views.

        L = 1/2 [CE(z1) + CE(z2)] + w/2 [KL(z2' || z1) + KL(z1' || z2)], mean over the batch

    The teacher is in training mode, with dropout keys of its own; w is `consistency_weight`, and `decay` gives the teacher's
    decay after a number of steps.
    """

    def gradient(weights: Weights, batch: Batch, key: jax.Array, teacher: Teacher) -> Gradients:
        assert examples.labels is not None
        labels = examples.labels[batch.positions]
        views, keys, teacher_keys = _two_views(task.views.labeled, examples.take(batch.positions), key)
        (t1, t2), _ = _both(task.train_logits, weights._replace(params=teacher.params), views, batch.mask, teacher_keys)

        def loss(weights: Weights) -> tuple[jax.Array, PyTree, Metrics]:
            (z1, z2), batch_stats = _both(task.train_logits, weights, views, batch.mask, keys)
            ce = (losses.cross_entropy(z1, labels) + losses.cross_entropy(z2, labels)) / 2
            kl = (losses.kl_divergence(t2, z1) + losses.kl_divergence(t1, z2)) / 2
            metrics = {"loss": mean(ce, batch.mask), "consistency_loss": mean(kl, batch.mask)}
            return losses.masked_mean(ce + consistency_weight * kl, batch.mask), batch_stats, metrics

        def follow(new: Weights) -> tuple[Teacher]:
            steps = jnp.minimum(teacher.steps, MANY - 1) + 1
            return (Teacher(ema.update(teacher.params, new.params, decay(teacher.steps)), steps),)

        return local.gradients(loss, weights)._replace(follow=follow)

    return gradient


Two = list[jax.Array]  # one array for each of two views


def _two_views(view: View, images: jax.Array, key: jax.Array) -> tuple[Two, Two, Two]:
    """Two independent views of a batch; the two dropout keys of the network, and those of its moving average."""
    keys = jax.random.split(key, 4)
    dropout_keys = [dropout_key(k) for k in keys]
    return [view(k, images) for k in keys[:2]], dropout_keys[:2], dropout_keys[2:]


def _both(
    forward: Callable[..., tuple[jax.Array, PyTree]], weights: Weights, views: Two, mask: jax.Array, keys: Two
) -> tuple[Two, PyTree]:
    """Outputs on two views, each normalized by its own batch, and the mean of the statistics of the two batches."""
    outputs, stats = zip(*(forward(weights, view, mask, key) for view, key in zip(views, keys, strict=True)), strict=True)
    return list(outputs), jax.tree.map(lambda a, b: (a + b) / 2, *stats)


def server_work(task: Task, server: Server, options: FedConOptions) -> ServerWork:
    """The server's work: the average of backbones, and a training on its labels that its teacher follows.

    After step k of all K steps of the run the teacher's decay is 1 - rate (cos(pi k/K) + 1)/2. In training t the weight of
    consistency is w(t) = exp(-5 (1 - t/ramp_rounds)^2).
    """

    def step(state: ServerState, aggregate: Aggregate) -> ServerState:
        backbone, classifier = task.split(state.weights)
        backbone, optimizer = server_step(server, backbone, state.optimizer, aggregate)
        return state._replace(weights=join(backbone, classifier), optimizer=optimizer)

    def train(state: ServerState, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        def objective(steps: jax.Array) -> GradientFn:
            steps = jnp.maximum(steps, 1)
            all_steps = steps.astype(jnp.float32) * (server.pretrain + jnp.float32(data.rounds))
            weight = ema.ramp_up(state.extra.steps // steps, options.ramp_rounds)
            return server_gradient(task, data.labeled, weight, lambda k: ema.annealed_decay(k, all_steps, options.teacher_rate))

        start = TrainState(state.weights, state.fine_tune, (state.extra,))
        (weights, optimizer, (teacher,)), metrics = local.train_server(task, server, objective, start, data, key)
        return state._replace(weights=weights, fine_tune=optimizer, extra=teacher), metrics

    return local.server_work(task, server)._replace(step=step, train=train)
