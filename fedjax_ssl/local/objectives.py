"""Gradients of the losses that methods share, above all the cross-entropy of labeled examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples, Mixture
from fedjax_ssl.local.task import Task, Weights, dropout_key
from fedjax_ssl.local.training import GradientFn, Gradients
from fedjax_ssl.metrics import Mean, mean
from fedjax_ssl.ssl import losses

PyTree = Any
View = Callable[[jax.Array, jax.Array], jax.Array]
"""(key, images uint8 [B, H, W, ch]) -> the network's inputs, one of `Views`."""
Selection = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits [B, C], labels int32 [B]) -> bool [B], the labeled examples that a step's loss is over."""


def supervised_gradient(
    task: Task, examples: Examples | Mixture, *, view: View | None = None, selection: Selection | None = None
) -> GradientFn:
    """The gradient of the mean cross-entropy of labeled examples ((FL)^2, Eq. 2), or of a `selection` of them.

    `view` is their augmentation; None: that of labeled examples.
    """
    assert examples.labels is not None
    labels, view = examples.labels, view or task.views.labeled

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        views = view(key, examples.take(batch.positions))
        return cross_entropy_gradients(task, weights, views, labels[batch.positions], batch.mask, batch.mask, key, selection)

    return gradient


def cross_entropy_gradients(
    task: Task,
    weights: Weights,
    views: jax.Array,
    labels: jax.Array,
    used: jax.Array,
    mask: jax.Array,
    key: jax.Array,
    selection: Selection | None = None,
) -> Gradients:
    """`loss_gradients` of `labeled_loss`."""
    return loss_gradients(task, weights, views, lambda logits: labeled_loss(logits, labels, used, selection), mask, key)


def loss_gradients(
    task: Task,
    weights: Weights,
    views: jax.Array,
    loss: Callable[[jax.Array], tuple[jax.Array, Mean]],
    mask: jax.Array,
    key: jax.Array,
) -> Gradients:
    """The gradient of a loss of a batch's outputs, with the metric `loss`.

    `views` are float32 [B, H, W, ch], `mask` bool [B] the real ones, which batch norm sees, `key` is the step's. From logits
    [B, C] `loss` gives the loss, and the same as a metric.
    """

    def value(params: PyTree) -> tuple[jax.Array, tuple[Mean, PyTree]]:
        logits, batch_stats = task.train_logits(weights._replace(params=params), views, mask, dropout_key(key))
        total, metric = loss(logits)
        return total, (metric, batch_stats)

    grad, (metric, batch_stats) = jax.grad(value, has_aux=True)(weights.params)
    return Gradients(grad, batch_stats, {"loss": metric})


def labeled_loss(
    logits: jax.Array, labels: jax.Array, used: jax.Array, selection: Selection | None = None
) -> tuple[jax.Array, Mean]:
    """`mean_loss` of the cross-entropy of logits [B, C] over the `used` bool [B] examples in the `selection`."""
    return mean_loss(losses.cross_entropy(logits, labels), used if selection is None else used & selection(logits, labels))


def mean_loss(values: jax.Array, used: jax.Array) -> tuple[jax.Array, Mean]:
    """The mean of losses float32 [B] over the `used` bool [B] examples, 0 if there is none: the loss, and as a metric."""
    return losses.masked_mean(values, used), mean(values, used)
