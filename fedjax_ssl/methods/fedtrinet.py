"""FedTriNet (Che et al. 2021): permanent pseudo-labels by three networks, under a threshold that falls.

In the first phase it is FedAvg on labels. In the second phase each client of a round joins the first blocks of the global model
to the other layers of the network that it trained last, fine-tunes these layers on its labels, and adds up the softmax outputs
of three networks: its last one, the joined one and the global one. If an example's largest sum reaches the threshold, the class
of that sum is its label from then on. Training starts from the joined network, which is uploaded whole. The average is uniform.

The settings are those of the released code. Different from it:

- All three networks make pseudo-labels, on plain images and in evaluation mode (in the code two do, in training mode).
- The first blocks are always two convolutions, which fine-tuning leaves frozen, with their statistics (in the code not always).
- The base confidence is measured on all data of the clients of the next round, not on the test set.
- Fine-tuning and CE_l are on labeled examples alone. The code adds pseudo-labeled ones, in fine-tuning with their true labels.
- An epoch on pairs of batches goes through the larger set. The code's ends with the smaller one.
- A client that the first phase never draws trains once on its labels in the second, from the global model of that time. The
  code trains every client once before the first phase.
- A client without labels takes no part in the first phase; its last network is the global one until it has trained.

FedProx's term pulls a training towards its start, the global or the joined network; fine-tuning has no such term.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.batching import Batch, Pair
from fedjax_ssl.data.federated import mix
from fedjax_ssl.local import Broadcast, Gradients, Server, ServerState, Setup, Task, Trained, Training, TrainState, Weights
from fedjax_ssl.local.server import flatten
from fedjax_ssl.local.task import join
from fedjax_ssl.local.training import GradientFn
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, Cohort, DataSpec, Method, ServerData
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.options import FirstPhase, Options
from fedjax_ssl.ssl import losses, pseudo_labels, thresholds

NEVER = 4.0  # a threshold that no sum of three probabilities reaches
ENOUGH = 10  # after a client gains so many pseudo-labels in one round, alpha weighs them
RAMP, MAX_ALPHA = (50, 150), 0.15  # alpha rises over these local epochs, to this value
EPOCHS = 5  # local epochs that a round counts in alpha's ramp


class FedTriNetOptions(Options):
    """FedTriNet's own settings."""

    labeled_rounds: FirstPhase = Field(
        default=0.4,
        description="Number of rounds of the first phase, in which clients train on labels alone. A number below 1 is a share "
        "of all rounds.",
    )


class FedTriNetClientState(NamedTuple):
    """A client's networks and pseudo-labels, and its optimizer state."""

    seen: jax.Array  # whether it has uploaded a network
    last: Weights  # the network that it uploaded last
    pseudo: jax.Array  # int32 [n], -1 for none
    weighed: jax.Array  # whether it has gained ENOUGH pseudo-labels in one round
    optimizer: PyTree


