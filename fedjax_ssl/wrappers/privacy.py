"""Differential privacy of clients, with any method whose server averages, without a change of its code (McMahan et al. 2018).

A client's data stay hidden from whoever sees only the models of all rounds, not from whoever sees the updates: the server is
trusted. What a run logs of its clients, such as losses, is computed from their data without noise and is not private.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.arrays import Key, Number, PyTree
from fedjax_ssl.local.optimizers import is_on
from fedjax_ssl.local.task import substream
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, Method, ServerData
from fedjax_ssl.metrics import Metrics, mean

METRIC = "client/clipped"


def with_privacy(method: Method, clip: Number, noise: Number, cohort_size: int) -> Method:
    """The method whose clients send updates of a norm of at most S = `clip`, to the mean of which noise is added.

        d = 1/M (sum_k u_k min(1, S / ||u_k||) + N(0, (z S)^2))

    The norm is over all arrays of an update, z is `noise`, and M is `cohort_size`, also where fewer clients take part. All
    clients count alike, whatever weights the method gives them; one whose update is not finite does not count. ValueError for a
    method whose server reads every update and, while tracing, for one whose clients send more than changes of parameters.
    """
    if not is_on(clip) or not method.requires.clients:
        return method
    if method.aggregator != "sum":
        raise ValueError(f"privacy.clip: got {clip}, accepted: 0 with a method whose server reads every client's update")

    def client_update(shared: PyTree, per_client: PyTree, state: PyTree, data: ClientData, key: Key) -> ClientOutput:
        output = method.client_update(shared, per_client, state, data, key)
        if len(jax.tree.leaves(method.parameters(output.update))) < len(jax.tree.leaves(output.update)):
            accepted = "0 where clients send more than changes of parameters, such as counts or running batch-norm statistics"
            raise ValueError(f"privacy.clip: got {clip}, accepted: {accepted}")
        norm = optax.tree.norm(output.update)
        counts = (output.weight > 0) & jnp.isfinite(norm)
        factor = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
        update = jax.tree.map(lambda x: jnp.where(counts, factor * x, 0.0).astype(x.dtype), output.update)
        metrics = {**output.metrics, METRIC: mean(norm > clip, counts)}
        return output._replace(update=update, weight=jnp.where(counts, 1.0, 0.0), metrics=metrics)

    def server_update(server: PyTree, aggregate: Aggregate, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
        leaves, structure = jax.tree.flatten(aggregate.update)
        keys = jax.random.split(substream(key, "privacy"), len(leaves))

        def noisy(x: jax.Array, key: Key) -> jax.Array:
            total = aggregate.weight * x + noise * clip * jax.random.normal(key, x.shape)
            return (total / cohort_size).astype(x.dtype)

        update = jax.tree.unflatten(structure, [noisy(x, k) for x, k in zip(leaves, keys, strict=True)])
        return method.server_update(server, aggregate._replace(update=update), data, key)

    return method._replace(client_update=client_update, server_update=server_update)
