"""FedSem (Albaseer et al. 2020): FedAvg on labels, then on all data, with pseudo-labels that are made once in between.

As FedSiam describes it, the last model of the first phase labels every unlabeled example by its largest output, without a
threshold. The pseudo-labels never change; a client that is drawn for the first time later on receives that model, too. The
average over clients is uniform, as in FedSiam's released code. Unlike there, each phase ends with its last model, not with the
one that has the lowest loss on test data, and pseudo-labels are made on plain images.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.federated import mix
from fedjax_ssl.local import Broadcast, Server, ServerState, Setup, Task, Training
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, DataSpec, Method, ServerData
from fedjax_ssl.metrics import Metrics, Sum, num_bytes
from fedjax_ssl.options import FirstPhase, LabeledRepeats
from fedjax_ssl.ssl import pseudo_labels


class FedSemOptions(LabeledRepeats):
    """FedSem's own settings; labels are repeated in its first phase alone."""

    labeled_rounds: FirstPhase = Field(
        default=0.6,
        description="Number of rounds of the first phase, in which clients train on labels alone. A number below 1 is a share "
        "of all rounds.",
    )
    pseudo_labels: Literal["global", "true"] = Field(
        default="global",
        description="Labels of the second phase: predictions of the first phase's last model (`global`), or the `true` labels.",
    )


class FedSemClientState(NamedTuple):
    """A client's pseudo-labels, int32 [n], -1 where there is none yet, and its optimizer state, `()` if not persistent."""

    pseudo: jax.Array
    optimizer: PyTree


def fedsem(*, task: Task, client: Training, server: Server, options: FedSemOptions = FedSemOptions()) -> Method:
    """FedSem, for labels at the clients: FedAvg on labels, then on all data with pseudo-labels that are made once.

    In the first phase a client without labels takes no part. All training sees the view `data.labeled` of its examples. The
    server's and the Broadcast's `extra` is the labeler, the last model of the first phase.
    """
    update = partial(client_update, Setup(task, client, server, options))
    method = local.averaging_method(
        task,
        client,
        server,
        update,
        labels_at=("clients", "some_clients"),
        views=("labeled",),
        extra=lambda state, _: state.extra,
    )

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedSemClientState]:
        state, optimizer = method.init(key, spec)
        none = jnp.full((spec.num_clients, spec.client_rows), -1, jnp.int32)
        return state._replace(extra=state.weights), FedSemClientState(none, optimizer)

    def server_update(state: ServerState, update: Aggregate, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        new, metrics = method.server_update(state, update, data, key)
        first_phase = data.round < options.labeled_rounds  # in which the labeler is the global model
        labeler = optax.tree.where(first_phase, new.weights, state.extra)
        return new._replace(extra=labeler), metrics

    return method._replace(init=init, server_update=server_update)


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, state: FedSemClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round: in the second phase it labels its data once, then it trains on all examples with a label."""
    task, client, _, options = setup
    order_key, train_key = jax.random.split(key)
    second_phase, mask = shared.round >= options.labeled_rounds, data.unlabeled.mask
    to_label = second_phase & jnp.any(mask & (state.pseudo < 0))
    # With a count of 0 the loop over batches has length 0, and there is no forward pass.
    unlabeled = data.unlabeled._replace(count=jnp.where(to_label, data.unlabeled.count, 0))
    probs = local.class_probabilities(task, shared.extra, unlabeled, None)
    label = data.true_labels if options.pseudo_labels == "true" else pseudo_labels.harden(probs).label
    pseudo = jnp.where(unlabeled.mask, label, state.pseudo)
    repeats = jnp.where(second_phase, 1, local.client_repeats(options, data))  # labels are repeated in the first phase alone
    examples = mix(data.labeled, data.unlabeled, options.labeled_repeats, repeats, pseudo=pseudo)
    gradient = local.supervised_gradient(task, examples)
    schedule = local.repeated(LabeledRepeats(), data, client, lambda client: client.schedule(order_key, examples.mask))
    weight = jnp.where(jnp.any(examples.mask), 1.0, 0.0)
    output = local.train_client(task, client, gradient, schedule, shared, state.optimizer, weight=weight, key=train_key)
    # In the first round of the second phase the global model is the labeler, and nothing else has to be sent.
    labeler_is_sent = to_label & (shared.round > options.labeled_rounds)
    received = num_bytes(shared.weights) + jnp.where(labeler_is_sent, num_bytes(shared.extra), 0)
    metrics = {
        **output.metrics,
        **pseudo_labels.diagnostics(pseudo, data.true_labels, pseudo >= 0, mask & second_phase),
        "comm/bytes_down": Sum(received.astype(jnp.int32)),
        **pseudo_labels.examples(pseudo, mask & (pseudo >= 0)),
    }
    return output._replace(client_state=FedSemClientState(pseudo, output.client_state), metrics=metrics)
