"""SemiFL (Diao et al. 2022): few labels at the server, none at the clients, and alternating training of both.

Each round every client labels its images once with the model that it received. The images with confident labels are its fix
set. The client trains on strong views of the fix set, and on mixtures of the fix set with any of its images. The server
averages the clients that have a confident image, with momentum, and fine-tunes on its labels.

Where the paper is silent the choices are those of its released code: mixtures are of two weak views, their partners are drawn
with replacement, and a client without a confident image is left out of the average.
"""

from functools import partial
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
import pydantic
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local import Broadcast, Gradients, Server, Setup, Task, Training, Weights, semi_supervised, substream
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import ClientData, ClientOutput, Method
from fedjax_ssl.metrics import ClientMetrics, Mean, mean
from fedjax_ssl.options import LABELS_BY, Fraction, Options, PseudoLabels, Rate, ReadWhere
from fedjax_ssl.ssl import mixup, pseudo_labels


class SemiFLOptions(Options):
    """SemiFL's own settings."""

    confidence: Fraction = Field(default=0.95, description="Smallest confidence of a pseudo-label that is trained on (tau).")
    pseudo_labels: PseudoLabels = LABELS_BY
    mix: Literal["mixup", "none"] = Field(
        default="mixup",
        description="Whether clients also train on mixtures of two images (`mixup`), or on confident images alone (`none`).",
    )
    mixup_alpha: Annotated[Rate, ReadWhere(mix=("mixup",))] = Field(
        default=0.75, description="Parameter a of the distribution Beta(a, a) of a batch's mixing ratio."
    )

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.pseudo_labels == "local" and self.mix != "none":
            raise ValueError(f"method.mix: got {self.mix!r} with method.pseudo_labels=local, accepted: none")
        return self


def semifl(*, task: Task, client: Training, server: Server, options: SemiFLOptions = SemiFLOptions()) -> Method:
    """SemiFL: pseudo-labels by the global model, mixup at the clients, and fine-tuning at the server.

    With `pseudo_labels=local` and `server.training.when=parallel` it is the paper's FedAvg + FixMatch.
    """

    update = partial(client_update, Setup(task, client, server, options))
    return local.averaging_method(task, client, server, update, views=("weak", "strong"))


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it labels its images, unless each step does, and trains on the confident ones."""
    task, client, _, options = setup
    label_key, order_key, train_key = jax.random.split(key, 3)
    drawn = data.unlabeled.mask
    metrics: ClientMetrics = {}
    if options.pseudo_labels == "local":
        gradient = batch_gradient(task, options, data)
    else:
        probs = local.class_probabilities(task, shared.weights, data.unlabeled, label_key)
        label, confidence = pseudo_labels.harden(probs)
        accepted = drawn & (confidence >= options.confidence)
        metrics = {
            **pseudo_labels.diagnostics(label, data.true_labels, accepted, drawn),
            "client/mask_rate": mean(accepted, drawn),
            **pseudo_labels.examples(label, accepted, confidence),
        }
        gradient, drawn = fix_gradient(task, options, data.unlabeled, label), accepted
    schedule, weight = client.schedule(order_key, drawn), jnp.where(jnp.any(drawn), 1.0, 0.0)
    output = local.train_client(task, client, gradient, schedule, shared, optimizer, weight=weight, key=train_key)
    return output._replace(metrics={**metrics, **output.metrics})


def fix_gradient(task: Task, options: SemiFLOptions, unlabeled: Examples, label: jax.Array) -> GradientFn:
    """The gradient of a local step on a batch of the fix set.

        L = CE(s(x), y) + lambda CE(x_mix, y) + (1 - lambda) CE(x_mix, y')
        x_mix = lambda w(x) + (1 - lambda) w(x')

    y is the pseudo-label of x (confident or not), s and w are a strong and a weak view, lambda ~ Beta(a, a), each mean is over
    the batch, and each x' is drawn uniformly with replacement from all of the client's examples. As in the released code, views
    and mixtures have separate forward passes, and running statistics are those of strong views.
    """

    def mixed(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        ratio_key, partner_key, own_view_key, partner_view_key = jax.random.split(key, 4)
        ratio = mixup.ratio(ratio_key, options.mixup_alpha)
        first = batch.positions
        second = jax.random.randint(partner_key, first.shape, 0, jnp.maximum(unlabeled.count, 1))
        first_views = task.views.weak(own_view_key, unlabeled.take(first))
        views = mixup.mix(first_views, task.views.weak(partner_view_key, unlabeled.take(second)), ratio)

        def loss(logits: jax.Array) -> tuple[jax.Array, Mean]:
            values = mixup.cross_entropy(logits, first=label[first], second=label[second], ratio=ratio)
            return local.mean_loss(values, batch.mask)

        return local.loss_gradients(task, weights, views, loss, batch.mask, key)

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        views = task.views.strong(key, unlabeled.take(batch.positions))
        fixed = local.cross_entropy_gradients(task, weights, views, label[batch.positions], batch.mask, batch.mask, key)
        if options.mix == "none":
            return fixed
        of_mixtures = mixed(weights, batch, substream(key, "mixup"))
        grad = jax.tree.map(jnp.add, fixed.grad, of_mixtures.grad)
        return Gradients(grad, fixed.batch_stats, {**fixed.metrics, "mix_loss": of_mixtures.metrics["loss"]})

    return gradient


def batch_gradient(task: Task, options: SemiFLOptions, data: ClientData) -> GradientFn:
    """The gradient of a local step on those examples of a batch whose weak views the local model labels with confidence.

    As in the released code, only these examples are in the training's forward pass, and a batch without them is no step.
    """

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        images = data.unlabeled.take(batch.positions)
        logits = task.eval_logits(weights, task.views.weak(substream(key, "label"), images), batch.mask)
        label, confidence = pseudo_labels.harden(jax.nn.softmax(logits))
        accepted = batch.mask & (confidence >= options.confidence)
        views = task.views.strong(key, images)
        gradients = local.cross_entropy_gradients(task, weights, views, label, accepted, accepted, key)
        metrics = semi_supervised.step_metrics(label, accepted, data, batch)
        return gradients._replace(metrics={**gradients.metrics, **metrics}, taken=jnp.any(accepted))

    return gradient
