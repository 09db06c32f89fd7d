"""Gradients of the losses that methods share, above all the cross-entropy of labeled examples."""

from collections.abc import Callable

from fedjax_ssl.arrays import Array, Inputs, Key, Labels, Logits, Mask, PerExample, PyTree, Scalar
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples, Mixture
from fedjax_ssl.local.task import Task, Weights, dropout_key
from fedjax_ssl.local.training import GradientFn, Gradients, gradients
from fedjax_ssl.metrics import Mean, Metrics, mean
from fedjax_ssl.ssl import losses

View = Callable[[Key, Array], Inputs]  # one of `Views`, of images uint8 [B, H, W, ch]


def supervised_gradient(task: Task, examples: Examples | Mixture, *, view: View | None = None) -> GradientFn:
    """The gradient of the mean cross-entropy of labeled examples ((FL)^2, Eq. 2), seen in a `view`; None: `views.labeled`."""
    assert examples.labels is not None
    labels, view = examples.labels, view or task.views.labeled

    def gradient(weights: Weights, batch: Batch, key: Key) -> Gradients:
        views = view(key, examples.take(batch.positions))
        return cross_entropy_gradients(task, weights, views, labels[batch.positions], batch.mask, batch.mask, key)

    return gradient


def cross_entropy_gradients(
    task: Task, weights: Weights, views: Inputs, labels: Labels, used: Mask, mask: Mask, key: Key
) -> Gradients:
    """The gradient of the mean cross-entropy over the `used` examples; batch norm sees only those in `mask`."""
    return loss_gradients(task, weights, views, lambda logits: labeled_loss(logits, labels, used), mask, key)


def loss_gradients(
    task: Task, weights: Weights, views: Inputs, loss: Callable[[Logits], tuple[Scalar, Mean]], mask: Mask, key: Key
) -> Gradients:
    """The gradient of a loss of a batch's outputs, with the metric `loss`; batch norm sees only the examples in `mask`."""

    def value(weights: Weights) -> tuple[Scalar, PyTree, Metrics]:
        logits, batch_stats = task.train_logits(weights, views, mask, dropout_key(key))
        total, metric = loss(logits)
        return total, batch_stats, {"loss": metric}

    return gradients(value, weights)


def labeled_loss(logits: Logits, labels: Labels, used: Mask) -> tuple[Scalar, Mean]:
    """`mean_loss` of the cross-entropy over the `used` examples."""
    return mean_loss(losses.cross_entropy(logits, labels), used)


def mean_loss(values: PerExample, used: Mask) -> tuple[Scalar, Mean]:
    """The mean of losses over the `used` examples (0 if there is none), as a number and as a metric."""
    return losses.masked_mean(values, used), mean(values, used)
