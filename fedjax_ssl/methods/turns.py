"""Local training of two parts of the parameters in turns: in every step one on labeled examples, then one on unlabeled ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.data import batching
from fedjax_ssl.methods import local, passes, steps
from fedjax_ssl.methods.local import Gradient, Trained, Training
from fedjax_ssl.methods.task import Task, Weights
from fedjax_ssl.metrics import Metrics

PyTree = Any


def train(
    task: Task,
    training: Training,
    gradients: tuple[Gradient, Gradient],
    start: tuple[Weights, tuple[PyTree, ...]],
    schedule: batching.PairedSchedule,
    *,
    learning_rate: jax.Array,
    key: jax.Array,
) -> Trained:
    """Runs `schedule.steps` steps of two turns, w_i <- w_i - lr direction_i(gradient_i); the second sees what the first did.

    Args:
        task: the network.
        training: optimizer, labeled batch size and FedProx's mu.
        gradients: of the first part on a labeled batch, and of the second on an unlabeled one: (weights whose params are both
            parts as a tuple, batch, key) -> Step. The names of their metrics differ.
        start: (weights whose params are both parts as a tuple, kept optimizer states of both).
        schedule: the pairs of batches.
        learning_rate: float32 scalar.
        key: PRNG key; step s draws from fold_in(key, s), split in two.

    Returns:
        Trained, its params and its kept optimizer states tuples as in `start`.
    """
    weights, kept = start
    anchors = weights.params

    def turns(s: jax.Array, trained: Trained) -> Trained:
        """One step, with its own metrics alone."""
        pair = batching.take_pair(schedule, s, training.batch_size)
        (parts, stats), states, metrics = trained.weights, list(trained.kept), dict[str, Any]()
        for i, turn_key in enumerate(jax.random.split(jax.random.fold_in(key, s))):
            result = gradients[i](Weights(parts, stats), pair[i], turn_key)
            result = local.proximal(training, result, parts[i], anchors[i])
            (part, stats), states[i] = local.descend(task, training, Weights(parts[i], stats), states[i], result, learning_rate)
            parts = (*parts[:i], part, *parts[i + 1 :])
            metrics |= result.metrics
        return Trained(Weights(parts, stats), tuple(states), metrics, trained.images + pair.real)

    def step(s: jax.Array, trained: Trained) -> Trained:
        new = turns(s, trained)
        return new._replace(metrics=jax.tree.map(jnp.add, trained.metrics, new.metrics))

    states = tuple(training.resume(state, part) for state, part in zip(kept, anchors, strict=True))
    begun = Trained(weights, states, {}, jnp.zeros((), jnp.int32))
    first, of_step = passes.count(turns, jnp.int32(0), begun)
    metrics: Metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first.metrics)
    end = steps.repeat(schedule, step, begun._replace(metrics=metrics), unrolled=training.unrolled)
    end = end._replace(passes=of_step.times(schedule.steps))
    return end if training.persistent else end._replace(kept=kept)
