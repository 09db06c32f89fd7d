"""A round's metrics as numbers, and the evaluation of the global model."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import Pool, Table
from fedjax_ssl.method import Cohort, Method
from fedjax_ssl.metrics import ClientMetrics, Mean, PerClient, Sum, mean, reduce, values
from fedjax_ssl.simulation.execution import CLIENTS, Execution
from fedjax_ssl.simulation.round import FAULT, reason
from fedjax_ssl.ssl import losses

Row = dict[str, Any]
CLIENTS_KEY = "clients"  # of what is recorded of each client, in the row of a round that is recorded
_log = logging.getLogger(__name__)


def report(cohort: Cohort, metrics: ClientMetrics, label: str | None = "") -> Row:
    """A round's metrics as Python numbers; if clients were left out, FAULT has a dict, client id -> what was wrong, in bits.

    The log names clients that were left out, and a round in which nobody took part. `label` is the run's name there; None:
    nothing is logged.
    """
    metrics = dict(metrics)
    of_clients = metrics.pop(FAULT)
    assert isinstance(of_clients, Sum)
    row: Row = reduce(metrics)
    faults = {int(client): int(fault) for client, fault in zip(cohort.ids, of_clients.total, strict=True) if fault}
    if faults:
        row[FAULT] = faults
    where = f"{label}, round {cohort.round + 1}" if label else f"round {cohort.round + 1}"
    if label is not None:
        for client, fault in faults.items():
            _log.warning("%s: client %d was left out: %s", where, client, reason(fault))
        if row.get("client/participants") == 0:
            _log.warning("%s: no client took part, so that there was nothing to average", where)
    return row


def each_client(cohort: Cohort, metrics: ClientMetrics) -> dict[str, np.ndarray]:
    """What the clients of a recorded round did: arrays with leading axis M under the names of their metrics.

    They include `client/id` int32 [M]. Weights are normalized to a sum of 1, and a mean without weight is NaN.
    """
    columns: dict[str, np.ndarray] = {"client/id": np.asarray(cohort.ids, np.int32)}
    for name, metric in metrics.items():
        if name == FAULT or np.ndim(metric[0]) == 0:  # the server's metrics have no axis of clients
            continue
        if isinstance(metric, Mean):
            total, weight = np.asarray(metric.total), np.asarray(metric.weight)
            columns[name] = np.divide(total, weight, out=np.full(total.shape, np.nan, np.float32), where=weight != 0)
        else:
            columns[name] = np.asarray(metric.value if isinstance(metric, PerClient) else values(metric))
    weights = columns["client/weight"].astype(np.float64)
    columns["client/weight"] = (weights / (weights.sum() or 1.0)).astype(np.float32)
    return columns


def of_clients(method: Method, server: PyTree, pool: Pool, execution: Execution, table: Table) -> jax.Array:
    """Whether the global model is right on each client's own examples, bool [K, n]; False past the end of a client's row."""
    first, *_ = method.predict
    (clients, n), devices = table.index.shape, execution.devices
    is_real = jnp.arange(n) < table.count[:, None]
    order = jnp.argsort(~is_real.ravel(), stable=True)  # real ones first: there are as many batches as these fill
    number, size = jnp.sum(table.count), min(execution.batch_size, clients * n)
    start = jax.lax.axis_index(CLIENTS) if devices > 1 else 0

    def step(s: jax.Array, found: jax.Array) -> jax.Array:
        batch = batching.in_order(start + s * devices, number, clients * n, size)
        where = order[batch.positions]
        positions = table.index.ravel()[where]
        right = jnp.argmax(method.predict[first](server, pool.images[positions], batch.mask), axis=-1) == pool.labels[positions]
        return found.at[jnp.where(batch.mask, where, clients * n)].set(right.astype(jnp.uint8), mode="drop")

    found = jax.lax.fori_loop(0, -(-number // (size * devices)), step, jnp.zeros(clients * n, jnp.uint8))
    found = jax.lax.psum(found, CLIENTS) if devices > 1 else found
    return (found > 0).reshape(clients, n)


def evaluate(
    method: Method,
    server: PyTree,
    pool: Pool,
    execution: Execution,
    *,
    validation: Table | None = None,
    num_classes: int = 0,
) -> tuple[dict[str, Mean], jax.Array | None]:
    """Accuracy (fraction) and mean cross-entropy (nats) of the global model on a pool of labeled images.

    With a table `validation` only its examples of the pool are evaluated, and the metrics are called `eval/val_...`. With
    `num_classes` there are also the logits, float32 [N, C], otherwise None.
    """
    prefix, n = ("eval/", len(pool.labels)) if validation is None else ("eval/val_", validation.index.shape[1])
    count = n if validation is None else validation.count[0]
    size, devices = min(execution.batch_size, n), execution.devices
    first, *_ = method.predict
    names = {name: f"{prefix}accuracy" if name == first else f"{prefix}accuracy_{name}" for name in method.predict}
    # Devices share the batches; those past the end are empty.
    start = jax.lax.axis_index(CLIENTS) if devices > 1 else 0

    def step(s: jax.Array, found: tuple[dict[str, Mean], jax.Array | None]) -> tuple[dict[str, Mean], jax.Array | None]:
        total, kept = found
        batch = batching.in_order(start + s * devices, jnp.int32(count), n, size)
        positions = batch.positions if validation is None else validation.index[0, batch.positions]
        images, labels = pool.images[positions], pool.labels[positions]
        logits = {name: predict(server, images, batch.mask) for name, predict in method.predict.items()}
        new = {names[name]: mean(jnp.argmax(x, axis=-1) == labels, batch.mask) for name, x in logits.items()}
        new[f"{prefix}loss"] = mean(losses.cross_entropy(logits[first], labels), batch.mask)
        if kept is not None:
            kept = kept.at[jnp.where(batch.mask, batch.positions, n)].set(logits[first], mode="drop")
        return jax.tree.map(jnp.add, total, new), kept

    zero = Mean(jnp.zeros(()), jnp.zeros(()))
    nothing = dict.fromkeys((*names.values(), f"{prefix}loss"), zero), jnp.zeros((n, num_classes)) if num_classes else None
    found = jax.lax.fori_loop(0, -(-n // (size * devices)), step, nothing)
    return jax.lax.psum(found, CLIENTS) if devices > 1 else found  # a device has 0 as the logits of the others' examples
