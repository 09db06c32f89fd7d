"""FreeMatch (Wang et al. 2023) with FedAvg or FedProx, for labels at the server, at the clients, or at some clients.

The thresholds of classes follow the client's own confidence, by moving averages over the batches that it trains on.
"""

from functools import partial
from typing import Annotated, NamedTuple

import jax
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.local import Broadcast, Server, ServerState, Setup, Task, Training, semi_supervised
from fedjax_ssl.local.semi_supervised import Objective, UnlabeledLoss
from fedjax_ssl.method import EVERYWHERE, ClientData, ClientOutput, DataSpec, Method
from fedjax_ssl.metrics import mean
from fedjax_ssl.options import UNLABELED_BATCH, UNLABELED_WEIGHT, Decay, LabeledRepeats, Size, Weight
from fedjax_ssl.ssl import freematch as ssl
from fedjax_ssl.ssl import losses, pseudo_labels


class FreeMatchOptions(LabeledRepeats):
    """FreeMatch's own settings."""

    unlabeled_weight: Weight = UNLABELED_WEIGHT
    unlabeled_batch_size: Size = UNLABELED_BATCH
    threshold_decay: Decay = Field(
        default=0.999,
        description="Decay lambda per step of the moving averages that the thresholds are made of. They begin at 1 / C, so "
        "that with few steps a smaller decay, such as 0.9, is needed to reach the model's confidence.",
    )
    largest_threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Upper limit of the global threshold tau (0.95 for SVHN)."
    )
    fairness_weight: Weight = Field(default=0.001, description="Weight w_f of the fairness loss over classes. 0 leaves it out.")
    restart: bool = Field(
        default=False,
        description="Whether the moving averages begin anew in each round of a client. If false, a client keeps them from one "
        "of its rounds to the next.",
    )


class FreeMatchClientState(NamedTuple):
    """A client's optimizer state, `()` if not persistent, and the moving averages of its thresholds."""

    optimizer: PyTree
    status: ssl.Status


def freematch(*, task: Task, client: Training, server: Server, options: FreeMatchOptions = FreeMatchOptions()) -> Method:
    """FedAvg + FreeMatch: L = L_s + w (L_u + w_f L_f), with self-adaptive thresholds tau_t(c) (`fedjax_ssl.ssl.freematch`).

        L_u = 1/B_u sum over max q >= tau_t(argmax q) of CE(argmax q, p_strong)

    q is the softmax output on the weak view, without gradient; tau_t already includes the batch's q. L_f is the fairness loss.
    """
    setup = Setup(task, client, server, options)
    method = local.averaging_method(task, client, server, partial(client_update, setup), labels_at=EVERYWHERE)

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FreeMatchClientState]:
        state, optimizer = method.init(key, spec)
        return state, FreeMatchClientState(optimizer, optax.tree.batch_shape(ssl.start(spec.num_classes), (spec.num_clients,)))

    return method._replace(init=init)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, state: FreeMatchClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round of local training on labels and on pseudo-labels that pass the thresholds of their classes."""
    task, client, _, options = setup

    def unlabeled(weak: jax.Array, strong: jax.Array, batch: Batch, status: ssl.Status) -> UnlabeledLoss:
        probs, decay, largest = jax.nn.softmax(weak), options.threshold_decay, options.largest_threshold
        status = ssl.update(status, probs, batch.mask, decay=decay, largest=largest)
        label, confidence = pseudo_labels.harden(probs)
        accepted = batch.mask & (confidence >= ssl.class_thresholds(status)[label])
        ce = losses.cross_entropy(strong, label)
        loss = losses.masked_mean(ce, accepted, batch.real)
        if options.fairness_weight:
            loss += options.fairness_weight * ssl.fairness_loss(strong, accepted, status)
        metrics = semi_supervised.step_metrics(label, accepted, data, batch)
        return UnlabeledLoss(loss, mean(ce, accepted), {**metrics, "threshold": mean(status.tau)}, status)

    status = ssl.start(task.num_classes) if options.restart else state.status
    objective = Objective(
        *(unlabeled, data.unlabeled.mask, True, options.unlabeled_weight, options.unlabeled_batch_size),
        repeats=options,
        status=status,
    )
    keys = jax.random.split(key)
    output = semi_supervised.client_output(task, client, shared, state.optimizer, data, objective, keys)
    return output._replace(client_state=FreeMatchClientState(*output.client_state))
