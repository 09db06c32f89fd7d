"""Twin-sight (Zhang et al., ICLR 2024): a supervised and an unsupervised network at each client, for labels at some clients.

Losses are those of the authors' released code, as the paper's equations were not at hand. That code divides the neighborhood
loss by B xor 2, where B^2 is meant, and trains on no pseudo-labels unless told to; it swaps the weak and the strong view of
unlabeled clients, which is not reproduced. Its setting where every client has some labels is not here.
"""

from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import Key, PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import of_kind
from fedjax_ssl.local import (
    Broadcast,
    Gradients,
    Server,
    ServerState,
    ServerWork,
    Setup,
    Task,
    Training,
    TrainState,
    Weights,
    dropout_key,
    substream,
)
from fedjax_ssl.local.optimizers import is_on
from fedjax_ssl.local.semi_supervised import step_metrics
from fedjax_ssl.local.server import with_statistics
from fedjax_ssl.method import ClientData, ClientOutput, DataSpec, Method, ServerData
from fedjax_ssl.metrics import Metrics, mean
from fedjax_ssl.models import Predictor, pure
from fedjax_ssl.options import Decay, Fraction, LabeledRepeats, Options, Rate, Weight
from fedjax_ssl.ssl import freematch, instances, losses, pseudo_labels

HIDDEN, OUTPUTS = 8, 4
"""The projection's hidden units and outputs for each feature: 4,096 and 2,048 for the 512 features of a ResNet-18."""


class TwinSightOptions(Options):
    """Twin-sight's own settings."""

    pseudo_weight: Weight = Field(
        default=0.5, description="Weight of the pseudo-label loss of unlabeled clients. 0 leaves it out (released code)."
    )
    instance_weight: Weight = Field(
        default=0.5, description="Weight of the contrastive loss of the unsupervised network, which tells images apart."
    )
    neighborhood_weight: Weight = Field(
        default=1.0, description="Weight of the loss that makes cosines between examples' features alike in both networks."
    )
    neighborhood_divisor: Literal["pairs", "released"] = Field(
        default="pairs",
        description="What the sum over pairs of the B examples of a batch is divided by: their number B^2, or B xor 2 "
        "(`released`, the released code).",
    )
    temperature: Rate = Field(default=0.07, description="Temperature of the contrastive loss.")
    threshold_decay: Decay = Field(
        default=0.999,
        description="Decay per step of the moving averages that FreeMatch's thresholds are made of. They begin anew, at 1 / C, "
        "in each epoch.",
    )
    smallest_threshold: Fraction = Field(default=0.0, description="Lower limit of the classes' thresholds (0.9 for SVHN).")
    largest_threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Upper limit of the classes' thresholds (0.95 for SVHN)."
    )


def twinsight(*, task: Task, client: Training, server: Server, options: TwinSightOptions = TwinSightOptions()) -> Method:
    """Twin-sight: L = CE, or w_p L_pl at an unlabeled client, + w_i L_ins + w_n L_nbr, for both networks together.

    CE is that of labels on weak views, and L_pl is FreeMatch's loss, both of the supervised network f. L_ins is NT-Xent on the
    projections of both views by the unsupervised network g, and L_nbr compares the features of f and of g on weak views
    (`fedjax_ssl.ssl.instances`). Both networks are sent and averaged; g's batch-norm statistics, which nothing reads, are not.

    In `client.optimizer.layers` the paths of parameters begin with `supervised/`, `unsupervised/` or `projection/`. ValueError
    for a network without layers before its classifier.
    """
    task.check_backbone("twinsight")
    update = partial(client_update, Setup(task, client, server, options))
    method = local.averaging_method(
        task, client, server, update, labels_at=("some_clients",), views=("weak", "strong"), work=server_work(task, server)
    )

    def init(key: Key, spec: DataSpec) -> tuple[ServerState, PyTree]:
        first, second = task.init(key, spec.image_shape), task.init(jax.random.fold_in(key, 1), spec.image_shape)
        backbone, _ = task.split(second)
        num_features = task.num_features(backbone, spec.image_shape)
        projection, _ = pure(projection_of(num_features)).init(jax.random.fold_in(key, 2), (num_features,))
        params = {"supervised": first.params, "unsupervised": backbone.params, "projection": projection}
        state = ServerState(Weights(params, first.stats), server.optimizer.init(params), ())
        return state, optax.tree.batch_shape(client.init(params), (spec.num_clients,))

    predict = {"global": lambda state, images, mask: task.predict(supervised(state.weights), images, mask)}
    return method._replace(init=init, predict=predict)


def supervised(weights: Weights) -> Weights:
    """The supervised network's weights."""
    return Weights(weights.params["supervised"], weights.stats)


def projection_of(num_features: int) -> Predictor:
    """The layers behind the unsupervised network's features."""
    return Predictor(HIDDEN * num_features, OUTPUTS * num_features)


