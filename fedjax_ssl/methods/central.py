"""FixMatch and FreeMatch on pooled data: what federated training is measured against ((FL)^2, Figure 1).

All work is the server's: a round is a number of steps, each on a batch of labeled and a batch of unlabeled examples from the
whole pool, in one forward pass. Clients take no part. As in the authors' code (USB, TorchSSL; for FixMatch also its own), the
moving average of the parameters is evaluated, with the statistics of batch norm that the trained network has tracked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import pydantic
from pydantic import Field

from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Fit, Gradients, Server, Task, Training, Weights, apply_gradients, dropout_key, train
from fedjax_ssl.local.server import method_without_clients, requirements, with_statistics
from fedjax_ssl.method import DataSpec, Method, ServerData
from fedjax_ssl.metrics import Metrics, mean
from fedjax_ssl.options import Decay, Fraction, Options, Positive, Weight
from fedjax_ssl.ssl import ema, freematch, losses, pseudo_labels, thresholds

PyTree = Any


class FixMatchCentralOptions(Options):
    """FixMatch's settings on pooled data."""

    mu: Positive = Field(default=7, description="Unlabeled examples of a step for each labeled one.")
    confidence: Fraction = Field(default=0.95, description="The fixed threshold.")
    ema_decay: Decay = Field(default=0.999, description="Of the moving average of the parameters, per step.")


class FreeMatchCentralOptions(Options):
    """FreeMatch's settings on pooled data."""

    mu: Positive = Field(default=7, description="Unlabeled examples of a step for each labeled one.")
    fairness_weight: Weight = Field(default=0.001, description="W_f, as USB's configs have it; 0: without the fairness term.")
    threshold_decay: Decay = Field(default=0.999, description="Lambda of the status that thresholds follow.")
    threshold_clip: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="The largest tau: .95 in USB on SVHN; 1: none.",
    )
    threshold_quantile: Decay = Field(
        default=0.0,
        description="Tau follows this quantile of a batch's confidences (USB's option: .8); 0: their mean.",
    )
    least_threshold: Weight = Field(
        default=0.0,
        description="The thresholds of single examples are moved into this range: .9 and .95 in TorchSSL on SVHN.",
    )
    most_threshold: Weight = Field(
        default=1.0,
        description="The thresholds of single examples are moved into this range: .9 and .95 in TorchSSL on SVHN.",
    )
    ema_decay: Decay = Field(default=0.999, description="Of the moving average of the parameters, per step.")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.least_threshold > self.most_threshold:
            accepted = f"a number in [0, method.most_threshold = {self.most_threshold}]"
            raise ValueError(f"method.least_threshold: got {self.least_threshold}, accepted: {accepted}")
        return self


class CentralState(NamedTuple):
    """What the server keeps.

    Attributes:
        weights: the network that is trained, and the statistics that are tested with.
        average: the moving average of its parameters, which are tested.
        optimizer: the optimizer's state.
        status: what the thresholds follow (`freematch.Status`), `()` where they are fixed.
    """

    weights: Weights
    average: PyTree
    optimizer: PyTree
    status: PyTree


class Outputs(NamedTuple):
    """The network's outputs on a batch of unlabeled examples.

    Attributes:
        probs: float32 [mu B, C], softmax outputs q of the weak views, without gradient.
        logits: float32 [mu B, C], of the strong views.
        mask: bool [mu B], which rows are real examples.
        true_labels: int32 [mu B], for diagnostics alone.
    """

    probs: jax.Array
    logits: jax.Array
    mask: jax.Array
    true_labels: jax.Array


class Unlabeled(NamedTuple):
    """What unlabeled examples add to a step: their loss, the new status, and metrics."""

    loss: jax.Array
    status: PyTree
    metrics: Metrics


UnlabeledLoss = Callable[[Outputs, PyTree], Unlabeled]


