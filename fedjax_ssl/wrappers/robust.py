"""Faulty clients, and averages that withstand them: each changes any method from outside, without touching its code."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Float32

from fedjax_ssl.arrays import Array, Count, Key, Number, PyTree, check_update
from fedjax_ssl.local.optimizers import is_on
from fedjax_ssl.local.task import substream
from fedjax_ssl.method import Aggregate, ClientData, ClientOutput, Cohort, Method, ServerData, exchanged
from fedjax_ssl.metrics import Metrics

Updates = Float[Array, " M *shape"]
Present = Bool[Array, " M"]


class Faults(NamedTuple):
    """Which clients are faulty, and what they do."""

    share: Number  # of all clients: those with the highest ids
    fault: str  # `sign_flip`, `noise` or `labels`
    scale: Number = 1.0  # of the flipped update, or of the noise beside the update


def number_faulty(share: Number, num_clients: int) -> Number:
    """How many of all clients are faulty."""
    return jnp.round(share * num_clients)


def number_assumed(share: Number, present: Number) -> Count:
    """How many of the clients that are present are assumed faulty."""
    return jnp.floor(share * present + 1e-4).astype(jnp.int32)  # 0.3 times 10 is 3


def with_faulty_clients(method: Method, faults: Faults, *, num_clients: int, num_classes: int) -> Method:
    """The method with some clients that send something else than they should.

    With `sign_flip` a faulty client sends -scale times the parameters of its update. With `noise` it adds normal noise to them,
    whose norm is about scale times theirs. Batch-norm statistics stay, as a variance might become negative. With `labels` it
    trains on C - 1 - y in place of each label y of its own.
    """
    if not is_on(faults.share) or not method.requires.clients:
        return method

    def broadcast(server: PyTree, clients: PyTree, cohort: Cohort) -> tuple[PyTree, PyTree]:
        shared, per_client = method.broadcast(server, clients, cohort)
        return shared, (per_client, cohort.ids >= num_clients - number_faulty(faults.share, num_clients))

    def client_update(shared: PyTree, per_client: PyTree, state: PyTree, data: ClientData, key: Key) -> ClientOutput:
        own, is_faulty = per_client
        if faults.fault == "labels" and (labels := data.labeled.labels) is not None:
            wrong = jnp.where(is_faulty, num_classes - 1 - labels, labels)
            data = data._replace(labeled=data.labeled._replace(labels=wrong))
        output = method.client_update(shared, own, state, data, key)
        if faults.fault == "labels":
            return output
        params = method.parameters(output.update)
        if faults.fault == "noise":
            wrong = _noisy(params, faults.scale, substream(key, "fault"))
        else:
            wrong = jax.tree.map(lambda x: (-faults.scale * x).astype(x.dtype), params)
        wrong = optax.tree.where(is_faulty, wrong, params)
        accepted = "0, or fault=labels, where a server computes the change of parameters from several that a client sends"
        refused = f"system.faulty: got {faults.share} with fault={faults.fault}, accepted: {accepted}"
        return output._replace(update=exchanged(output.update, params, wrong, refused))

    return method._replace(broadcast=broadcast, client_update=client_update)


def _noisy(update: PyTree, scale: Number, key: Key) -> PyTree:
    """The update plus normal noise, whose norm is about `scale` times that of the update."""
    leaves, structure = jax.tree.flatten(update)
    deviation = scale * optax.tree.norm(update) / jnp.sqrt(sum(x.size for x in leaves))
    keys = jax.random.split(key, len(leaves))
    noisy = [(x + deviation * jax.random.normal(k, x.shape)).astype(x.dtype) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def with_aggregation(method: Method, aggregation: str, assumed_faulty: Number) -> Method:
    """The method whose server gets another mean of the clients' updates: a key of AGGREGATIONS, or `mean`, its own.

    These give all clients that sent an update the same weight. ValueError where the method's server reads every update itself.
    """
    if aggregation == "mean" or not method.requires.clients:
        return method
    if method.aggregator != "sum":
        raise ValueError(
            f"server.aggregation: got {aggregation} with a method whose server reads every client's update, accepted: mean"
        )

    def client_update(shared: PyTree, per_client: PyTree, state: PyTree, data: ClientData, key: Key) -> ClientOutput:
        output = method.client_update(shared, per_client, state, data, key)
        if isinstance(output, ClientOutput):
            check_update(output.update, (shared, per_client))  # which is not checked where a server reads every update itself
        return output

    def server_update(server: PyTree, stacked: Aggregate, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
        present = stacked.weight > 0
        update = AGGREGATIONS[aggregation](method, stacked.update, present, assumed_faulty)
        is_there = jnp.any(present)
        update = jax.tree.map(lambda x, old: jnp.where(is_there, x, 0).astype(old.dtype), update, stacked.update)
        return method.server_update(server, Aggregate(update, jnp.sum(stacked.weight)), data, key)

    return method._replace(client_update=client_update, server_update=server_update, aggregator="stack")


def trimmed_mean(updates: Updates, present: Present, cut: Count) -> Float32[Array, "*shape"]:
    """The mean of each coordinate over the clients that are present, without its `cut` smallest and `cut` largest values."""
    shape = (-1, *[1] * (updates.ndim - 1))
    ordered = jnp.sort(jnp.where(present.reshape(shape), updates.astype(jnp.float32), jnp.inf), axis=0)  # absent ones last
    ranks, number = jnp.arange(len(present)), jnp.sum(present)
    kept = ((cut <= ranks) & (ranks < number - cut)).reshape(shape)
    return jnp.sum(jnp.where(kept, ordered, 0.0), axis=0) / jnp.maximum(number - 2 * cut, 1)


def _median(_: Method, updates: PyTree, present: Present, __: Number) -> PyTree:
    """The median of each coordinate: the mean of its middle value, or of the middle two (Yin et al. 2018, Definition 1)."""
    cut = jnp.maximum(jnp.sum(present) - 1, 0) // 2
    return jax.tree.map(lambda x: trimmed_mean(x, present, cut), updates)


def _trimmed_mean(_: Method, updates: PyTree, present: Present, faulty: Number) -> PyTree:
    """The mean of each coordinate without as many values at each end as clients are assumed faulty (ibid., Definition 2)."""
    cut = jnp.minimum(number_assumed(faulty, jnp.sum(present)), jnp.maximum(jnp.sum(present) - 1, 0) // 2)
    return jax.tree.map(lambda x: trimmed_mean(x, present, cut), updates)


def _krum(method: Method, updates: PyTree, present: Present, faulty: Number) -> PyTree:
    """The update whose n - f - 2 nearest others are nearest (Blanchard et al. 2017, section 4).

    Of n updates f are assumed faulty. The sum of the squared distances between parameters decides, of at least one other.
    """
    leaves = jax.tree.leaves(jax.vmap(method.parameters)(updates))
    flat = jnp.concatenate([x.reshape(len(present), -1).astype(jnp.float32) for x in leaves], axis=1)
    squares = jax.lax.map(lambda row: jnp.sum(jnp.square(flat - row), axis=1), flat)  # row by row, for memory
    others = present[:, None] & present[None] & ~jnp.eye(len(present), dtype=bool)
    nearest = jnp.sort(jnp.where(others, squares, jnp.inf), axis=1)
    counted = jnp.arange(len(present)) < jnp.maximum(jnp.sum(present) - number_assumed(faulty, jnp.sum(present)) - 2, 1)
    is_other = jnp.arange(len(present)) < jnp.sum(present) - 1  # the rest of a row are no updates
    scores = jnp.sum(jnp.where(counted & is_other, nearest, 0.0), axis=1)
    scores = jnp.where(present, jnp.minimum(scores, jnp.finfo(jnp.float32).max), jnp.inf)  # a distance may overflow
    return jax.tree.map(lambda x: x[jnp.argmin(scores)], updates)


AGGREGATIONS: dict[str, Callable[[Method, PyTree, Present, Number], PyTree]] = {
    "median": _median,
    "trimmed_mean": _trimmed_mean,
    "krum": _krum,
}
