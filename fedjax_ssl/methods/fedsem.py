"""FedSem (Albaseer et al. 2020): FedAvg on labels, then on all data, with pseudo-labels that are made once in between.

As FedSiam describes and compares it: the first phase's last model labels every unlabeled example by its largest output, without
a threshold, and training goes on from that model. The pseudo-labels never change: a client that is first drawn late in the
second phase labels its data by the model that ended the first, which the server keeps and sends to it.

Clients are averaged alike whatever their data, as in FedSiam's released code. Different from that code:

- The model that is returned is the last one, not the best one on test data.
- Pseudo-labels are made on plain images; the code's are augmented then as they are in training.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.data.federated import Mixture, with_pseudo_labels
from fedjax_ssl.local import Fit, Server, ServerState, Task, Training, Weights
from fedjax_ssl.method import Aggregate, ClientOutput, Cohort, DataSpec, Method, ServerData, Shard
from fedjax_ssl.metrics import Metrics, Sum, num_bytes
from fedjax_ssl.options import FirstPhase, Options, Positive, rounds_of
from fedjax_ssl.ssl import pseudo_labels

PyTree = Any


class FedSemOptions(Options):
    """FedSem's own settings."""

    labeled_rounds: FirstPhase = Field(
        default=0.6, description="R1, the rounds of the first phase; all others are the second's."
    )
    labeled_repeats: Positive = Field(
        default=1,
        description=(
            "How often an epoch of the first phase goes through the labeled examples (`released`: 3 or 2); in the "
            "second every example counts once."
        ),
    )

    def for_run(self, rounds: int, counts: np.ndarray, batch_size: int) -> Self:
        """With `labeled_rounds` as a number of rounds."""
        return self.model_copy(update={"labeled_rounds": rounds_of("labeled_rounds", self.labeled_rounds, rounds)})


class Broadcast(NamedTuple):
    """What goes down to every client.

    Attributes:
        weights: the global model.
        labeler: the model that makes pseudo-labels, the last one of the first phase.
        learning_rate: float32 scalar, this round's.
        round: int32 scalar, its number from 0.
    """

    weights: Weights
    labeler: Weights
    learning_rate: jax.Array
    round: jax.Array


class ClientState(NamedTuple):
    """What a client keeps.

    Attributes:
        pseudo: int32 [n], pseudo-labels; -1: none yet.
        optimizer: its optimizer's state, `()` if not persistent.
    """

    pseudo: jax.Array
    optimizer: PyTree


def fedsem(*, task: Task, client: Training, server: Server, options: FedSemOptions = FedSemOptions()) -> Method:
    """FedSem, for labels at the clients.

    Every example with a label is seen in the view `data.labeled`; those to be labeled in the plain view. In the first phase a
    client without labels takes no part, and nothing of the unlabeled data is touched.

    Args:
        task: network and views.
        client: local training, in both phases.
        server: aggregation and statistics, with the number of rounds.
        options: the first phase.

    Returns:
        The method.
    """

    def broadcast(state: ServerState, _: PyTree, cohort: Cohort) -> tuple[Broadcast, PyTree]:
        return Broadcast(state.weights, state.own, client.learning_rate(cohort.round), cohort.round), ()

    update = partial(client_update, task, client, options)
    method = local.averaging_method(task, client, server, update, labels_at=("clients",))

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, ClientState]:
        state, optimizer = method.init(key, spec)
        none = jnp.full((spec.num_clients, spec.client_rows), -1, jnp.int32)
        return state._replace(own=state.weights), ClientState(none, optimizer)

    def server_update(
        state: ServerState, aggregate: Aggregate, data: ServerData, key: jax.Array
    ) -> tuple[ServerState, Metrics]:
        """The model that makes pseudo-labels is the global one until the first phase ends."""
        new, metrics = method.server_update(state, aggregate, data, key)
        first_phase = data.round < options.labeled_rounds
        labeler = jax.tree.map(lambda x, y: jnp.where(first_phase, x, y), new.weights, state.own)
        return new._replace(own=labeler), metrics

    return method._replace(init=init, broadcast=broadcast, server_update=server_update)


def client_update(
    task: Task,
    client: Training,
    options: FedSemOptions,
    shared: Broadcast,
    _: PyTree,
    state: ClientState,
    shard: Shard,
    key: jax.Array,
) -> ClientOutput:
    """One client's round: in the second phase it labels its data if it has not yet, then it trains on what has a label."""
    order_key, train_key = jax.random.split(key)
    second_phase, mask = shared.round >= options.labeled_rounds, shard.unlabeled.mask
    to_label = second_phase & jnp.any(mask & (state.pseudo < 0))
    pseudo = label_once(task, shared.labeler, shard, state.pseudo, to_label)
    examples = training_set(options, shard, pseudo, second_phase)
    trained = local.minimize(
        task,
        client,
        local.supervised_gradient(task, examples),
        Fit(shared.weights, state.optimizer),
        client.schedule(order_key, examples.mask),
        learning_rate=shared.learning_rate,
        key=train_key,
    )
    update = task.update(shared.weights, trained.carry.weights)
    # In the first round of the second phase the global model is the one that makes the labels: nothing else has to be sent.
    sent = num_bytes(shared.weights) + jnp.where(
        to_label & (shared.round > options.labeled_rounds), num_bytes(shared.labeler), 0
    )
    metrics = {
        **local.client_metrics(trained, down=shared.weights, up=update),
        **pseudo_labels.diagnostics(pseudo, shard.true_labels, pseudo >= 0, mask & second_phase),
        "comm/bytes_down": Sum(sent.astype(jnp.int32)),
    }
    state = ClientState(pseudo, trained.carry.optimizer)
    return ClientOutput(update, jnp.where(jnp.any(examples.mask), 1.0, 0.0), state, metrics)


def label_once(task: Task, labeler: Weights, shard: Shard, pseudo: jax.Array, to_label: jax.Array) -> jax.Array:
    """Pseudo-labels int32 [n]: the labeler's largest outputs if `to_label` bool scalar is set, else `pseudo` as it is."""
    # No example, no pass: the loop over them has length 0.
    examples = shard.unlabeled._replace(count=jnp.where(to_label, shard.unlabeled.count, 0))
    probs = local.class_probabilities(task, labeler, examples, None)
    return jnp.where(examples.mask, pseudo_labels.harden(probs).label, pseudo)


def training_set(options: FedSemOptions, shard: Shard, pseudo: jax.Array, second_phase: jax.Array) -> Mixture:
    """What a client trains on: labeled examples, `labeled_repeats` times, or once beside all pseudo-labeled ones."""
    examples = with_pseudo_labels(shard.labeled, shard.unlabeled, pseudo, options.labeled_repeats)
    copies = jnp.arange(len(examples.index)) < (options.labeled_repeats - 1) * len(shard.labeled.index)
    return examples._replace(mask=examples.mask & ~(copies & second_phase))
