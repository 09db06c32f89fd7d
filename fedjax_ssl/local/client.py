"""What clients of several methods have in common: whom they train on, how much they weigh, what they report."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.local.task import Task
from fedjax_ssl.local.training import Trained
from fedjax_ssl.method import Shard
from fedjax_ssl.metrics import Metrics, Sum, num_bytes

PyTree = Any


def trainable(accepted: jax.Array, mask: jax.Array, batches: str) -> jax.Array:
    """Which examples local batches are drawn from: bool [n].

    Args:
        accepted: bool [n], examples whose pseudo-label is accepted.
        mask: bool [n], real examples.
        batches: `all` real examples, or the `accepted` ones. A client that accepts nothing draws from none and so takes no
            step: it returns the model that it received.
    """
    return accepted if batches == "accepted" else mask & jnp.any(accepted)


def data_weight(task: Task, shard: Shard) -> jax.Array:
    """A client's aggregation weight by its data, float32 scalar; 0 where it has none.

    Where clients hold labels: |D_s| + |D_u| (FedAvg, FedDure). Where the server alone does: 1, a uniform average, which is what
    the methods with labels at the server do ((FL)^2's baselines, SemiFL, FedMatch, FedCon).
    """
    count = shard.labeled.count + shard.unlabeled.count
    return count.astype(jnp.float32) if "clients" in task.labels_at else jnp.where(count > 0, 1.0, 0.0)


def client_metrics(trained: Trained, *, down: PyTree, up: PyTree, sends: jax.Array | bool = True) -> Metrics:
    """A client's metrics: its steps' (under `client/`, unless their name has a group), bytes received and sent, images.

    Args:
        trained: its training.
        down: the arrays it received.
        up: the arrays it sends.
        sends: bool scalar, whether it sends them at all.
    """
    return {
        **{name if "/" in name else f"client/{name}": value for name, value in trained.metrics.items()},
        "comm/bytes_down": Sum(jnp.int32(num_bytes(down))),
        "comm/bytes_up": Sum(jnp.where(sends, jnp.int32(num_bytes(up)), 0)),
        "perf/client_images": Sum(trained.images),
    }
