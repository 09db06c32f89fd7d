"""RSCFed (Liang et al., CVPR 2022): a consensus of random groups of clients, for labels at some clients.

Equations and constants are those of the authors' released code, as the paper's text was not at hand. There a client of several
groups trains once for each, and clients are warmed up by a given checkpoint. Here each client of a round trains once, for all
groups that it is drawn into afterwards, and `client.unlabeled_wait` rounds are a warm-up.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from fedjax_ssl import local
from fedjax_ssl.arrays import Key, PyTree
from fedjax_ssl.data.batching import Batch
from fedjax_ssl.data.federated import of_kind
from fedjax_ssl.local import Broadcast, Gradients, Server, ServerState, Setup, Task, Training, TrainState, Weights, substream
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, DataSpec, Method, ServerData, parameters_of, summed
from fedjax_ssl.metrics import Mean, Metrics, mean
from fedjax_ssl.options import Decay, LabeledRepeats, Options, Positive, Rate, Weight
from fedjax_ssl.ssl import consensus, ema, losses

TEMPERATURE = 0.5  # of the teacher's outputs: squares of probabilities, normalized


class RSCFedOptions(Options):
    """RSCFed's own settings."""

    groups: Positive = Field(default=3, description="Number of random groups of clients in a round.")
    group_size: Positive = Field(
        default=5, description="Number of clients in a group, or all clients of the round where they are fewer."
    )
    distance_weight: Weight = Field(
        default=100.0,
        description="How fast a client's weight in its group falls with its model's distance from the group's mean, in a group "
        "with a labeled client.",
    )
    unlabeled_distance_weight: Weight = Field(
        default=1e4, description="The same as `distance_weight`, for a group without a labeled client."
    )
    labeled_factor: Rate = Field(default=6.0, description="Factor of a labeled client's weight in its group.")
    consistency_weight: Weight = Field(
        default=0.02, description="Weight of the loss of unlabeled clients, which is the squared error to their teacher."
    )
    teacher_decay: Decay = Field(
        default=0.999, description="Largest decay per step of the moving average of an unlabeled client's model, its teacher."
    )


class Teacher(NamedTuple):
    """The moving average of an unlabeled client's models, and the number of its steps so far, over all rounds."""

    weights: Weights  # not read in the client's first round, in which it begins as the model that the client receives
    steps: jax.Array


class Sent(NamedTuple):
    """What a client uploads: its update, and whether it has labels."""

    update: Weights
    is_labeled: jax.Array


def rscfed(*, task: Task, client: Training, server: Server, options: RSCFedOptions = RSCFedOptions()) -> Method:
    """RSCFed: labeled clients train on their labels, the others on what their teachers make of another weak view.

        L_u = w mean sum_c (p_c - y_c)^2,  y_c = q_c^2 / sum q^2

    p is the softmax output on one weak view, and q the teacher's on another, outside of training and without gradient. The
    server averages groups of clients by `fedjax_ssl.ssl.consensus`. The client state is (optimizer state, Teacher).
    """
    update, views = partial(client_update, Setup(task, client, server, options)), ("labeled", "weak")
    method = local.averaging_method(task, client, server, update, labels_at=("some_clients",), views=views)

    def init(key: Key, spec: DataSpec) -> tuple[ServerState, PyTree]:
        state, optimizer = method.init(key, spec)
        teacher = optax.tree.batch_shape(Teacher(state.weights, jnp.int32(0)), (spec.num_clients,))
        return state, (optimizer, teacher)

    def server_update(state: ServerState, stacked: Aggregate, data: ServerData, key: Key) -> tuple[ServerState, Metrics]:
        sent, sizes = stacked
        coefficients = group_coefficients(options, sent, sizes, substream(key, "groups"))
        mean_update = summed(Aggregate(sent.update, coefficients))
        state, metrics = method.server_update(state, mean_update, data, key)
        of_labeled = jnp.sum(jnp.where(sent.is_labeled, coefficients, 0.0))
        return state, {**metrics, "server/labeled_share": mean(of_labeled, jnp.any(sizes > 0))}

    return method._replace(
        init=init,
        server_update=server_update,
        aggregator="stack",
        parameters=lambda sent: parameters_of(sent.update),
    )


def group_coefficients(options: RSCFedOptions, sent: Sent, sizes: jax.Array, key: Key) -> jax.Array:
    """The clients' coefficients in the mean of all groups, float32 [M], from their updates and sizes [M]; 0 for absent ones."""

    def of_group(key: Key) -> jax.Array:
        members = consensus.draw(key, sizes > 0, options.group_size)
        return consensus.coefficients(
            sent.update.params,
            jnp.where(members, sizes, 0.0),
            sent.is_labeled,
            rates=(options.distance_weight, options.unlabeled_distance_weight),
            labeled_factor=options.labeled_factor,
        )

    return jnp.mean(jax.lax.map(of_group, jax.random.split(key, options.groups)), axis=0)


def client_update(setup: Setup, shared: Broadcast, _: PyTree, state: PyTree, data: ClientData, key: jax.Array) -> ClientOutput:
    """One client's round: on its labels or, where it has none, on its teacher's outputs, which follow its steps."""
    task, client, _, options = setup
    (optimizer, stored), (order_key, train_key) = state, jax.random.split(key)
    is_labeled = data.labeled.count > 0
    teacher = stored._replace(weights=optax.tree.where(stored.steps > 0, stored.weights, shared.weights))
    examples = of_kind(data.labeled, data.unlabeled, used=data.unlabeled.mask & (options.consistency_weight > 0))

    def gradient(weights: Weights, batch: Batch, key: Key, teacher: Teacher) -> Gradients:
        images, labels = examples.take(batch.positions), examples.labels[batch.positions]
        view = jnp.where(is_labeled, task.views.labeled(key, images), task.views.weak(key, images))
        other = task.views.weak(substream(key, "teacher"), images)
        target = task.eval_logits(teacher.weights, other, batch.mask) / TEMPERATURE

        def loss(logits: jax.Array) -> tuple[jax.Array, Mean]:
            error = options.consistency_weight * losses.squared_error(target, logits)
            return local.mean_loss(jnp.where(is_labeled, losses.cross_entropy(logits, labels), error), batch.mask)

        def follow(new: Weights) -> tuple[Teacher]:
            decay = ema.warm_decay(teacher.steps, options.teacher_decay)
            followed = Teacher(ema.update(teacher.weights, new, decay), teacher.steps + 1)
            return (optax.tree.where(is_labeled, teacher, followed),)

        return local.loss_gradients(task, weights, view, loss, batch.mask, key)._replace(follow=follow)

    schedule = local.repeated(LabeledRepeats(), data, client, lambda client: client.schedule(order_key, examples.mask))
    start, weight = TrainState(shared.weights, optimizer, (teacher,)), jnp.sum(examples.mask).astype(jnp.float32)
    output = local.train_client(task, client, gradient, schedule, shared, start, weight=weight, key=train_key)
    optimizer, teacher = output.client_state
    state = optimizer, optax.tree.where(teacher.steps > 0, teacher, stored)
    return output._replace(update=Sent(output.update, is_labeled), client_state=state)
