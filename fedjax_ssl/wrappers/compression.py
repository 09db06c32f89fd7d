"""Compressed uploads, with any method and without a change of its code: quantized parameters, or the largest ones alone.

The part of an update that changes parameters (`Method.parameters`) is compressed; statistics and counts are sent as they are.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from fedjax_ssl.arrays import Array, Key, PyTree
from fedjax_ssl.data.federated import Examples
from fedjax_ssl.local.task import substream
from fedjax_ssl.method import ClientData, ClientOutput, Cohort, DataSpec, Method, exchanged
from fedjax_ssl.metrics import Sum, num_bytes

BITS = {"int8": 8, "int4": 4}
ENTRY = 8  # bytes of one of the largest values: a float32 and its int32 position


class Compressed(NamedTuple):
    """A client's state: the method's own, and what the client has not sent yet, in the structure of an update's parameters."""

    own: PyTree
    unsent: PyTree


def with_compression(method: Method, kind: str, share: float) -> Method:
    """The method whose clients send their parameters compressed, and whose `comm/bytes_up` counts what is sent.

    `int8` and `int4` round to multiples of max |x| / 127 or / 7 of a tensor, up or down at random, so that the mean is exact
    (QSGD, Alistarh et al. 2017). `topk` sends the `share` of values that are largest; a client adds what it did not send to its
    next update (error feedback, Stich et al. 2018). ValueError, as the method is traced, where clients do not count
    `comm/bytes_up`, or the change of parameters is computed from several that they send.
    """
    if kind == "none" or not method.requires.clients:
        return method
    keeps = kind == "topk"

    def init(key: Key, spec: DataSpec) -> tuple[PyTree, PyTree]:
        server, clients = method.init(key, spec)
        if not keeps:
            return server, clients
        update = jax.eval_shape(lambda: _one_update(method, server, clients, spec))
        unsent = jax.tree.map(lambda x: jnp.zeros((spec.num_clients, *x.shape), x.dtype), method.parameters(update))
        return server, Compressed(clients, unsent)

    def broadcast(server: PyTree, clients: PyTree, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return method.broadcast(server, clients.own if keeps and clients is not None else clients, cohort)

    def client_update(shared: PyTree, per_client: PyTree, state: PyTree, data: ClientData, key: Key) -> ClientOutput:
        own = state.own if keeps else state
        output = method.client_update(shared, per_client, own, data, key)
        params = method.parameters(output.update)
        if keeps:
            wanted = jax.tree.map(jnp.add, params, state.unsent)
            sent, size = largest(wanted, share)
            unsent = optax.tree.where(output.weight > 0, jax.tree.map(jnp.subtract, wanted, sent), state.unsent)
            output = output._replace(client_state=Compressed(output.client_state, unsent))
        else:
            sent, size = quantized(params, BITS[kind], substream(key, "compression"))
        metrics, up = dict(output.metrics), output.metrics.get("comm/bytes_up")
        if not isinstance(up, Sum):
            accepted = "none with a method whose clients do not count comm/bytes_up"
            raise ValueError(f"client.compression: got {kind}, accepted: {accepted}")
        metrics["comm/bytes_up"] = Sum(sent_bytes(up.total, num_bytes(output.update), num_bytes(params), size))
        accepted = "none where a server computes the change of parameters from several that a client sends"
        update = exchanged(output.update, params, sent, f"client.compression: got {kind}, accepted: {accepted}")
        return output._replace(update=update, metrics=metrics)

    def of_own(predict: Any) -> Any:
        return lambda server, state, *batch: predict(server, state.own, *batch)

    own = {name: of_own(predict) if keeps else predict for name, predict in method.predict_client.items()}
    return method._replace(init=init, broadcast=broadcast, client_update=client_update, predict_client=own)


def quantized(tree: PyTree, bits: int, key: Key) -> tuple[PyTree, int]:
    """Each tensor in steps of max |x| / (2^(bits - 1) - 1), rounded at random without bias, and the bytes that it takes.

    A tensor takes `bits` for each value, in whole bytes, and 4 bytes for its step.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, max(1, len(leaves)))

    def one(x: Float[Array, "*shape"], key: Key) -> Float[Array, "*shape"]:
        step = jnp.max(jnp.abs(x), initial=0.0) / (2 ** (bits - 1) - 1)
        safe = jnp.where(step > 0, step, 1.0)
        return (jnp.floor(x / safe + jax.random.uniform(key, x.shape)) * step).astype(x.dtype)

    rounded = [one(x, k) for x, k in zip(leaves, keys, strict=False)]
    return jax.tree.unflatten(structure, rounded), sum(math.ceil(x.size * bits / 8) + 4 for x in leaves)


def largest(tree: PyTree, share: float) -> tuple[PyTree, int]:
    """The tree with a share of its values, the largest ones by magnitude, and zeros elsewhere; the bytes that it takes."""
    flat, restored = ravel_pytree(tree)
    number = max(1, math.ceil(share * flat.size))
    _, places = jax.lax.top_k(jnp.abs(flat), number)
    return restored(jnp.zeros_like(flat).at[places].set(flat[places])), ENTRY * number


def sent_bytes(up: Array, update: int, params: int, size: int) -> Array:
    """The bytes that a client sends, from those that the method counts and those of its whole update and of its parameters.

    Where a method sends only a part of its parameters, that part takes the same share of its bytes as the whole would.
    """
    rest, part = update - params, up - (update - params)
    compressed = jnp.where(part == params, size, jnp.int32(part * (size / max(1, params))))
    return jnp.where(up > 0, rest + compressed, 0).astype(up.dtype)


def _one_update(method: Method, server: PyTree, clients: PyTree, spec: DataSpec) -> PyTree:
    """An update as a client would send it; only its shape has a meaning."""
    rounds = 1 if method.requires.rounds else None
    cohort = Cohort(jnp.arange(spec.cohort_size), jnp.int32(0), rounds)
    shared, per_client = method.broadcast(server, clients if method.requires.all_states else None, cohort)
    own, state = jax.tree.map(lambda x: x[0], (per_client, clients))
    images = jnp.zeros((1, *spec.image_shape), jnp.uint8) if len(spec.image_shape) > 1 else jnp.zeros((1, 2, *spec.image_shape))
    rows = jnp.zeros(max(1, spec.client_rows), jnp.int32)
    labeled, unlabeled = (Examples(images, rows, jnp.int32(1), labels) for labels in (rows, None))
    data = ClientData(labeled, unlabeled, rows)
    return method.client_update(shared, own, state, data, jax.random.key(0)).update
