"""FedCon (Long et al. 2021): labels at the server, contrastive learning without negatives at the clients.

The server trains on its labels, kept consistent with a slow average of itself; each client trains the layers before the
classifier, the backbone, to predict what a slow average of its own makes of another view of the same image (BYOL). Only
backbones travel: the classifier stays at the server, the predictor and the average at the client that they belong to.

The losses are the paper's, with its released code's optimizers and schedules, but not that code's slips: there the server's
average is never used, the clients' LARS has no momentum and its schedule, a warm-up and a cosine, starts anew each round (here
one cosine spans the run), and what belongs to a client is kept under the number of a batch, so that clients find others'
predictors. Its last partial batches are dropped, here they are trained on.

Every client keeps a predictor and an average of its own. With the paper's networks on CIFAR-10 the predictor has 100,704,256
parameters and 100 clients take 41 GB, in memory and in each checkpoint: `execution.data=host` keeps them off the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Broadcast, Fit, Gradients, Server, Task, Training, Weights, apply_gradients, dropout_key
from fedjax_ssl.local.server import ServerWork, requirements, server_step, with_statistics
from fedjax_ssl.local.task import join
from fedjax_ssl.method import Aggregate, ClientOutput, Cohort, DataSpec, Method, ServerData, Shard
from fedjax_ssl.metrics import Metrics, mean
from fedjax_ssl.models import ModelFns, predictor
from fedjax_ssl.options import Count, Fraction, Options, Positive
from fedjax_ssl.ssl import ema, losses

PyTree = Any


class FedConOptions(Options):
    """FedCon's own settings."""

    head_hidden: Count = Field(
        default=0,
        description="Hidden units of the clients' predictors; 0: three times the number of features.",
    )
    target_decay: Fraction = Field(default=0.999, description="Of a client's average, per step.")
    teacher_rate: Fraction = Field(
        default=4e-4,
        description="Of the server's average, whose decay is 1 - teacher_rate in the first step and 1 in the last.",
    )
    ramp_rounds: Positive = Field(default=100, description="Rounds until the server's consistency term has its whole weight.")


class FedConState(NamedTuple):
    """What the server keeps.

    Attributes:
        weights: the whole network, which is tested; its backbone is sent out.
        optimizer: state of the server optimizer, of the backbone.
        fine_tune: state of the optimizer of its training, `()` where that starts afresh each round, as FedCon's does.
        teacher: parameters of the average of the whole network.
        steps: int32 scalar, k: training steps so far.
    """

    weights: Weights
    optimizer: PyTree
    fine_tune: PyTree
    teacher: PyTree
    steps: jax.Array


class Personal(NamedTuple):
    """What a client keeps, and nobody else sees.

    Attributes:
        head: parameters of its predictor h.
        target: parameters of f', the average of its backbones.
        seen: bool scalar, whether it took part before; until then f' is the backbone that it receives.
        optimizer: state of its optimizer, `()` where that starts afresh each round, as FedCon's does.
    """

    head: PyTree
    target: PyTree
    seen: jax.Array
    optimizer: PyTree


def fedcon(*, task: Task, client: Training, server: Server, options: FedConOptions = FedConOptions()) -> Method:
    """FedCon: two views of each image, at the server with labels, at the clients without.

    Args:
        task: network and views; the network has layers before its classifier. Server and clients draw two views of an image
            from one recipe, the labeled and the weak one.
        client: local training.
        server: aggregation, its training (before round 1 as well: `pretrain`) and statistics.
        options: sizes and rates.

    Returns:
        The method. A round is an average of the clients' backbones, uniform over those that have data, then a training of
        the server; its client states are `Personal`.

    Raises:
        ValueError: the network is all classifier.
    """
    if not task.model.backbone():
        raise ValueError(
            "model.name: got a network that is one classifier, with method.name=fedcon, "
            "accepted: one with layers before its classifier, such as cnn, cifar_cnn, mnist_cnn or mlp"
        )

    def init(key: jax.Array, spec: DataSpec) -> tuple[FedConState, PyTree]:
        weights = task.init(key, spec.image_shape)
        backbone, _ = task.split(weights)
        image = jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)
        (_, num_features) = jax.eval_shape(task.model.features, *backbone, image)[0].shape
        head, _ = head_of(options, num_features).init(jax.random.fold_in(key, 1), (num_features,))
        state = FedConState(
            weights,
            server.optimizer.init(backbone.params),
            server.fine_tune.init(weights.params),
            teacher=weights.params,
            steps=jnp.zeros((), jnp.int32),
        )
        optimizer = client.init({"backbone": backbone.params, "head": head})
        one = Personal(head, backbone.params, jnp.zeros((), bool), optimizer)
        return state, jax.tree.map(lambda x: jnp.broadcast_to(x, (spec.num_clients, *x.shape)), one)

    def broadcast(state: FedConState, _: PyTree, cohort: Cohort) -> tuple[Broadcast, PyTree]:
        return Broadcast(task.split(state.weights)[0], client.learning_rate(cohort.round)), ()

    work = server_work(task, server, options)
    return Method(
        init=init,
        prepare=work.prepare,
        broadcast=broadcast,
        client_update=partial(client_update, task, client, options),
        server_update=work.finish_round,
        predict={"global": lambda state, images, mask: task.predict(state.weights, images, mask)},
        requires=requirements(task, server)._replace(server_training=("after",)),
    )


