"""FixMatch (Sohn et al. 2020) with FedAvg or FedProx, for labels at the server or at the clients.

The default is the baseline of (FL)^2: clients pseudo-label with the global model once per round, accept what exceeds a fixed
threshold, and train on strong views; the server averages them uniformly and fine-tunes on its labels.

FixMatch as published is `pseudo_labels=local`, `divisor=batch`, `strict=False`: in each step the current local weights label a
batch's weak views. With labels at the clients a step takes a labeled batch, too.
"""

from functools import partial
from typing import Annotated, Literal, Self

import jax
import pydantic
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Server, Setup, Task, Training, Weights, semi_supervised
from fedjax_ssl.local.semi_supervised import Objective, UnlabeledLoss
from fedjax_ssl.method import EVERYWHERE, ClientData, ClientOutput, Method
from fedjax_ssl.metrics import ClientMetrics, mean
from fedjax_ssl.options import (
    LABELS_BY,
    UNLABELED_BATCH,
    UNLABELED_WEIGHT,
    Divisor,
    Fraction,
    LabeledRepeats,
    PseudoLabels,
    ReadWhere,
    Size,
    Weight,
)
from fedjax_ssl.ssl import losses, pseudo_labels, thresholds


class FixMatchOptions(LabeledRepeats):
    """FixMatch's own settings."""

    confidence: Fraction = Field(
        default=0.95, description="Fixed confidence threshold: a pseudo-label that exceeds it is accepted, and trained on."
    )
    strict: bool = Field(
        default=True,
        description="Whether a confidence has to be above the threshold ((FL)^2). If false, one that equals it is enough "
        "(FixMatch).",
    )
    pseudo_labels: PseudoLabels = LABELS_BY
    divisor: Divisor = Field(
        default="used",
        description="What the sum of a batch's unlabeled loss is divided by: the number of accepted examples (`used`, as in "
        "(FL)^2) or of all examples of the `batch` (Eq. 4).",
    )
    unlabeled_weight: Weight = UNLABELED_WEIGHT
    unlabeled_batch_size: Size = UNLABELED_BATCH
    batches: Annotated[Literal["all", "accepted"], ReadWhere(pseudo_labels=("global",))] = Field(
        default="all",
        description="What a client draws its batches from: `all` of its unlabeled examples, or only those whose pseudo-labels, "
        "by the global model, are `accepted`.",
    )

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.pseudo_labels == "local" and self.batches == "accepted":
            raise ValueError("method.batches: got 'accepted' with method.pseudo_labels=local, accepted: all")
        return self


def fixmatch(*, task: Task, client: Training, server: Server, options: FixMatchOptions = FixMatchOptions()) -> Method:
    """FedAvg + FixMatch, with server fine-tuning where the labels are at the server ((FL)^2, Section 3.2 and Table 2).

        L_u = 1/divisor sum over accepted of CE(argmax q, p_strong),  accepted: max q > confidence

    q is the softmax output on the weak view, without gradient.
    """

    update = partial(client_update, Setup(task, client, server, options))
    return local.averaging_method(task, client, server, update, labels_at=EVERYWHERE)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round of local training on labeled and pseudo-labeled examples."""
    task, client, _, options = setup
    keys = jax.random.split(key, 3)
    metrics: ClientMetrics = {}
    if options.pseudo_labels == "global":
        objective, metrics = _once_per_round(task, options, shared.weights, data, keys[0])
    else:
        objective = _in_each_step(options, data)
    objective = objective._replace(repeats=options)
    output = semi_supervised.client_output(task, client, shared, optimizer, data, objective, keys[1:])
    return output._replace(metrics={**metrics, **output.metrics})


def _once_per_round(
    task: Task, options: FixMatchOptions, weights: Weights, data: ClientData, key: jax.Array
) -> tuple[Objective, ClientMetrics]:
    """The objective on pseudo-labels that the global model makes once per round, and their diagnostics."""
    mask = data.unlabeled.mask
    probs = local.class_probabilities(task, weights, data.unlabeled, key)
    label, confidence = pseudo_labels.harden(probs)
    accepted = mask & thresholds.above(confidence, options.confidence, strict=options.strict)

    def unlabeled(_: jax.Array, strong: jax.Array, batch: Batch) -> UnlabeledLoss:
        at = batch.positions
        return _loss(options, strong, label[at], accepted[at] & batch.mask, batch)

    metrics = {
        **pseudo_labels.diagnostics(label, data.true_labels, accepted, mask),
        "client/mask_rate": mean(accepted, mask),
        **pseudo_labels.examples(label, accepted, confidence),
    }
    drawn = local.trainable(accepted, mask, options.batches)
    return Objective(unlabeled, drawn, False, options.unlabeled_weight, options.unlabeled_batch_size), metrics


def _in_each_step(options: FixMatchOptions, data: ClientData) -> Objective:
    """The objective on pseudo-labels that each step makes of its own batch; the steps report diagnostics."""

    def unlabeled(weak: jax.Array, strong: jax.Array, batch: Batch) -> UnlabeledLoss:
        label, confidence = pseudo_labels.harden(jax.nn.softmax(weak))
        accepted = batch.mask & thresholds.above(confidence, options.confidence, strict=options.strict)
        loss = _loss(options, strong, label, accepted, batch)
        return loss._replace(metrics=semi_supervised.step_metrics(label, accepted, data, batch))

    return Objective(unlabeled, data.unlabeled.mask, True, options.unlabeled_weight, options.unlabeled_batch_size)


def _loss(options: FixMatchOptions, strong: jax.Array, label: jax.Array, used: jax.Array, batch: Batch) -> UnlabeledLoss:
    """The cross-entropy of a batch's accepted strong views, over the divisor."""
    ce = losses.cross_entropy(strong, label)
    divisor = batch.real if options.divisor == "batch" else None
    return UnlabeledLoss(losses.masked_mean(ce, used, divisor), mean(ce, used), {})
