"""Two networks that train as one: an online network by gradient steps, and a target, its moving average.

A pair is a `Weights` whose two fields are Networks, so that it is broadcast, subtracted and averaged as one network is.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.arrays import Number, PyTree
from fedjax_ssl.local.task import Task, Weights
from fedjax_ssl.ssl import ema


class Networks(NamedTuple):
    """The weights, parameters or statistics of both networks."""

    online: PyTree
    target: PyTree


def join(online: Weights, *target: Weights) -> Weights:
    """Two networks as one `Weights`, or one network as it is."""
    return Weights(*map(Networks, online, *target)) if target else online


def each(weights: Weights) -> tuple[Weights, ...]:
    """The `Weights` of the online network and of the target, or those of one network alone."""
    return tuple(map(Weights, *weights)) if isinstance(weights.params, Networks) else (weights,)


def follow(task: Task, target: Weights, online: Weights, batch_stats: PyTree, decay: Number) -> Weights:
    """The target after a step: theta_t <- alpha theta_t + (1 - alpha) theta_s, over parameters (FedSiam, Eqs. 3 and 9).

    `batch_stats` are the norm statistics of the target's own batch, `()` without one. `decay` is alpha in [0, 1); where it is 0
    the target is the online network, with its statistics.
    """
    own = task.update_stats(target.stats, batch_stats) if batch_stats != () else target.stats
    stats = jax.tree.map(lambda mine, other: jnp.where(decay > 0, mine, other), own, online.stats)
    return Weights(ema.update(target.params, online.params, decay), stats)
