"""Local training on unlabeled examples, and on labeled ones where the clients have them, as in FixMatch and UDA.

    L = L_s + w L_u

A local step takes one labeled and one unlabeled batch, in a single forward pass over all their views where there is batch norm,
which sees them together. Where the labels are at the server, there is no labeled batch and L_s = 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
from jaxtyping import Bool

from fedjax_ssl.arrays import Array, Key, Labels, Mask, PyTree, Scalar
from fedjax_ssl.data.batching import Batch, Pair
from fedjax_ssl.local.client import data_weight, repeated, train_client
from fedjax_ssl.local.objectives import labeled_loss
from fedjax_ssl.local.server import Broadcast
from fedjax_ssl.local.task import Task, Weights, dropout_key, substream
from fedjax_ssl.local.training import AnySchedule, GradientFn, Gradients, Training, TrainState
from fedjax_ssl.method import ClientData, ClientOutput
from fedjax_ssl.metrics import Mean, Metrics, mean
from fedjax_ssl.options import LabeledRepeats
from fedjax_ssl.ssl import pseudo_labels

Keys = jaxtyping.Key[jax.Array, "2"]


class UnlabeledLoss(NamedTuple):
    """An unlabeled batch's loss L_u, float32 scalar; its mean per example, as a metric; other metrics; and the new status."""

    value: Scalar
    mean: Mean
    metrics: Metrics
    status: PyTree = ()  # the new one, where the objective has one


class Objective(NamedTuple):
    """What a client's local steps minimize.

    `unlabeled` computes L_u. Its arguments are the logits [B_u, C] of a batch's weak views, without gradient ([0, C] unless
    `weak`); those of its strong views; the batch; if there is a `reference`, its logits on the weak views; and, if there is
    one, the `status`.
    """

    unlabeled: Callable[..., UnlabeledLoss]
    drawn: Bool[Array, " n"]  # the unlabeled examples that batches are drawn from
    weak: bool  # whether L_u reads the weak views' outputs
    weight: float  # w, the weight of L_u
    batch_size: int  # B_u, the unlabeled batch size; 0: as the labeled one
    repeats: LabeledRepeats = LabeledRepeats()  # how often an epoch goes through the client's labels
    reference: Weights | None = None  # a network that is not trained; its logits are those of evaluation
    status: PyTree = ()  # what each step reads and renews, such as moving averages, as it is before the first step


def step_metrics(label: Labels, accepted: Mask, data: ClientData, batch: Batch) -> Metrics:
    """Diagnostics of one step's pseudo-labels int32 [B_u], accepted bool [B_u]; an example counts as often as it is drawn."""
    true_labels = data.true_labels[batch.positions]
    return {**pseudo_labels.diagnostics(label, true_labels, accepted, batch.mask), "mask_rate": mean(accepted, batch.mask)}


def client_output(
    task: Task, client: Training, shared: Broadcast, optimizer: PyTree, data: ClientData, objective: Objective, keys: Keys
) -> ClientOutput:
    """A client's round of local training on `objective`, weighted by its data; one key is for its batches, one for its steps.

    Where the objective has a status, the output's `client_state` is the pair of the optimizer state and the last status.
    With labels at the clients, `client/loss` is the mean L_s and `client/unlabeled_loss` is L_u; else `client/loss` is L_u.
    """
    size = objective.batch_size or client.batch_size
    drawn = objective.drawn & (jnp.any(data.labeled.mask) | (objective.weight > 0))  # else there is nothing to learn from
    order_key, train_key = keys
    schedule: AnySchedule
    if "clients" in task.labels_at:
        masks = data.labeled.mask, drawn
        schedule = repeated(objective.repeats, data, client, lambda client: client.paired_schedule(order_key, *masks, size))
    else:
        client = client._replace(batch_size=size)
        schedule = client.schedule(order_key, drawn)
    step_gradient, weight = gradient(task, data, objective), data_weight(task, data)
    companions = (objective.status,) if jax.tree.leaves(objective.status) else ()
    start = TrainState(shared.weights, optimizer, companions)
    return train_client(task, client, step_gradient, schedule, shared, start, weight=weight, key=train_key)


def gradient(task: Task, data: ClientData, objective: Objective) -> GradientFn:
    """The gradient of L in a step on a Pair, or of w L_u in a step on an unlabeled Batch."""

    def step_gradient(weights: Weights, batch: Pair | Batch, key: Key, *status: PyTree) -> Gradients:
        unlabeled, labeled = (batch.unlabeled, batch.labeled) if isinstance(batch, Pair) else (batch, None)
        images = data.unlabeled.take(unlabeled.positions)
        strong = task.views.strong(key, images)
        weak = task.views.weak(substream(key, "weak"), images) if objective.weak else strong[:0]
        reference = objective.reference
        given = () if reference is None else (task.eval_logits(reference, weak, unlabeled.mask[: len(weak)]),)
        views, masks = [weak, strong], [unlabeled.mask[: len(weak)], unlabeled.mask]
        if labeled is not None:
            views.append(task.views.labeled(substream(key, "labeled"), data.labeled.take(labeled.positions)))
            masks.append(labeled.mask)

        def loss(params: PyTree) -> tuple[Scalar, tuple[PyTree, Metrics, PyTree]]:
            together = task.train_logits_together(weights._replace(params=params), views, masks, dropout_key(key), fixed=0)
            (weak, strong, *rest), batch_stats = together
            of_unlabeled = objective.unlabeled(weak, strong, unlabeled, *given, *status)
            value, new = objective.weight * of_unlabeled.value, of_unlabeled.status
            if labeled is None:
                return value, (batch_stats, {"loss": of_unlabeled.mean, **of_unlabeled.metrics}, new)
            labels = data.labeled.labels[labeled.positions]
            supervised, metric = labeled_loss(rest[0], labels, labeled.mask)
            metrics = {"loss": metric, "unlabeled_loss": of_unlabeled.mean, **of_unlabeled.metrics}
            return supervised + value, (batch_stats, metrics, new)

        grad, (batch_stats, metrics, new) = jax.grad(loss, has_aux=True)(weights.params)
        return Gradients(grad, batch_stats, metrics, follow=(lambda _: (new,)) if status else None)

    return step_gradient