def client_update(
    task: Task,
    client: Training,
    options: FedConOptions,
    shared: Broadcast,
    _: PyTree,
    own: Personal,
    shard: Shard,
    key: jax.Array,
) -> ClientOutput:
    """One client's round: trains backbone and head, its target following the backbone; the backbone alone is sent."""
    order_key, train_key = jax.random.split(key)
    received = shared.weights
    target = jax.tree.map(lambda last, new: jnp.where(own.seen, last, new), own.target, received.params)
    gradient = client_gradient(task, options, shard.unlabeled)
    start = client.start(received._replace(params={"backbone": received.params, "head": own.head}), own.optimizer)
    anchor = start.weights.params

    def step(carry: tuple[Fit, PyTree], batch: Batch, key: jax.Array) -> tuple[tuple[Fit, PyTree], Metrics]:
        fit, target = carry
        gradients = gradient(fit.weights, batch, key, target)
        fit = apply_gradients(task, client, fit, gradients, shared.learning_rate, anchor=anchor)
        return (fit, ema.update(target, fit.weights.params["backbone"], options.target_decay)), gradients.metrics

    trained = local.train((start, target), step, client.schedule(order_key, shard.unlabeled.mask), train_key)
    ((params, stats), optimizer), target = trained.carry
    update = task.update(received, Weights(params["backbone"], stats))
    takes_part = shard.unlabeled.count > 0
    personal = Personal(params["head"], target, own.seen | takes_part, client.keep(optimizer))
    metrics = local.client_metrics(trained, down=received, up=update)
    return ClientOutput(update, jnp.where(takes_part, 1.0, 0.0), personal, metrics)


def head_of(options: FedConOptions, num_features: int) -> ModelFns:
    """The clients' predictor of features [B, num_features]."""
    return predictor(options.head_hidden or 3 * num_features)


TeacherGradient = Callable[[Weights, Batch, jax.Array, PyTree], Gradients]
"""(weights, batch, key, parameters of what follows the weights) -> Gradients."""


def client_gradient(task: Task, options: FedConOptions, examples: Examples) -> TeacherGradient:
    """The gradient of a client's step, for parameters {backbone f, head h} and the teacher f'.

        L = -1/2 cos(h(f(x1)), f'(x2)) - 1/2 cos(h(f(x2)), f'(x1)), mean over the batch

    f' normalizes by its batches too, and drops by keys of its own; nothing but its parameters is kept.
    """

    def gradient(weights: Weights, batch: Batch, key: jax.Array, target: PyTree) -> Gradients:
        views, keys, target_keys = _two_views(task.views.weak, examples.take(batch.positions), key)
        (t1, t2), _ = _both(task.train_features, weights._replace(params=target), views, batch.mask, target_keys)

        def loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            backbone = weights._replace(params=params["backbone"])
            features, batch_stats = _both(task.train_features, backbone, views, batch.mask, keys)
            head = head_of(options, t1.shape[-1]).apply
            p1, p2 = (head(params["head"], {}, f, mask=batch.mask, train=True)[0] for f in features)
            values = (losses.negative_cosine(p1, t2) + losses.negative_cosine(p2, t1)) / 2
            return losses.masked_mean(values, batch.mask), (values, batch_stats)

        grad, (values, batch_stats) = jax.grad(loss, has_aux=True)(weights.params)
        return Gradients(grad, batch_stats, {"loss": mean(values, batch.mask)})

    return gradient


