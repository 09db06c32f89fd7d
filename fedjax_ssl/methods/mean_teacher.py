"""Two networks that train as one: an online network by gradient steps, and a target that follows it as a moving average.

A pair is a `Weights` whose two fields are Networks, so that it is broadcast, subtracted, averaged and kept as one network is.
The functions here take one network too: it is its own target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.batching import Batch, Schedule
from fedjax_ssl.method import ServerData
from fedjax_ssl.methods import local
from fedjax_ssl.methods import server as server_side
from fedjax_ssl.methods.local import Gradient, Step, Teacher, Trained, Training
from fedjax_ssl.methods.server import Server, ServerState
from fedjax_ssl.methods.task import Task, Weights
from fedjax_ssl.ssl import ema

PyTree = Any


class Networks(NamedTuple):
    """What two networks have of something: of weights, of parameters, of statistics."""

    online: Any
    target: Any


def join(online: Weights, target: Weights) -> Weights:
    """Two networks as one `Weights`."""
    return Weights(Networks(online.params, target.params), Networks(online.stats, target.stats))


def networks(weights: Weights) -> Networks:
    """The two networks' `Weights`."""
    if not isinstance(weights.params, Networks):
        return Networks(weights, weights)
    return Networks(*(Weights(params, stats) for params, stats in zip(weights.params, weights.stats, strict=True)))


def train(
    task: Task,
    training: Training,
    gradient: Gradient,
    start: tuple[Weights, PyTree],
    schedule: Schedule,
    *,
    learning_rate: jax.Array,
    key: jax.Array,
    alpha: Callable[[Batch], jax.Array],
) -> Trained:
    """`local.train` of the online network; of a pair, the target follows it as the training's teacher.

    Args:
        task: the network.
        training: of the online network, whose optimizer knows of no target.
        gradient: of the online network; a pair's target is its fourth argument.
        start: (weights of one network or of a pair, kept optimizer state).
        schedule: the batches.
        learning_rate: float32 scalar.
        key: PRNG key.
        alpha: a step's batch -> the target's decay after that step.

    Returns:
        Trained, its weights like the ones to start from.
    """
    weights, kept = start
    online, target = networks(weights)
    paired = isinstance(weights.params, Networks)
    trained = local.train(
        task,
        training,
        gradient,
        (online, kept),
        schedule,
        learning_rate=learning_rate,
        key=key,
        teacher=Teacher(target, following(task, alpha)) if paired else None,
    )
    return trained._replace(weights=join(trained.weights, trained.teacher)) if paired else trained


def following(task: Task, alpha: Callable[[Batch], jax.Array]) -> Callable[[Weights, Weights, Step, Batch], Weights]:
    """After each step theta_t <- alpha theta_t + (1 - alpha) theta_s, over parameters (FedSiam, Eqs. 3 and 9).

    The target tracks the batch-norm statistics of its own passes, where it has any in a step; where alpha = 0 the target is the
    online network, with its statistics.

    Args:
        task: says whether statistics are tracked.
        alpha: the step's batch -> float32 scalar in [0, 1).
    """

    def follow(target: Weights, online: Weights, step: Step, batch: Batch) -> Weights:
        decay = alpha(batch)
        own = task.track(target.stats, step.teacher_stats) if step.teacher_stats != () else target.stats
        stats = jax.tree.map(lambda mine, other: jnp.where(decay > 0, mine, other), own, online.stats)
        return Weights(ema.update(target.params, online.params, decay), stats)

    return follow


def with_statistics(task: Task, server: Server, state: ServerState, data: ServerData) -> ServerState:
    """Every network with static batch-norm statistics of its own, where the task uses them."""

    def renew(network: Weights) -> Weights:
        return server_side.with_statistics(task, server.static_norm, network, data)

    paired = isinstance(state.weights.params, Networks)
    weights = join(*map(renew, networks(state.weights))) if paired else renew(state.weights)
    return state._replace(weights=weights)