def server_work(task: Task, server: Server) -> ServerWork:
    """The usual work of a server, whose batch-norm statistics are those of the supervised network."""

    def statistics(state: ServerState, data: ServerData) -> ServerState:
        stats = with_statistics(task, server.static_norm, supervised(state.weights), data).stats
        return state._replace(weights=state.weights._replace(stats=stats))

    return local.server_work(task, server)._replace(statistics=statistics)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round of training both networks on its labeled or on its unlabeled examples."""
    task, client, _, options = setup
    (order_key, train_key), is_labeled = jax.random.split(key), data.labeled.count > 0
    examples = of_kind(data.labeled, data.unlabeled)
    per_epoch = jnp.maximum(-(-jnp.sum(examples.mask) // client.batch_size), 1)

    def gradient(weights: Weights, batch: Batch, key: Key, status: freematch.Status) -> Gradients:
        images, labels = examples.take(batch.positions), examples.labels[batch.positions]
        both = jnp.concatenate([task.views.weak(substream(key, "weak"), images), task.views.strong(key, images)])
        mask, number = batch.mask, len(batch.mask)
        of_unlabeled = batch._replace(mask=mask & ~is_labeled)
        # The supervised network sees the strong views of unlabeled clients alone, and only for pseudo-labels.
        seen = 2 * number if is_on(options.pseudo_weight) else number
        masks = jnp.concatenate([mask, of_unlabeled.mask])[:seen]
        status = optax.tree.where(batch.step % per_epoch == 0, freematch.start(task.num_classes), status)

        def loss(weights: Weights) -> tuple[jax.Array, PyTree, Metrics, freematch.Status]:
            (logits, features), stats = task.train_outputs(supervised(weights), both[:seen], masks, dropout_key(key))
            of_weak, of_strong = logits[:number], logits[-number:]
            label, accepted, new = pseudo_label(options, of_weak, of_unlabeled.mask, status)
            ce = losses.masked_mean(losses.cross_entropy(of_weak, labels), mask & is_labeled)
            by_pseudo = losses.masked_mean(losses.cross_entropy(of_strong, label), accepted, batch.real)
            twins = twin_losses(task, options, weights, both, features[:number], mask, key)
            total = ce + options.pseudo_weight * by_pseudo
            total += options.instance_weight * twins["instance_loss"] + options.neighborhood_weight * twins["neighborhood_loss"]
            values = {"loss": total, **twins}
            metrics = {name: mean(value, jnp.any(mask)) for name, value in values.items()}
            return total, stats, {**metrics, **step_metrics(label, accepted, data, of_unlabeled)}, new

        def value(params: PyTree) -> tuple[jax.Array, tuple[PyTree, Metrics, freematch.Status]]:
            total, *rest = loss(weights._replace(params=params))
            return total, tuple(rest)

        grad, (stats, metrics, new) = jax.grad(value, has_aux=True)(weights.params)
        return Gradients(grad, stats, metrics, follow=lambda _: (new,))

    schedule = local.repeated(LabeledRepeats(), data, client, lambda client: client.schedule(order_key, examples.mask))
    start, weight = TrainState(shared.weights, optimizer, (freematch.start(task.num_classes),)), local.data_weight(task, data)
    output = local.train_client(task, client, gradient, schedule, shared, start, weight=weight, key=train_key)
    return output._replace(client_state=output.client_state[0])


def pseudo_label(
    options: TwinSightOptions, logits: jax.Array, mask: jax.Array, status: freematch.Status
) -> tuple[jax.Array, jax.Array, freematch.Status]:
    """Pseudo-labels int32 [B] of weak views, which of them reach the threshold of their class, and the new status."""
    probs = jax.nn.softmax(jax.lax.stop_gradient(logits))
    status = freematch.update(status, probs, mask, decay=options.threshold_decay)
    label, confidence = pseudo_labels.harden(probs)
    limits = options.smallest_threshold, options.largest_threshold
    return label, mask & (confidence >= jnp.clip(freematch.class_thresholds(status), *limits)[label]), status


def twin_losses(
    task: Task, options: TwinSightOptions, weights: Weights, both: jax.Array, features: jax.Array, mask: jax.Array, key: Key
) -> dict[str, jax.Array]:
    """L_ins and L_nbr, from a batch's views `both` [2B, ...] and the supervised network's features [B, F] of weak ones."""
    masks, number, real = jnp.concatenate([mask, mask]), len(mask), jnp.sum(mask)
    second = Weights(weights.params["unsupervised"], weights.stats)
    of_both, _ = task.train_features(second, both, masks, dropout_key(substream(key, "unsupervised")))
    project = pure(projection_of(of_both.shape[1])).apply
    projected, _ = project(weights.params["projection"], {}, of_both, mask=masks, train=True)
    divisor = real * real if options.neighborhood_divisor == "pairs" else real ^ 2
    return {
        "instance_loss": instances.contrastive(projected[:number], projected[number:], mask, options.temperature),
        "neighborhood_loss": instances.neighborhood(features, of_both[:number], mask, divisor),
    }