def server_gradient(task: Task, examples: Examples, consistency_weight: jax.Array) -> TeacherGradient:
    """The gradient of a step of the server, for its parameters and those of its teacher (primed).

        L = 1/2 [CE(z1) + CE(z2)] + w/2 [KL(z2' || z1) + KL(z1' || z2)], mean over the batch

    The teacher normalizes by its batches too, and drops by keys of its own.

    Args:
        task: network and views.
        examples: the labeled examples.
        consistency_weight: w(t), float32 scalar.
    """
    assert examples.labels is not None
    all_labels = examples.labels

    def gradient(weights: Weights, batch: Batch, key: jax.Array, teacher: PyTree) -> Gradients:
        labels = all_labels[batch.positions]
        views, keys, teacher_keys = _two_views(task.views.labeled, examples.take(batch.positions), key)
        (t1, t2), _ = _both(task.train_logits, weights._replace(params=teacher), views, batch.mask, teacher_keys)

        def loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array, PyTree]]:
            (z1, z2), batch_stats = _both(task.train_logits, weights._replace(params=params), views, batch.mask, keys)
            ce = (losses.cross_entropy(z1, labels) + losses.cross_entropy(z2, labels)) / 2
            kl = (losses.kl_divergence(t2, z1) + losses.kl_divergence(t1, z2)) / 2
            return losses.masked_mean(ce + consistency_weight * kl, batch.mask), (ce, kl, batch_stats)

        grad, (ce, kl, batch_stats) = jax.grad(loss, has_aux=True)(weights.params)
        metrics = {"loss": mean(ce, batch.mask), "consistency_loss": mean(kl, batch.mask)}
        return Gradients(grad, batch_stats, metrics)

    return gradient


def _two_views(
    view: Callable[[jax.Array, jax.Array], jax.Array], images: jax.Array, key: jax.Array
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Two views of a batch, drawn apart; the dropout keys of the network's passes on them, and those of its teacher's."""
    keys = jax.random.split(key, 4)
    dropout_keys = [dropout_key(k) for k in keys]
    return [view(k, images) for k in keys[:2]], dropout_keys[:2], dropout_keys[2:]


def _both(
    forward: Callable[..., tuple[jax.Array, PyTree]],
    weights: Weights,
    views: Sequence[jax.Array],
    mask: jax.Array,
    keys: Sequence[jax.Array],
) -> tuple[list[jax.Array], PyTree]:
    """Outputs of the two views, each normalized by its own batch, and the mean of the two batches' statistics."""
    outputs, stats = zip(*(forward(weights, view, mask, key) for view, key in zip(views, keys, strict=True)), strict=True)
    return list(outputs), jax.tree.map(lambda a, b: (a + b) / 2, *stats)


def server_work(task: Task, server: Server, options: FedConOptions) -> ServerWork:
    """The server's work: the average of backbones, a training on its labels that its teacher follows step by step, statistics.

    The teacher's decay is 1 - rate (cos(pi k/K) + 1)/2 after step k of K in all, both counted from 0, and the weight of
    consistency w(t) = exp(-5 (1 - t/ramp_rounds)^2) in training t, which is round t in the released code.
    """

    def step(state: FedConState, aggregate: Aggregate) -> FedConState:
        backbone, classifier = task.split(state.weights)
        backbone, optimizer = server_step(server, backbone, state.optimizer, aggregate)
        return state._replace(weights=join(backbone, classifier), optimizer=optimizer)

    def train(state: FedConState, data: ServerData, key: jax.Array) -> tuple[FedConState, Metrics]:
        order_key, train_key = jax.random.split(key)
        training = server.fine_tune
        schedule = training.schedule(order_key, data.labeled.mask)
        steps = jnp.maximum(schedule.steps, 1)
        in_all = steps * (server.pretrain + data.rounds)
        gradient = server_gradient(task, data.labeled, ema.ramp_up(state.steps // steps, options.ramp_rounds))
        rate, anchor = training.learning_rate(data.round), state.weights.params

        def one(carry: tuple[Fit, PyTree], batch: Batch, key: jax.Array) -> tuple[tuple[Fit, PyTree], Metrics]:
            fit, teacher = carry
            gradients = gradient(fit.weights, batch, key, teacher)
            fit = apply_gradients(task, training, fit, gradients, rate, anchor=anchor)
            decay = ema.annealed_decay(state.steps + batch.step, in_all, options.teacher_rate)
            return (fit, ema.update(teacher, fit.weights.params, decay)), gradients.metrics

        start = training.start(state.weights, state.fine_tune), state.teacher
        trained = local.train(start, one, schedule, train_key)
        (weights, optimizer), teacher = trained.carry
        state = FedConState(weights, state.optimizer, training.keep(optimizer), teacher, state.steps + schedule.steps)
        return state, {f"server/{name}": value for name, value in trained.metrics.items()}

    def statistics(state: FedConState, data: ServerData) -> FedConState:
        return state._replace(weights=with_statistics(task, server.static_norm, state.weights, data))

    return ServerWork(step, train, statistics, server.pretrain)
