"""FixMatch and FreeMatch on pooled data: centralized baselines of federated training ((FL)^2, Figure 1).

A round is a number of steps of the server, each on a batch of labeled and a batch of unlabeled examples of the pool, which
batch norm sees together. The settings of these steps are those of `server.training`; the learning rate is computed anew for
every step. As in the authors' code (USB, TorchSSL), evaluation uses the moving average of the parameters, with the batch-norm
statistics of the trained network.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple, Self

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Gradients, Server, Setup, Task, Training, TrainState, Weights, apply_gradients, dropout_key, train
from fedjax_ssl.local.server import method_without_clients, requirements, with_statistics
from fedjax_ssl.method import DataSpec, Method, ServerData
from fedjax_ssl.metrics import Metrics, mean
from fedjax_ssl.options import Decay, Fraction, Options, Repeats, Weight
from fedjax_ssl.ssl import ema, freematch, losses, pseudo_labels


class CentralOptions(Options):
    """Settings of every method on pooled data."""

    mu: Repeats = Field(default=7, description="Unlabeled examples of a step, as a multiple of the labeled ones.")
    ema_decay: Decay = Field(
        default=0.999, description="Decay per step of the moving average of the parameters, which is evaluated."
    )


class FixMatchCentralOptions(CentralOptions):
    """FixMatch's settings on pooled data."""

    confidence: Fraction = Field(default=0.95, description="Confidence threshold of pseudo-labels.")


class FreeMatchCentralOptions(CentralOptions):
    """FreeMatch's settings on pooled data."""

    fairness_weight: Weight = Field(default=0.001, description="Weight of the fairness loss (w_f); 0: it is left out.")
    threshold_decay: Decay = Field(
        default=0.999, description="Decay per step of the moving averages that the thresholds are made of (lambda)."
    )
    largest_threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Upper limit of the global threshold tau (.95 for SVHN)."
    )


class CentralState(NamedTuple):
    """The server's network, the moving average of its parameters, the optimizer state, and `freematch.Status` or `()`."""

    weights: Weights
    average: PyTree
    optimizer: PyTree
    status: PyTree


class Outputs(NamedTuple):
    """The network's outputs on a batch of mu B unlabeled examples."""

    probs: jax.Array  # softmax outputs [mu B, C] on weak views, without gradient
    logits: jax.Array  # [mu B, C], on strong views
    mask: jax.Array  # bool [mu B], the real examples
    true_labels: jax.Array  # int32 [mu B], for diagnostics alone


Unlabeled = tuple[jax.Array, PyTree, Metrics]  # the loss of unlabeled examples, the new status, and metrics
UnlabeledLoss = Callable[[Outputs, PyTree], Unlabeled]  # of the outputs and the status


def fixmatch_central(
    *, task: Task, client: Training, server: Server, options: FixMatchCentralOptions = FixMatchCentralOptions()
) -> Method:
    """FixMatch on pooled data (Sohn et al. 2020): L = L_s + L_u, where pseudo-labels with max q >= confidence are accepted."""
    return method_of(Setup(task, client, server, options), lambda num_classes: (), partial(fixmatch_loss, options))


def freematch_central(
    *, task: Task, client: Training, server: Server, options: FreeMatchCentralOptions = FreeMatchCentralOptions()
) -> Method:
    """FreeMatch on pooled data (Wang et al. 2023): L = L_s + L_u + w_f L_f, where L_f is the fairness term.

    As in the authors' code, a pseudo-label is accepted where max q >= tau_t(argmax q); tau_t already includes the batch's q.
    """
    return method_of(Setup(task, client, server, options), freematch.start, partial(freematch_loss, options))


def method_of(setup: Setup, start: Callable[[int], PyTree], unlabeled_loss: UnlabeledLoss) -> Method:
    """A method that trains on pooled data; `start` makes the initial status from the number of classes."""
    task, _, server, _ = setup

    def init(key: jax.Array, spec: DataSpec) -> CentralState:
        weights = task.init(key, spec.image_shape)
        return CentralState(weights, weights.params, server.training.init(weights.params), start(spec.num_classes))

    return method_without_clients(
        init=init,
        train=partial(train_round, setup, unlabeled_loss),
        predict=lambda state, images, mask: task.predict(_evaluated(state), images, mask),
        requires=requirements(task, server)._replace(pool=True),
    )


def train_round(
    setup: Setup, unlabeled_loss: UnlabeledLoss, state: CentralState, data: ServerData, key: jax.Array
) -> tuple[CentralState, Metrics]:
    """One round: the server's steps, then the statistics of batch norm where they are static."""
    task, _, server, options = setup
    training = server.training

    def step(state: CentralState, inputs: StepInputs, key: jax.Array) -> tuple[CentralState, Metrics]:
        gradients, status = gradient(task, unlabeled_loss, data, state, inputs, key)
        new = apply_gradients(task, training, TrainState(state.weights, state.optimizer), gradients, inputs.learning_rate)
        average = ema.update(state.average, new.weights.params, options.ema_decay)
        return CentralState(new.weights, average, new.optimizer, status), gradients.metrics

    begun = state._replace(optimizer=training.start(state.weights.params, state.optimizer))
    *batch_keys, step_key = jax.random.split(key, 3)
    end, metrics, *_ = train(begun, step, step_inputs(training, options.mu, data, batch_keys), step_key)
    stats = with_statistics(task, server.static_norm, _evaluated(end), data).stats
    end = end._replace(weights=end.weights._replace(stats=stats), optimizer=training.stored(end.optimizer))
    return end, {name if "/" in name else f"server/{name}": value for name, value in metrics.items()}


