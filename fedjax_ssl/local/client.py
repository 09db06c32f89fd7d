"""What clients of several methods have in common: training from the broadcast model, aggregation weight, metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jaxtyping import Bool

from fedjax_ssl.arrays import Array, Count, Key, PyTree, Scalar
from fedjax_ssl.data.batching import PairedSchedule, Schedule
from fedjax_ssl.local.server import Server
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.local.training import AnySchedule, GradientFn, Trained, Training, TrainState, minimize
from fedjax_ssl.method import ClientData, ClientOutput
from fedjax_ssl.metrics import Metrics, Sum, num_bytes
from fedjax_ssl.options import LabeledRepeats

ScheduleT = TypeVar("ScheduleT", Schedule, PairedSchedule)


class Setup(NamedTuple):
    """What a method is made of, as its factory receives it."""

    task: Task
    client: Training
    server: Server
    options: Any


def train_client(
    task: Task,
    client: Training,
    gradient: GradientFn,
    schedule: AnySchedule,
    shared: PyTree,
    optimizer: PyTree,
    *,
    weight: Scalar,
    key: Key,
    down: PyTree = None,
) -> ClientOutput:
    """A client's round: gradient steps from the broadcast model, and what the client then sends.

    `shared` has `weights` and `learning_rate`; `optimizer` is the stored optimizer state; the new one becomes the
    `client_state` of the output. `optimizer` may also be a TrainState with companions; the client state is then the tuple of
    the new optimizer state and the new companions. `down` is as in `output_of`.
    """
    start = optimizer if isinstance(optimizer, TrainState) else TrainState(shared.weights, optimizer)
    trained = minimize(task, client, gradient, start, schedule, learning_rate=shared.learning_rate, key=key)
    weights, new, companions = trained.carry
    client_state = (new, *companions) if companions else new
    return output_of(task, shared.weights, weights, trained, weight, client_state, down=down)


def output_of(
    task: Task,
    received: Weights,
    weights: Weights,
    trained: Trained,
    weight: Scalar,
    client_state: PyTree,
    *,
    down: PyTree = None,
) -> ClientOutput:
    """What a client returns after a training from the `received` weights to `weights`: the update, and its metrics.

    `down` is all that the client receives, whose bytes `comm/bytes_down` counts; None: the `received` weights alone.
    """
    update = task.update(received, weights)
    down = received if down is None else down
    return ClientOutput(update, weight, client_state, client_metrics(trained, down=down, up=update))


def trainable(accepted: Bool[Array, " n"], mask: Bool[Array, " n"], batches: str) -> Bool[Array, " n"]:
    """Which examples batches are drawn from, bool [n]: `all` in `mask`, or the `accepted` ones; none if none is accepted."""
    return accepted if batches == "accepted" else mask & jnp.any(accepted)


def client_repeats(options: LabeledRepeats, data: ClientData) -> Count:
    """How often an epoch of this client goes through its labeled examples, int32 scalar; 1 where it has none."""
    count = data.labeled.count
    few = (count < options.repeats_below * (count + data.unlabeled.count)) | (options.repeats_below >= 1)
    return jnp.where(few & (count > 0), options.labeled_repeats, 1)


def repeated(
    options: LabeledRepeats, data: ClientData, client: Training, schedule_of: Callable[[Training], ScheduleT]
) -> ScheduleT:
    """A client's schedule; its epochs are `epochs` times the repeats of its labels, or, without labels, `unlabeled_epochs`.

    `schedule_of` makes the schedule for the largest number of epochs, which is then cut to the number of this client.
    """
    if not client.epochs:
        return schedule_of(client)
    without_labels = client.unlabeled_epochs or client.epochs
    most = max(client.epochs * options.labeled_repeats, without_labels)
    if most == client.epochs == without_labels:
        return schedule_of(client)
    with_labels = client.epochs * client_repeats(options, data)
    epochs = jnp.where(data.labeled.count > 0, with_labels, without_labels)
    schedule = schedule_of(client._replace(epochs=most))
    return schedule._replace(steps=schedule.steps // most * epochs)


def data_weight(task: Task, data: ClientData) -> Scalar:
    """A client's aggregation weight by its data, float32 scalar; 0 without data.

    Where clients have labels, it is |D_s| + |D_u| (FedAvg, FedDure). Where the server alone has labels, it is 1, so that the
    average is uniform ((FL)^2's baselines, SemiFL, FedMatch, FedCon).
    """
    count = data.labeled.count + data.unlabeled.count
    return count.astype(jnp.float32) if "clients" in task.labels_at else jnp.where(count > 0, 1.0, 0.0)


def client_metrics(trained: Trained, *, down: PyTree, up: PyTree) -> Metrics:
    """A client's metrics: those of its steps, the bytes that it receives and sends, and the number of images it trained on.

    A step's metric is named `client/<name>`, unless its name has a group already.
    """
    return {
        **{name if "/" in name else f"client/{name}": value for name, value in trained.metrics.items()},
        "comm/bytes_down": Sum(jnp.int32(num_bytes(down))),
        "comm/bytes_up": Sum(jnp.int32(num_bytes(up))),
        "perf/client_images": trained.images,
    }
