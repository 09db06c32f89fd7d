"""The contract: what a federated semi-supervised method is, and what it is handed.

A method is a value: a NamedTuple of pure functions, as an optax transformation is. It never sees a config, a file, a device
or a loop over clients; `fedjax_ssl.simulation` maps its `client_update` over the cohort (vmap, scan, chunks or shard_map).

Axis letters used everywhere: K clients in all, M clients in a round's cohort, N pooled examples, n examples of the largest
client, S local steps, B batch, C classes, H W ch of an image, D devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import Array, Examples
from fedjax_ssl.metrics import Metrics

PyTree = Any
Key = jax.Array


class DataSpec(NamedTuple):
    """The static facts about the data that shape a method's state.

    Attributes:
        image_shape: of one of the network's inputs: (H, W, ch), or (D,) for features of texts.
        num_classes: C.
        num_clients: K.
        client_rows: n, rows of a client's table of unlabeled examples, for methods that keep something for each of them.
    """

    image_shape: tuple[int, ...]
    num_classes: int
    num_clients: int
    client_rows: int = 1


class Cohort(NamedTuple):
    """Who takes part in which round.

    Attributes:
        ids: int32 [M], client ids, without repetition.
        round: int32 scalar, the round's number, counted from 0.
    """

    ids: Array
    round: Array


class Shard(NamedTuple):
    """One client's data, as `client_update` receives it.

    Attributes:
        labeled: the client's labeled examples (count 0 where the labels are at the server).
        unlabeled: the client's unlabeled examples; their `labels` are None.
        truth: int32 [n], true labels of `unlabeled`'s rows. For diagnostics and for the oracle ablation alone: no
            method may let them reach an update otherwise (a test permutes them and compares the parameters).
    """

    labeled: Examples
    unlabeled: Examples
    truth: Array


class ServerData(NamedTuple):
    """What the server may read, in `prepare` and in `server_update`.

    Attributes:
        labeled: the server's labeled examples (count 0 where the labels are at the clients).
        unlabeled: every unlabeled example of the training pool, owned by a client or not.
        truth: their labels int32 [n], for diagnostics only.
        next_cohort: `Examples` with leading axis M, without labels: all data, labeled and not, of the clients that take part in
            the round to come (its static batch-norm statistics are theirs in (FL)^2, Appendix E).
        round: int32 scalar, the round being finished, counted from 0; in `prepare` 0 as well.
    """

    labeled: Examples
    unlabeled: Examples
    truth: Array
    next_cohort: Examples
    round: Array


class ClientOutput(NamedTuple):
    """What one client returns.

    Attributes:
        update: pytree like the broadcast parameters: broadcast minus local, a pseudo-gradient for any optax optimizer.
        weight: float32 scalar >= 0, unnormalized aggregation weight; 0 means that the client takes no part.
        client_state: the client's new persistent state (same structure as it was handed).
        metrics: name -> Mean or Sum of scalars.
    """

    update: PyTree
    weight: Array
    client_state: PyTree
    metrics: Metrics


class Aggregate(NamedTuple):
    """The cohort's updates, combined.

    Attributes:
        update: for the aggregator `sum`: sum_k weight_k update_k / sum_k weight_k, zeros where all weights are 0. For
            `stack`: the updates with leading axis M.
        weight: float32: sum_k weight_k (`sum`) or the weights [M] (`stack`).
    """

    update: PyTree
    weight: jax.Array


def weighted_sum(updates: jax.Array, weights: jax.Array) -> jax.Array:
    """sum_k weights_k updates_k over the leading axis; a client of weight 0 may hold NaN."""
    weights = weights.reshape(-1, *[1] * (updates.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * updates, 0.0), axis=0)


def _no_preparation(server: PyTree, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
    return server, {}


class Method(NamedTuple):
    """A federated method, as pure functions that the simulation jits, maps and shards.

    Attributes:
        init: (key, DataSpec) -> (server, clients). `clients` is `()` or a pytree with leading axis K.
        broadcast: (server, clients, Cohort) -> (shared, per_client): what goes down to every client alike, and a pytree
            with leading axis M (or `()`) that differs from client to client.
        client_update: (shared, own, client_state, Shard, key) -> ClientOutput, written for one client.
        server_update: (server, Aggregate, ServerData, key) -> (server, metrics).
        predict: (server, images uint8 [B, H, W, ch] or features float32 [B, V, D], mask bool [B], which of them are real) ->
            logits float32 [B, C]: the model that is evaluated.
        predict_also: name -> another `predict`, whose accuracy is logged as `eval/accuracy_<name>`.
        prepare: (server, ServerData, key) -> (server, metrics): the server's work before round 1, run once.
        aggregator: `sum` (a weighted mean that streams over chunks of clients) or `stack` (needs all updates at once).
        labels_at: where it can read labels: `server`, `clients`, or both; other scenarios are refused.
        server_training: when its server can train on labels: `after` the clients are averaged, or in `parallel` with them.
        host_data: whether training images and client states may stay on the host, and only the cohort's be fetched: not where
            `broadcast` reads the states of clients, or the server the whole pool's images.
        next_cohort: whether its server reads `ServerData.next_cohort`; where not, and images stay on the host, those are not
            fetched, and it is None.
    """

    init: Callable[[Key, DataSpec], tuple[PyTree, PyTree]]
    broadcast: Callable[[PyTree, PyTree, Cohort], tuple[PyTree, PyTree]]
    client_update: Callable[[PyTree, PyTree, PyTree, Shard, Key], ClientOutput]
    server_update: Callable[[PyTree, Aggregate, ServerData, Key], tuple[PyTree, Metrics]]
    predict: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
    predict_also: Mapping[str, Callable[[PyTree, jax.Array, jax.Array], jax.Array]] = MappingProxyType({})
    prepare: Callable[[PyTree, ServerData, Key], tuple[PyTree, Metrics]] = _no_preparation
    aggregator: str = "sum"
    labels_at: tuple[str, ...] = ("server",)
    server_training: tuple[str, ...] = ("after",)
    host_data: bool = True
    next_cohort: bool = True
