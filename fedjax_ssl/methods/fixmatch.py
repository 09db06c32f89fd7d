"""FixMatch with FedAvg: the baseline of (FL)^2, without its three parts.

Clients pseudo-label with the global model once per round, keep what passes a fixed threshold, and train on strong views; the
server averages them uniformly and fine-tunes on its labels. It equals (FL)^2 with a fixed threshold, no consistency term and
uniform weights, which a test checks bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.data.batching import Batch
from fedjax_ssl.method import ClientOutput, Method, Shard
from fedjax_ssl.methods import local
from fedjax_ssl.methods.choices import check_choices, choice
from fedjax_ssl.methods.local import Step, Training, trainable
from fedjax_ssl.methods.server import Broadcast, Server, method_with_labels_at_server
from fedjax_ssl.methods.task import Task, Weights
from fedjax_ssl.metrics import mean
from fedjax_ssl.ssl import pseudo_labels, thresholds

PyTree = Any


@dataclasses.dataclass(frozen=True)
class FixMatchOptions:
    """FixMatch's own settings.

    Attributes:
        confidence: the fixed threshold.
        strict: compare with > instead of >=.
        batches: local batches from `all` of a client's data, the rest masked, or from the `accepted` examples alone.
    """

    confidence: float = 0.95
    strict: bool = True
    batches: str = choice("all", "accepted")

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"method.confidence: got {self.confidence}, accepted: a number in [0, 1]")


def fixmatch(
    *,
    task: Task,
    client: Training,
    server: Server,
    options: FixMatchOptions = FixMatchOptions(),
) -> Method:
    """FedAvg + FixMatch with server fine-tuning, labels at the server ((FL)^2, Section 3.2 and Table 2).

    The loss of a batch is the mean cross-entropy of its accepted strong views (Sohn et al. 2020, Eq. 4).

    Args:
        task: network and views.
        client: local training.
        server: aggregation, fine-tuning and statistics.
        options: the threshold.

    Returns:
        The method. Its client state is the local optimizer's, where `client` is persistent.
    """

    def client_update(shared: Broadcast, _: PyTree, kept: PyTree, shard: Shard, key: jax.Array) -> ClientOutput:
        label_key, order_key, train_key = jax.random.split(key, 3)
        mask = shard.unlabeled.mask
        label, confidence = pseudo_labels.harden(local.class_probabilities(task, shared.weights, shard.unlabeled, label_key))
        accepted = mask & thresholds.passes(confidence, options.confidence, strict=options.strict)

        def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Step:
            views = task.views.strong(key, shard.unlabeled.take(batch.positions))
            used = accepted[batch.positions] & batch.mask
            return local.cross_entropy_step(task, weights, views, label[batch.positions], used, batch.mask, key)

        schedule = client.schedule(order_key, trainable(accepted, mask, options.batches))
        start = (shared.weights, kept)
        trained = local.train(task, client, gradient, start, schedule, learning_rate=shared.learning_rate, key=train_key)
        update = task.update(shared.weights, trained.weights)
        metrics = {
            **pseudo_labels.diagnostics(label, shard.truth, accepted, mask),
            "client/mask_rate": mean(accepted, mask),
            **local.client_metrics(trained, down=shared.weights, up=update),
        }
        weight = jnp.where(shard.unlabeled.count > 0, 1.0, 0.0)
        return ClientOutput(update, weight, trained.kept, metrics)

    return method_with_labels_at_server(task, client, server, client_update)