def fedtrinet(*, task: Task, client: Training, server: Server, options: FedTriNetOptions = FedTriNetOptions()) -> Method:
    """FedTriNet, for labels at the clients: three networks vote on pseudo-labels. All training sees `data.labeled` views.

    The server's `extra` is the base confidence m, 0 until it is measured. The Broadcast's `extra` is the threshold q on sums of
    three probabilities.
    """

    def threshold(state: ServerState, cohort: Cohort) -> jax.Array:
        round = cohort.round - options.labeled_rounds
        q = thresholds.falling(state.extra, round)
        return jnp.where(state.extra > 0, q, NEVER)

    update = partial(client_update, Setup(task, client, server, options))
    method = local.averaging_method(task, client, server, update, labels_at=("clients",), views=("labeled",), extra=threshold)

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedTriNetClientState]:
        (state, optimizer), k = method.init(key, spec), spec.num_clients
        last = optax.tree.batch_shape(state.weights, (k,))
        pseudo, no = jnp.full((k, spec.client_rows), -1, jnp.int32), jnp.zeros(k, bool)
        return state._replace(extra=jnp.zeros(())), FedTriNetClientState(no, last, pseudo, no, optimizer)

    def server_update(state: ServerState, update: Aggregate, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        """The usual work, which after the first phase also measures m, once, on a next cohort that has examples."""
        state, metrics = method.server_update(state, update, data, key)

        def measure() -> jax.Array:
            examples = flatten(data.next_cohort)
            probs = local.class_probabilities(task, state.weights, examples, None)
            return losses.masked_mean(pseudo_labels.harden(probs).confidence, examples.mask)

        is_due = (data.round + 1 >= options.labeled_rounds) & (state.extra == 0)
        return state._replace(extra=jax.lax.cond(is_due, measure, lambda: state.extra)), metrics

    return method._replace(
        init=init,
        server_update=server_update,
        requires=method.requires._replace(next_cohort=True),
        predict_client={
            "last_upload": lambda _, own, images, mask: jnp.where(own.seen, task.predict(own.last, images, mask), jnp.nan)
        },
    )


def client_update(
    setup: Setup, shared: Broadcast, _: PyTree, state: FedTriNetClientState, data: ClientData, key: jax.Array
) -> ClientOutput:
    """One client's round, in either phase; the loops of the other phase have length 0."""
    task, client, _, options = setup
    shared = shared._replace(round=shared.round - options.labeled_rounds)  # from 0 in the second phase; negative in the first
    first_key, tune_key, train_key = jax.random.split(key, 3)
    second_phase, start = shared.round >= 0, TrainState(shared.weights, state.optimizer)
    order_key, step_key = jax.random.split(first_key)
    gradient = local.supervised_gradient(task, data.labeled)
    schedule = client.schedule(order_key, data.labeled.mask & (~second_phase | ~state.seen))
    on_labels = local.minimize(task, client, gradient, start, schedule, learning_rate=shared.learning_rate, key=step_key)
    last = optax.tree.where(state.seen, state.last, on_labels.carry.weights)
    tuned = fine_tune(task, client, shared, last, data, second_phase, tune_key)
    joined = tuned.carry.weights
    new = pseudo_label(task, (last, joined, shared.weights), data, state.pseudo, shared)
    gained = (new >= 0) & (state.pseudo < 0)
    weighed = state.weighed | (jnp.sum(gained) >= ENOUGH)
    on_both = train_on_both(setup, shared, TrainState(joined, state.optimizer), data, (new, weighed), train_key)

    uploaded = optax.tree.where(second_phase, on_both, on_labels._replace(metrics={**on_both.metrics, **on_labels.metrics}))
    weights, optimizer, _ = uploaded.carry
    took_part = uploaded.steps > 0
    state = FedTriNetClientState(
        state.seen | took_part, optax.tree.where(took_part, weights, state.last), new, weighed, optimizer
    )
    trained = uploaded._replace(images=on_labels.images.plus(tuned.images).plus(on_both.images))
    weights, weight = optax.tree.where(took_part, weights, shared.weights), jnp.where(took_part, 1.0, 0.0)
    output = local.output_of(task, shared.weights, weights, trained, weight, state)
    sent = num_bytes(output.update) + jnp.where(shared.round == 0, 8, 0)  # 8: its confidence, and its number of examples
    metrics = {
        **output.metrics,
        **pseudo_labels.diagnostics(new, data.true_labels, new >= 0, data.unlabeled.mask & second_phase),
        "client/threshold": mean(shared.extra, second_phase),
        "comm/bytes_down": Sum((num_bytes(shared.weights) + jnp.where(second_phase, 4, 0)).astype(jnp.int32)),
        "comm/bytes_up": Sum(sent.astype(jnp.int32)),
        **pseudo_labels.examples(new, data.unlabeled.mask & (new >= 0)),
    }
    return output._replace(metrics=metrics)


def fine_tune(
    task: Task, client: Training, shared: Broadcast, last: Weights, data: ClientData, trains: jax.Array, key: jax.Array
) -> Trained:
    """The joined network after E epochs on a client's labels with frozen first blocks; no steps unless `trains`.

    It begins as the first blocks of the `shared` network and all other layers of the `last` one, with their statistics.
    """
    order_key, train_key = jax.random.split(key)
    names = task.model.first_blocks()
    (frozen, _), (_, rest) = task.split(shared.weights, names), task.split(last, names)
    of_all = local.supervised_gradient(task, data.labeled)

    def gradient(weights: Weights, batch: Batch, key: jax.Array) -> Gradients:
        gradients = of_all(join(frozen, weights), batch, key)
        _, (grad, stats) = task.split(Weights(gradients.grad, gradients.batch_stats), names)
        return gradients._replace(grad=grad, batch_stats=stats)

    training, rate = client._replace(persistent=False, prox_mu=0.0), shared.learning_rate
    schedule = client.schedule(order_key, data.labeled.mask & trains)
    trained = local.minimize(task, training, gradient, TrainState(rest, ()), schedule, learning_rate=rate, key=train_key)
    return trained._replace(carry=TrainState(join(frozen, trained.carry.weights), ()))


def pseudo_label(
    task: Task, networks: tuple[Weights, ...], data: ClientData, pseudo: jax.Array, shared: Broadcast
) -> jax.Array:
    """Pseudo-labels int32 [n] after adding new ones to `pseudo`: argmax_c s_c where max_c s_c >= q, in the second phase.

        s = sum_i softmax(f_i(u)),  i over the networks

    Forward passes are computed only for examples u without a pseudo-label, which are sorted to the front.
    """
    without = data.unlabeled.mask & (pseudo < 0) & (shared.round >= 0)
    order = jnp.argsort(~without, stable=True)
    examples = data.unlabeled._replace(index=data.unlabeled.index[order], count=jnp.sum(without, dtype=jnp.int32))
    outputs = jnp.stack([local.class_probabilities(task, weights, examples, None) for weights in networks])
    label, confidence = pseudo_labels.harden(jnp.sum(outputs, axis=0))
    new = examples.mask & (confidence >= shared.extra)
    return pseudo.at[order].set(jnp.where(new, label, pseudo[order]))


def alpha(round: jax.Array, epoch: jax.Array) -> jax.Array:
    """The weight of CE_p: it rises linearly from 0 to MAX_ALPHA over the local epochs RAMP of the second phase.

    `round` counts from 0 in that phase, and `epoch` is the number of whole local epochs of this round so far.
    """
    start, end = RAMP
    progress = (EPOCHS * round.astype(jnp.float32) + epoch - start) / (end - start)
    return MAX_ALPHA * jnp.clip(progress, 0.0, 1.0)


def train_on_both(
    setup: Setup, shared: Broadcast, start: TrainState, data: ClientData, labels: tuple[jax.Array, jax.Array], key: jax.Array
) -> Trained:
    """E epochs of the second phase from the joined network, on labeled and pseudo-labeled examples.

    Both kinds form one set until a client has gained ENOUGH pseudo-labels in one round. From then on each step takes a pair of
    batches, with the loss (CE_l + alpha CE_p) / 2. `labels` are the pseudo-labels, and whether alpha weighs them.
    """
    one_keys, pair_keys = jax.random.split(key, (2, 2))
    (task, client, *_), (pseudo, weighed) = setup, labels
    second_phase = shared.round >= 0
    train = partial(local.minimize, task, client, learning_rate=shared.learning_rate)
    everything = mix(data.labeled, data.unlabeled, pseudo=pseudo)
    schedule = client.schedule(one_keys[0], everything.mask & second_phase & ~weighed)
    one = train(local.supervised_gradient(task, everything), start, schedule, key=one_keys[1])

    in_pairs = second_phase & weighed
    of_labels, of_pseudo = data.labeled.mask & in_pairs, data.unlabeled.mask & (pseudo >= 0) & in_pairs
    pairs = client.paired_schedule(pair_keys[0], of_labels, of_pseudo, client.batch_size, larger_counts=True)
    end = train(weighed_gradient(task, data, pseudo, shared.round), one.carry, pairs, key=pair_keys[1])
    loss = jax.tree.map(jnp.add, one.metrics["loss"], end.metrics["loss"])
    return Trained(end.carry, {**end.metrics, "loss": loss}, one.images.plus(end.images), one.steps + end.steps)


def weighed_gradient(task: Task, data: ClientData, pseudo: jax.Array, round: jax.Array) -> GradientFn:
    """The gradient of (CE_l + alpha CE_p) / 2 in one forward pass; each term is the mean over one batch of the pair."""

    def gradient(weights: Weights, pair: Pair, key: jax.Array) -> Gradients:
        labeled, unlabeled = pair
        views = (
            task.views.labeled(key, data.labeled.take(labeled.positions)),
            task.views.labeled(local.substream(key, "pseudo"), data.unlabeled.take(unlabeled.positions)),
        )
        masks, labels = (labeled.mask, unlabeled.mask), data.labeled.labels[labeled.positions]
        # The batches of the larger set count the epochs; the smaller set is repeated.
        weight = alpha(round, jnp.minimum(labeled.epoch, unlabeled.epoch))

        def loss(weights: Weights) -> tuple[jax.Array, PyTree, Metrics]:
            (first, second), stats = task.train_logits_together(weights, views, masks, local.dropout_key(key))
            of_labels, metric = local.labeled_loss(first, labels, labeled.mask)
            of_pseudo, other = local.labeled_loss(second, pseudo[unlabeled.positions], unlabeled.mask)
            return (of_labels + weight * of_pseudo) / 2, stats, {"loss": metric, "unlabeled_loss": other}

        # Without labels and as long as alpha is 0 there is nothing to learn from, and momentum and weight decay rest, too.
        return local.gradients(loss, weights)._replace(taken=jnp.any(labeled.mask) | (weight > 0))

    return gradient
