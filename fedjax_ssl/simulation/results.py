"""A round's metrics as numbers, and the evaluation of the global model."""

import logging

import jax
import jax.numpy as jnp

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import Pool
from fedjax_ssl.method import Cohort, Method
from fedjax_ssl.metrics import Mean, Metrics, mean, reduce
from fedjax_ssl.simulation.execution import CLIENTS, Execution
from fedjax_ssl.simulation.round import FAULT, FAULTS
from fedjax_ssl.ssl import losses

Row = dict[str, float]
_log = logging.getLogger(__name__)


def report(cohort: Cohort, metrics: Metrics, label: str | None = "") -> Row:
    """A round's metrics as Python numbers.

    The log names clients that were left out, and a round in which nobody took part. It calls the run `label`; None: no log.
    """
    metrics = dict(metrics)
    faults = metrics.pop(FAULT).total
    row = reduce(metrics)
    where = f"{label}, round {cohort.round + 1}" if label else f"round {cohort.round + 1}"
    if label is not None:
        for client, fault in zip(cohort.ids, faults, strict=True):
            if fault:
                why = ", ".join(name for bit, name in enumerate(FAULTS) if fault >> bit & 1)
                _log.warning("%s: client %d was left out: NaN, infinity or less than 0 in %s", where, client, why)
        if row.get("client/participants") == 0:
            _log.warning("%s: no client took part, so that there was nothing to average", where)
    return row


def evaluate(method: Method, server: PyTree, test: Pool, execution: Execution) -> Metrics:
    """Accuracy (fraction) and mean cross-entropy (nats) of the global model on a pool of labeled images."""
    (n,) = test.labels.shape
    size, devices = min(execution.batch_size, n), execution.devices
    first, *_ = method.predict
    names = {name: "eval/accuracy" if name == first else f"eval/accuracy_{name}" for name in method.predict}
    # Devices share the batches; those past the end are empty.
    start = jax.lax.axis_index(CLIENTS) if devices > 1 else 0

    def step(s: jax.Array, total: dict[str, Mean]) -> dict[str, Mean]:
        batch = batching.in_order(start + s * devices, jnp.int32(n), n, size)
        images, labels = test.images[batch.positions], test.labels[batch.positions]
        logits = {name: predict(server, images, batch.mask) for name, predict in method.predict.items()}
        new = {names[name]: mean(jnp.argmax(x, axis=-1) == labels, batch.mask) for name, x in logits.items()}
        new["eval/loss"] = mean(losses.cross_entropy(logits[first], labels), batch.mask)
        return jax.tree.map(jnp.add, total, new)

    zero = Mean(jnp.zeros(()), jnp.zeros(()))
    total = jax.lax.fori_loop(0, -(-n // (size * devices)), step, dict.fromkeys((*names.values(), "eval/loss"), zero))
    return jax.lax.psum(total, CLIENTS) if devices > 1 else total