def fixmatch_central(
    *,
    task: Task,
    client: Training,
    server: Server,
    options: FixMatchCentralOptions = FixMatchCentralOptions(),
) -> Method:
    """FixMatch on pooled data (Sohn et al. 2020): L = L_s + L_u, a pseudo-label being accepted where max q >= .95.

    Args:
        task: network and views.
        client: not used.
        server: `fine_tune` is the training: B, its steps per round, its optimizer; its learning rate is evaluated at every
            step. Statistics, where they are static, are those of the evaluated parameters. The rest is not used.
        options: mu, the threshold, the moving average.

    Returns:
        The method, without client state.
    """
    del client

    def unlabeled_loss(outputs: Outputs, status: PyTree) -> Unlabeled:
        label, confidence = pseudo_labels.harden(outputs.probs)
        accepted = outputs.mask & thresholds.passes(confidence, options.confidence, strict=False)
        return Unlabeled(consistency_loss(outputs, label, accepted), status, diagnostics(outputs, label, accepted))

    return _central(task, server, options.mu, options.ema_decay, lambda num_classes: (), unlabeled_loss)


def freematch_central(
    *,
    task: Task,
    client: Training,
    server: Server,
    options: FreeMatchCentralOptions = FreeMatchCentralOptions(),
) -> Method:
    """FreeMatch on pooled data (Wang et al. 2023): L = L_s + L_u + w_f L_f.

    A pseudo-label is accepted where max q >= tau_t(argmax q), tau_t being updated with the batch's q first, and >= as in the
    authors' code. L_f is the fairness term.

    Args:
        task: network and views.
        client: not used.
        server: as in `fixmatch_central`.
        options: mu, w_f, the thresholds, the moving average.

    Returns:
        The method, without client state.
    """
    del client

    def unlabeled_loss(outputs: Outputs, status: freematch.Status) -> Unlabeled:
        status = freematch.update(
            status,
            outputs.probs,
            outputs.mask,
            decay=options.threshold_decay,
            largest=options.threshold_clip,
            quantile=options.threshold_quantile,
        )
        label, confidence = pseudo_labels.harden(outputs.probs)
        required = jnp.clip(freematch.class_thresholds(status)[label], options.least_threshold, options.most_threshold)
        accepted = outputs.mask & thresholds.passes(confidence, required, strict=False)
        loss = consistency_loss(outputs, label, accepted)
        if options.fairness_weight:
            loss += options.fairness_weight * freematch.fairness_loss(outputs.logits, accepted, status)
        return Unlabeled(loss, status, {**diagnostics(outputs, label, accepted), "threshold": mean(status.tau)})

    return _central(task, server, options.mu, options.ema_decay, freematch.start, unlabeled_loss)


def diagnostics(outputs: Outputs, label: jax.Array, accepted: jax.Array) -> Metrics:
    """Of the pseudo-labels int32 [mu B] and which are accepted, bool [mu B]; an example counts as often as it is drawn."""
    found = pseudo_labels.diagnostics(label, outputs.true_labels, accepted, outputs.mask)
    return {**found, "mask_rate": mean(accepted, outputs.mask)}


def consistency_loss(outputs: Outputs, label: jax.Array, accepted: jax.Array) -> jax.Array:
    """L_u: the cross-entropy of the accepted strong views, over the number of all (Sohn et al. 2020, Eq. 4)."""
    ce = losses.cross_entropy(outputs.logits, label)
    return losses.masked_mean(ce, accepted, jnp.sum(outputs.mask))


def _central(
    task: Task,
    server: Server,
    mu: int,
    ema_decay: float,
    start: Callable[[int], PyTree],
    unlabeled_loss: UnlabeledLoss,
) -> Method:
    """A method that trains on pooled data: `start` gives the first status for C classes."""
    training = server.fine_tune

    def init(key: jax.Array, spec: DataSpec) -> CentralState:
        weights = task.init(key, spec.image_shape)
        return CentralState(weights, weights.params, training.init(weights.params), start(spec.num_classes))

    def round_(state: CentralState, data: ServerData, key: jax.Array) -> tuple[CentralState, Metrics]:
        def step(state: CentralState, inputs: StepInputs, _: jax.Array) -> tuple[CentralState, Metrics]:
            gradients, status = gradient(task, unlabeled_loss, data, state, inputs)
            fit = Fit(state.weights, state.optimizer)
            weights, optimizer = apply_gradients(task, training, fit, gradients, inputs.learning_rate)
            return CentralState(
                weights, ema.update(state.average, weights.params, ema_decay), optimizer, status
            ), gradients.metrics

        begun = state._replace(optimizer=training.start(state.weights, state.optimizer).optimizer)
        end, metrics, _ = train(begun, step, step_inputs(training, mu, data, key), key)
        stats = with_statistics(task, server.static_norm, _evaluated(end), data).stats
        end = end._replace(weights=end.weights._replace(stats=stats), optimizer=training.keep(end.optimizer))
        return end, {name if "/" in name else f"server/{name}": value for name, value in metrics.items()}

    return method_without_clients(
        init=init,
        train=round_,
        predict=lambda state, images, mask: task.predict(_evaluated(state), images, mask),
        requires=requirements(task, server)._replace(pool=True),
    )


