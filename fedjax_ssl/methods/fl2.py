"""(FL)^2 (Lee et al. 2024): few labels at the server, none at the clients.

Each round every client pseudo-labels its images with the global model and accepts them by its own adaptive thresholds (CAT),
trains with sharpness-aware consistency regularization (SACR), and is averaged by its learning status (LSAA). The server then
fine-tunes on its labels. Defaults are the paper's; options say where its released code has another value.
"""

from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Gradients, Server, Setup, Task, Training, Weights, dropout_key
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import ClientData, ClientOutput, Method
from fedjax_ssl.metrics import Mean, PerClient, Sum, mean, num_bytes
from fedjax_ssl.options import Fraction, Options, ReadWhere, Weight
from fedjax_ssl.ssl import pseudo_labels, sharpness, thresholds

MIN_WEIGHT = 1e-20  # the LSAA weight of a client whose tau_k is 1: negligible beside others, and equal if all tau_k are 1


class FL2Options(Options):
    """(FL)^2's own settings."""

    threshold: Literal["cat", "fixed"] = Field(
        default="cat",
        description="Which pseudo-labels are accepted: those above their client's adaptive thresholds (`cat`, Eqs. 7-9), or "
        "those above a `fixed` threshold.",
    )
    confidence: Annotated[
        Fraction,
        ReadWhere(threshold=("fixed",)),
        ReadWhere(consistency=("sacr", "sam"), consistency_on=("confident", "confident_accepted")),
    ] = Field(
        default=0.95,
        description="Fixed confidence threshold: examples above it form F_k (Eq. 11), and are accepted if threshold=fixed.",
    )
    pseudo_labels: Literal["global", "true"] = Field(
        default="global",
        description="Labels of the accepted examples: predictions of the `global` model, or the `true` labels (an oracle).",
    )
    strict: bool = Field(
        default=True,
        description="Whether a confidence has to be above its threshold (Eqs. 10 and 11), or may equal it (released code).",
    )
    batches: Literal["all", "accepted"] = Field(
        default="all",
        description="Which of a client's examples its batches are drawn from: `all`, or the `accepted` ones (released code).",
    )
    consistency: Literal["sacr", "sam", "none"] = Field(
        default="sacr",
        description="Second loss of a local step: `sacr` (Eqs. 11-14), the standard `sam` objective (Figure 4), or `none`.",
    )
    consistency_on: Annotated[
        Literal["confident", "confident_accepted", "accepted", "correct"], ReadWhere(consistency=("sacr", "sam"))
    ] = Field(
        default="confident",
        description="Examples that the second loss is over: the `confident` set F_k, its accepted part (released code), "
        "all `accepted` examples (A_k), or the accepted ones whose pseudo-label is `correct`.",
    )
    perturbation: Annotated[Literal["asam", "sam"], ReadWhere(consistency=("sacr", "sam"))] = Field(
        default="asam",
        description="Perturbation of the weights: scaled by each weight's size (`asam`, Section 5.1), or not (`sam`, Eq. 12).",
    )
    rho: Annotated[Weight, ReadWhere(consistency=("sacr", "sam"))] = Field(
        default=0.1, description="Radius of the perturbation of the weights."
    )
    consistency_weight: Annotated[Weight, ReadWhere(consistency=("sacr", "sam"))] = Field(
        default=1.0, description="Weight w_cs of the second loss (Eq. 14)."
    )
    aggregation: Literal["lsaa", "uniform"] = Field(
        default="lsaa",
        description="Aggregation weights of the clients: by their learning status (`lsaa`, Eq. 15), or all equal.",
    )


class Labeling(NamedTuple):
    """A client's pseudo-labels int32 [n] of a round, the examples bool [n] of L_a (A_k) and of L_p and L_cs, and tau_k.

    Also the confidences float32 [n], and the thresholds of the classes float32 [C].
    """

    label: jax.Array
    accepted: jax.Array
    consistent: jax.Array
    tau: jax.Array
    confidence: jax.Array
    per_class: jax.Array


