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


def join(online: Weights, target: Weights) -> Weights:
    """Two networks as one `Weights`."""
    return Weights(Networks(online.params, target.params), Networks(online.stats, target.stats))


def is_pair(weights: Weights) -> bool:
    """Whether these are the weights of two networks."""
    return isinstance(weights.params, Networks)


def networks(weights: Weights) -> Networks:
    """The two networks' `Weights`; one network alone is its own target."""
    if not is_pair(weights):
        return Networks(weights, weights)
    return Networks(*(Weights(params, stats) for params, stats in zip(weights.params, weights.stats, strict=True)))


def follow(task: Task, target: Weights, online: Weights, batch_stats: PyTree, decay: Number) -> Weights:
    """The target after a step: theta_t <- alpha theta_t + (1 - alpha) theta_s, over parameters (FedSiam, Eqs. 3 and 9).

    `batch_stats` are the norm statistics of the target's own batch, `()` without one. `decay` is alpha in [0, 1); where it is 0
    the target is the online network, with its statistics.
    """
    own = task.update_stats(target.stats, batch_stats) if batch_stats != () else target.stats
    stats = jax.tree.map(lambda mine, other: jnp.where(decay > 0, mine, other), own, online.stats)
    return Weights(ema.update(target.params, online.params, decay), stats)