def _evaluated(state: CentralState) -> Weights:
    return Weights(state.average, state.weights.stats)


class StepInputs(NamedTuple):
    """What a step takes from outside; with leading axis S, those of a round's steps.

    Attributes:
        labeled: B positions among the labeled examples.
        unlabeled: mu B positions in the pool.
        learning_rate: float32 scalar.
        key: PRNG key of views and dropout.
    """

    labeled: Batch
    unlabeled: Batch
    learning_rate: jax.Array
    key: jax.Array

    @property
    def steps(self) -> int:
        """S."""
        return self.learning_rate.shape[0]

    @property
    def real(self) -> jax.Array:
        """How many examples a step has."""
        return self.labeled.real + self.unlabeled.real

    def take(self, step: jax.Array) -> StepInputs:
        """The inputs of one step."""
        return jax.tree.map(lambda x: x[step], self)


def step_inputs(training: Training, mu: int, data: ServerData, key: jax.Array) -> StepInputs:
    """The inputs of a round's S steps: full batches, and the schedule's value at round + s / S for step s.

    S is `training.steps`, or what `training.epochs` over the labeled examples take.
    """
    labeled_key, unlabeled_key, step_key = jax.random.split(key, 3)
    size = training.batch_size
    number = training.steps or training.epochs * -(-data.labeled.index.shape[0] // size)
    at = jnp.arange(number)
    return StepInputs(
        batching.stream(labeled_key, data.labeled.mask, size, number),
        batching.stream(unlabeled_key, data.unlabeled.mask, mu * size, number),
        jax.vmap(training.learning_rate)(data.round + at / number),
        jax.vmap(lambda s: jax.random.fold_in(step_key, s))(at),
    )


def gradient(
    task: Task, unlabeled_loss: UnlabeledLoss, data: ServerData, state: CentralState, inputs: StepInputs
) -> tuple[Gradients, PyTree]:
    """The gradient of a step's loss L_s + (the unlabeled examples' loss), and the new status.

    One forward pass in training mode sees labeled, weak and strong views together: so does batch norm.
    """
    labels = data.labeled.labels
    assert labels is not None
    labeled, unlabeled = inputs.labeled, inputs.unlabeled
    labeled_key, weak_key, strong_key = jax.random.split(inputs.key, 3)
    images = data.unlabeled.take(unlabeled.positions)
    views = (
        task.views.labeled(labeled_key, data.labeled.take(labeled.positions)),
        task.views.weak(weak_key, images),
        task.views.strong(strong_key, images),
    )
    masks = (labeled.mask, unlabeled.mask, unlabeled.mask)

    def loss(params: PyTree) -> tuple[jax.Array, tuple[PyTree, Unlabeled]]:
        weights = state.weights._replace(params=params)
        outputs, batch_stats = task.train_logits_together(weights, views, masks, dropout_key(inputs.key))
        of_labeled, of_weak, of_strong = outputs
        supervised = losses.masked_mean(losses.cross_entropy(of_labeled, labels[labeled.positions]), labeled.mask)
        probs = jax.nn.softmax(jax.lax.stop_gradient(of_weak))
        result = unlabeled_loss(Outputs(probs, of_strong, unlabeled.mask, data.true_labels[unlabeled.positions]), state.status)
        return supervised + result.loss, (batch_stats, result)

    (total, (batch_stats, result)), grad = jax.value_and_grad(loss, has_aux=True)(state.weights.params)
    return Gradients(grad, batch_stats, {"loss": mean(total), **result.metrics}), result.status
