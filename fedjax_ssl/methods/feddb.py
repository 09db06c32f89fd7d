"""FedDB (Zhu et al., IJCAI 2024): pseudo-labels and averages that are freed of the model's bias, for labels at the clients.

Equations are those of the paper's abstract and of the authors' released code. Its network has no batch-norm statistics of its
own for evaluation; here `model.norm` says which ones are used.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Server, ServerState, Setup, Task, Training, Weights, semi_supervised
from fedjax_ssl.local.semi_supervised import Objective, UnlabeledLoss
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, Method, ServerData, parameters_of, weighted_sum
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.options import UNLABELED_WEIGHT, Decay, Fraction, LabeledRepeats, Size, Weight
from fedjax_ssl.ssl import losses, prior, pseudo_labels


class FedDBOptions(LabeledRepeats):
    """FedDB's own settings."""

    confidence: Fraction = Field(
        default=0.95, description="Confidence that the debiased prediction of an example needs for its label to be accepted."
    )
    unlabeled_weight: Weight = UNLABELED_WEIGHT
    unlabeled_batch_size: Size = Field(
        default=0,
        description="Number of accepted examples in a local step. 0 takes as many as `client.batch_size`; in FedDB's code "
        "the two batches of a step are all accepted and all labeled examples of the client.",
    )
    prior_decay: Decay = Field(
        default=0.5, description="Decay per step of the client's prior, the moving average of its predictions."
    )


class Sent(NamedTuple):
    """What a client uploads: its update, and its prior float32 [C]."""

    update: Weights
    prior: jax.Array


def feddb(*, task: Task, client: Training, server: Server, options: FedDBOptions = FedDBOptions()) -> Method:
    """FedDB: pseudo-labels by the received model's predictions divided by their mean, and learned weights of clients.

    Clients minimize L_s + w mean over accepted of CE(label, p_strong). The server weighs their updates such that their priors'
    mean is near uniform (`fedjax_ssl.ssl.prior`).
    """
    method = local.averaging_method(
        task, client, server, partial(client_update, Setup(task, client, server, options)), labels_at=("clients",)
    )

    def server_update(state: ServerState, sent: Aggregate, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        weights = prior.weights_to_uniform(sent.update.prior, sent.weight > 0)
        update = jax.tree.map(lambda x: weighted_sum(x, weights).astype(x.dtype), sent.update.update)
        return method.server_update(state, Aggregate(update, jnp.sum(sent.weight)), data, key)

    return method._replace(server_update=server_update, aggregator="stack", parameters=lambda sent: parameters_of(sent.update))


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, optimizer: PyTree, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: it labels its data once, without the received model's bias, and trains on both kinds."""
    task, client, _, options = setup
    label_key, *keys = jax.random.split(key, 3)
    mask = data.unlabeled.mask
    probs = local.class_probabilities(task, shared.weights, data.unlabeled, label_key)
    begun = prior.mean_prediction(probs, mask)
    label, confidence = pseudo_labels.harden(prior.debiased(probs, begun))
    accepted = mask & (confidence >= options.confidence)

    def unlabeled(weak: jax.Array, strong: jax.Array, batch: Batch, own: jax.Array) -> UnlabeledLoss:
        ce = losses.cross_entropy(strong, label[batch.positions])
        new = prior.mean_prediction(jax.nn.softmax(weak), batch.mask)
        new = jnp.where(jnp.any(batch.mask), options.prior_decay * own + (1 - options.prior_decay) * new, own)
        return UnlabeledLoss(losses.masked_mean(ce, batch.mask), mean(ce, batch.mask), {}, new)

    objective = Objective(
        *(unlabeled, accepted, True, options.unlabeled_weight, options.unlabeled_batch_size), repeats=options, status=begun
    )
    output = semi_supervised.client_output(task, client, shared, optimizer, data, objective, jnp.stack(keys))
    stored, own = output.client_state
    own = jnp.where(output.weight > 0, own, 0.0)
    metrics = {
        **output.metrics,
        **pseudo_labels.diagnostics(label, data.true_labels, accepted, mask),
        **pseudo_labels.examples(label, accepted, confidence),
        "client/mask_rate": mean(accepted, mask),
        "comm/bytes_up": Sum(jnp.int32(num_bytes(output.update) + num_bytes(own))),
    }
    return output._replace(update=Sent(output.update, own), client_state=stored, metrics=metrics)