def fixmatch_loss(options: FixMatchCentralOptions, outputs: Outputs, status: PyTree) -> Unlabeled:
    """FixMatch's loss of unlabeled examples, which has no status."""
    label, confidence = pseudo_labels.harden(outputs.probs)
    accepted = outputs.mask & (confidence >= options.confidence)
    loss, metrics = consistency_loss(outputs, label, accepted)
    return loss, status, metrics


def freematch_loss(options: FreeMatchCentralOptions, outputs: Outputs, status: freematch.Status) -> Unlabeled:
    """FreeMatch's loss of unlabeled examples, by the thresholds of the status that already includes the batch."""
    decay, largest = options.threshold_decay, options.largest_threshold
    status = freematch.update(status, outputs.probs, outputs.mask, decay=decay, largest=largest)
    label, confidence = pseudo_labels.harden(outputs.probs)
    accepted = outputs.mask & (confidence >= freematch.class_thresholds(status)[label])
    loss, metrics = consistency_loss(outputs, label, accepted)
    if options.fairness_weight:
        loss += options.fairness_weight * freematch.fairness_loss(outputs.logits, accepted, status)
    return loss, status, {**metrics, "threshold": mean(status.tau)}


def consistency_loss(outputs: Outputs, label: jax.Array, accepted: jax.Array) -> tuple[jax.Array, Metrics]:
    """L_u, the summed cross-entropy of accepted strong views over the batch size (Sohn et al. 2020, Eq. 4), and metrics."""
    loss = losses.masked_mean(losses.cross_entropy(outputs.logits, label), accepted, jnp.sum(outputs.mask))
    metrics = pseudo_labels.diagnostics(label, outputs.true_labels, accepted, outputs.mask)
    return loss, {**metrics, "mask_rate": mean(accepted, outputs.mask)}


def _evaluated(state: CentralState) -> Weights:
    return Weights(state.average, state.weights.stats)


class StepInputs(NamedTuple):
    """A step's batches of B labeled and mu B unlabeled examples and its learning rate; for S steps, with a leading axis S."""

    labeled: Batch
    unlabeled: Batch
    learning_rate: jax.Array

    @property
    def steps(self) -> int:
        """The number of steps S."""
        return self.learning_rate.shape[0]

    @property
    def real(self) -> jax.Array:
        """How many examples a step has."""
        return self.labeled.real + self.unlabeled.real

    def take(self, step: jax.Array) -> Self:
        """The inputs of one step."""
        return jax.tree.map(lambda x: x[step], self)


def step_inputs(training: Training, mu: int, data: ServerData, keys: Sequence[jax.Array]) -> StepInputs:
    """The inputs of a round's S steps: full batches, and the learning rate at time round + s / S for step s.

    S is `training.steps`, or the number of batches in `training.epochs` over the labeled examples. The two `keys` draw labeled
    and unlabeled batches.
    """
    size = training.batch_size
    number = training.steps or training.epochs * -(-data.labeled.index.shape[0] // size)
    at = jnp.arange(number)
    return StepInputs(
        batching.stream(keys[0], data.labeled.mask, size, number),
        batching.stream(keys[1], data.unlabeled.mask, mu * size, number),
        jax.vmap(lambda time: training.learning_rate(time, 1 / number))(data.round + at / number),
    )


def gradient(
    task: Task, unlabeled_loss: UnlabeledLoss, data: ServerData, state: CentralState, inputs: StepInputs, key: jax.Array
) -> tuple[Gradients, PyTree]:
    """The gradient of a step's loss on labeled, weak and strong views together, and the new status."""
    labels, (labeled, unlabeled, _) = data.labeled.labels, inputs
    assert labels is not None
    labeled_key, weak_key, strong_key = jax.random.split(key, 3)
    images = data.unlabeled.take(unlabeled.positions)
    examples = task.views.labeled(labeled_key, data.labeled.take(labeled.positions))
    views = (examples, task.views.weak(weak_key, images), task.views.strong(strong_key, images))
    masks = (labeled.mask, unlabeled.mask, unlabeled.mask)

    def loss(params: PyTree) -> tuple[jax.Array, tuple[PyTree, PyTree, Metrics]]:
        weights = state.weights._replace(params=params)
        logits, batch_stats = task.train_logits_together(weights, views, masks, dropout_key(key), fixed=1)
        of_labeled, of_weak, of_strong = logits
        supervised = losses.masked_mean(losses.cross_entropy(of_labeled, labels[labeled.positions]), labeled.mask)
        probs = jax.nn.softmax(of_weak)
        outputs = Outputs(probs, of_strong, unlabeled.mask, data.true_labels[unlabeled.positions])
        consistency, status, metrics = unlabeled_loss(outputs, state.status)
        return supervised + consistency, (batch_stats, status, metrics)

    (total, (batch_stats, status, metrics)), grad = jax.value_and_grad(loss, has_aux=True)(state.weights.params)
    return Gradients(grad, batch_stats, {"loss": mean(total), **metrics}), status
