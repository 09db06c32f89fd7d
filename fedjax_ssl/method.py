"""The contract: what a federated semi-supervised method is, and what it is handed.

A method is a value: a NamedTuple of pure functions, as an optax transformation is. It never sees a config, a file, a device or
a loop over clients. `fedjax_ssl.simulation` maps its `client_update` over the cohort (vmap, scan, chunks or devices).

Axis letters used everywhere: R runs, K clients in all, M clients in a round's cohort, N pooled examples, n examples of the
largest client, S local steps, B batch, C classes, H W ch of an image, D devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import Array, Examples
from fedjax_ssl.metrics import Metrics

PyTree = Any
Key = jax.Array


class DataSpec(NamedTuple):
    """Static facts about the data and the cohort, which shape a method's state.

    Attributes:
        image_shape: of one network input: (H, W, ch), or (D,) for text features.
        num_classes: C.
        num_clients: K.
        cohort_size: M.
        client_rows: n, rows of a client's table of unlabeled examples, for methods that keep a value for each of them.
    """

    image_shape: tuple[int, ...]
    num_classes: int
    num_clients: int
    cohort_size: int
    client_rows: int = 1


class Cohort(NamedTuple):
    """Who takes part in which round.

    Attributes:
        ids: int32 [M], client ids, without repetition.
        round: int32 scalar, the round's number, counted from 0.
        rounds: how many rounds the run has.
    """

    ids: Array
    round: Array
    rounds: Array | int = 1


class Shard(NamedTuple):
    """One client's data, as `client_update` receives it.

    Attributes:
        labeled: the client's labeled examples (count 0 where the labels are at the server).
        unlabeled: the client's unlabeled examples; their `labels` are None.
        true_labels: int32 [n], of the rows of `unlabeled`. For diagnostics and the oracle ablation alone: they must not reach
            an update (a test permutes them and compares the parameters).
    """

    labeled: Examples
    unlabeled: Examples
    true_labels: Array


class ServerData(NamedTuple):
    """What the server may read, in `prepare` and in `server_update`.

    Attributes:
        labeled: the server's labeled examples (count 0 where the labels are at the clients).
        unlabeled: every unlabeled example of the training pool, owned by a client or not. Needs `Requires.pool`.
        true_labels: int32 [n], of the rows of `unlabeled`, for diagnostics alone.
        next_cohort: all data, without labels, of the clients that take part in the round to come: `Examples` with leading axis
            M. Needs `Requires.next_cohort`.
        round: int32 scalar, the number of the round that ends, counted from 0; in `prepare` 0 as well.
        rounds: how many rounds the run has.
    """

    labeled: Examples
    unlabeled: Examples
    true_labels: Array
    next_cohort: Examples
    round: Array
    rounds: Array | int = 1


class ClientOutput(NamedTuple):
    """What one client returns.

    Attributes:
        update: pytree like the broadcast parameters: broadcast minus local, a pseudo-gradient for any optax optimizer.
        weight: float32 scalar >= 0, unnormalized aggregation weight; 0: the client takes no part.
        client_state: the client's new persistent state, structured as it was handed.
        metrics: name -> Mean or Sum of scalars.
    """

    update: PyTree
    weight: Array
    client_state: PyTree
    metrics: Metrics


class Aggregate(NamedTuple):
    """The cohort's updates, combined.

    Attributes:
        update: with the aggregator `sum`: sum_k weight_k update_k / sum_k weight_k, zeros where all weights are 0. With
            `stack`: the updates with leading axis M.
        weight: float32: sum_k weight_k (`sum`), or the weights [M] (`stack`).
    """

    update: PyTree
    weight: jax.Array


class Requires(NamedTuple):
    """What a method reads, and where it can run.

    Attributes:
        labels_at: where labels may be: `server`, `clients` or both.
        clients: whether clients take part at all; without, the server trains alone.
        next_cohort: whether the server reads `ServerData.next_cohort`.
        pool: whether the server reads `ServerData.unlabeled`, the images of the whole pool.
        all_states: whether `broadcast` reads the states of all clients; else it is handed None where they stay on the host.
        server_training: when the server can train on labels: `after` the average, or in `parallel` with the clients.
    """

    labels_at: tuple[str, ...] = ("server",)
    clients: bool = True
    next_cohort: bool = False
    pool: bool = False
    all_states: bool = False
    server_training: tuple[str, ...] = ("after",)


def weighted_sum(updates: jax.Array, weights: jax.Array) -> jax.Array:
    """sum_k weights_k updates_k over the leading axis; a client of weight 0 may hold NaN."""
    weights = weights.reshape(-1, *[1] * (updates.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * updates, 0.0), axis=0)


def no_preparation(server: PyTree, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
    """The default of `Method.prepare`: the server does nothing before round 1."""
    return server, {}


class Method(NamedTuple):
    """A federated method, as pure functions that the simulation jits, maps and shards.

    Attributes:
        init: (key, DataSpec) -> (server, clients). `clients` is `()` or a pytree with leading axis K.
        broadcast: (server, clients, Cohort) -> (shared, own): what every client receives alike, and a pytree with leading
            axis M (or `()`) that differs from client to client.
        client_update: (shared, own, client_state, Shard, key) -> ClientOutput, written for one client.
        server_update: (server, Aggregate, ServerData, key) -> (server, metrics).
        predict: name -> (server, images uint8 [B, H, W, ch] or features float32 [B, V, D], mask bool [B], which of them are
            real) -> logits float32 [B, C]. The first is the model that is evaluated (`eval/accuracy`); each other one is
            logged as `eval/accuracy_<name>`.
        requires: what the method reads, and where it can run.
        prepare: (server, ServerData, key) -> (server, metrics): the server's work before round 1.
        aggregator: `sum`, a weighted mean that streams over chunks of clients, or `stack`, which needs all updates at once.
    """

    init: Callable[[Key, DataSpec], tuple[PyTree, PyTree]]
    broadcast: Callable[[PyTree, PyTree, Cohort], tuple[PyTree, PyTree]]
    client_update: Callable[[PyTree, PyTree, PyTree, Shard, Key], ClientOutput]
    server_update: Callable[[PyTree, Aggregate, ServerData, Key], tuple[PyTree, Metrics]]
    predict: Mapping[str, Callable[[PyTree, jax.Array, jax.Array], jax.Array]]
    requires: Requires = Requires()
    prepare: Callable[[PyTree, ServerData, Key], tuple[PyTree, Metrics]] = no_preparation
    aggregator: str = "sum"