def fl2(*, task: Task, client: Training, server: Server, options: FL2Options = FL2Options()) -> Method:
    """(FL)^2, Algorithm 1: adaptive pseudo-labels, sharpness-aware consistency, and weights by learning status."""

    update = partial(client_update, Setup(task, client, server, options))
    return local.averaging_method(task, client, server, update, views=("weak", "strong"))


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it labels its images, trains on those that it accepts, and is weighted by its learning status."""
    task, client, _, options = setup
    label_key, order_key, train_key = jax.random.split(key, 3)
    mask = data.unlabeled.mask
    labeling = pseudo_label(task, options, shared.weights, data, label_key)
    gradient = client_gradient(task, options, data, labeling)
    schedule = client.schedule(order_key, local.trainable(labeling.accepted, mask, options.batches))
    by_status = options.aggregation == "lsaa"  # weights 1 - tau_k, before they are normalized (Eq. 15)
    weight = jnp.maximum(1.0 - labeling.tau, MIN_WEIGHT) if by_status else 1.0
    weight = jnp.where(data.unlabeled.count > 0, weight, 0.0)
    output = local.train_client(task, client, gradient, schedule, shared, optimizer, weight=weight, key=train_key)
    sent = (output.update, labeling.tau) if by_status else output.update
    threshold = labeling.tau if options.threshold == "cat" else options.confidence
    metrics = {
        **output.metrics,
        **pseudo_labels.diagnostics(labeling.label, data.true_labels, labeling.accepted, mask),
        "client/mask_rate": mean(labeling.accepted, mask),
        "client/threshold": mean(threshold, data.unlabeled.count > 0),
        "comm/bytes_up": Sum(jnp.int32(num_bytes(sent))),
        **pseudo_labels.examples(labeling.label, labeling.accepted, labeling.confidence),
        "client/class_thresholds": PerClient(labeling.per_class),
    }
    return output._replace(metrics=metrics)


def pseudo_label(task: Task, options: FL2Options, weights: Weights, data: ClientData, key: jax.Array) -> Labeling:
    """Pseudo-labels of one weak view of each of a client's images, and which of them are accepted (Eqs. 7-11)."""
    mask = data.unlabeled.mask
    probs = local.class_probabilities(task, weights, data.unlabeled, key)
    label, confidence = pseudo_labels.harden(probs)
    adaptive = thresholds.client_adaptive(probs, mask)
    confident = mask & thresholds.above(confidence, options.confidence, strict=options.strict)
    accepted, per_class = confident, jnp.full_like(adaptive.per_class, options.confidence)
    if options.threshold == "cat":
        per_class = adaptive.per_class
        accepted = mask & thresholds.above(confidence, adaptive.per_class[label], strict=options.strict)
    consistent = {
        "confident": confident,
        "confident_accepted": confident & accepted,
        "accepted": accepted,
        "correct": accepted & (label == data.true_labels),
    }["accepted" if options.consistency == "none" else options.consistency_on]  # then nothing reads it
    if options.pseudo_labels == "true":  # the same examples are accepted, except those whose label is not known
        label, known = data.true_labels, data.true_labels >= 0
        accepted, consistent = accepted & known, consistent & known
    return Labeling(label, accepted, consistent, adaptive.tau, confidence, per_class)


def client_gradient(task: Task, options: FL2Options, data: ClientData, labeling: Labeling) -> GradientFn:
    """The gradient of a local step on strong views: L_a alone (Eq. 10), or with SACR (Eq. 14)."""

    def perturb(params: PyTree, grad: PyTree) -> PyTree:
        asam, rho = options.perturbation == "asam", options.rho
        return sharpness.asam_perturbation(params, grad, rho) if asam else sharpness.sam_perturbation(grad, rho)

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        at = batch.positions
        views = task.views.strong(key, data.unlabeled.take(at))
        accepted, consistent = labeling.accepted[at] & batch.mask, labeling.consistent[at] & batch.mask
        if options.consistency == "none":
            return local.cross_entropy_gradients(task, weights, views, labeling.label[at], accepted, batch.mask, key)

        def forward(params: PyTree) -> tuple[jax.Array, PyTree]:  # with one key, passes at W and at W* drop the same units
            return task.train_logits(weights._replace(params=params), views, batch.mask, dropout_key(key))

        targets, factors = sharpness.Targets(labeling.label[at], accepted, consistent), (1.0, options.consistency_weight)
        grad, values, batch_stats = sharpness.consistency_gradient(
            forward, weights.params, targets, perturb, objective=options.consistency, weights=factors
        )
        weight = jnp.sum(accepted, dtype=jnp.float32)
        metrics = {"loss": values.accepted, "consistency_loss": values.second}
        return Gradients(grad, batch_stats, {name: Mean(value * weight, weight) for name, value in metrics.items()})

    return gradient
