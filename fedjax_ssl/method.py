"""The contract: what a federated semi-supervised method is, and what it is handed.

A method is a value: a NamedTuple of pure functions, as an optax transformation is. It never sees a config, a file, a device or
a loop over clients. `fedjax_ssl.simulation` maps its `client_update` over the cohort (vmap, scan, chunks or devices).
The axis letters are those of `fedjax_ssl.arrays`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Shaped

from fedjax_ssl.arrays import Key, Logits, Mask, PyTree
from fedjax_ssl.data.federated import Array, Examples
from fedjax_ssl.metrics import ClientMetrics, Metrics

VIEWS = ("labeled", "weak", "strong")
"""The views of images that a method may train on."""
EVERYWHERE = ("server", "clients", "some_clients")
"""Where labels may be; with `some_clients`, some clients have labeled examples alone, and the others unlabeled ones alone."""


class DataSpec(NamedTuple):
    """Static facts about the data and the cohort, which shape a method's state."""

    image_shape: tuple[int, ...]  # of one network input: (H, W, ch), or (D,) for text features
    num_classes: int  # C
    num_clients: int  # K
    cohort_size: int  # M
    client_rows: int = 1  # n, the most unlabeled examples of a client, for methods that keep a value for each example
    labeled_cohort: int = 0  # how many of a round's clients have labels; 0: left to chance


class Cohort(NamedTuple):
    """Who takes part in which round."""

    ids: Array  # int32 [M], client ids, without repetition
    round: Array  # int32 scalar, the round's index, counted from 0
    rounds: Any = None  # int or int32 scalar, how many rounds the run has; None unless `Requires.rounds`
    available: Array | None = None  # bool [M], which of these clients can be reached; None: all


class ClientData(NamedTuple):
    """One client's data, as `client_update` receives it.

    `true_labels` are only for diagnostics and for oracle options (methods run with true labels for comparison); otherwise they
    must not influence an update (a test permutes them and compares the parameters).
    """

    labeled: Examples  # count 0 where the labels are at the server
    unlabeled: Examples  # their `labels` are None
    true_labels: Array  # int32 [n], of the rows of `unlabeled`


class ServerData(NamedTuple):
    """What the server may read, in `prepare` and in `server_update`."""

    labeled: Examples  # count 0 where the labels are at the clients
    unlabeled: Examples  # all of the training pool, owned by a client or not; needs `Requires.pool`
    true_labels: Array  # int32 [n], of the rows of `unlabeled`, for diagnostics alone
    next_cohort: Examples  # all data [M, n], without labels, of the next round's clients; needs `Requires.next_cohort`
    round: Array  # int32 scalar, the index of the round that ends, counted from 0; it is 0 in `prepare`, too
    rounds: Any = None  # int or int32 scalar, how many rounds the run has; None unless `Requires.rounds`


class ClientOutput(NamedTuple):
    """What one client returns."""

    update: PyTree  # broadcast minus local, a pseudo-gradient for any optax optimizer, as `local.Task.update` makes it
    weight: Array  # float32 scalar >= 0, unnormalized aggregation weight; a client of weight 0 is left out and sends nothing
    client_state: PyTree  # the client's new persistent state, with the structure of the old one
    metrics: ClientMetrics  # name -> Mean or Sum of scalars, or PerClient, which `diagnostics.clients_every` records


class Aggregate(NamedTuple):
    """The cohort's updates: their weighted mean for the aggregator `sum`, or all of them, with leading axis M, for `stack`."""

    update: PyTree  # `sum`: sum_k weight_k update_k / sum_k weight_k, zeros where all weights are 0
    weight: Float32[Array, "*M"]  # sum_k weight_k (`sum`), or the weights [M] (`stack`)


class Requires(NamedTuple):
    """Which data a method reads, and where labels may be."""

    labels_at: tuple[str, ...] = ("server",)  # where labels may be: some of EVERYWHERE
    clients: bool = True  # whether clients take part at all; if not, the server trains alone
    next_cohort: bool = False  # whether the server reads `ServerData.next_cohort`
    pool: bool = False  # whether the server reads `ServerData.unlabeled`, the images of the whole pool
    rounds: bool = False  # whether the method reads `Cohort.rounds` or `ServerData.rounds`; if so, a run cannot be prolonged
    all_states: bool = False  # whether `broadcast` reads the states of all clients; if not, it gets None in their place
    server_training: tuple[str, ...] = ("after",)  # when the server can train: `after` averaging, or in `parallel` with clients
    views: tuple[str, ...] = VIEWS  # the views that clients train on; a server that has labels always trains on `labeled` ones


def weighted_sum(updates: Float[Array, " M *shape"], weights: Float32[Array, " M"]) -> Float[Array, "*shape"]:
    """sum_k weights_k updates_k over the leading axis; a client of weight 0 may hold NaN."""
    weights = weights.reshape(-1, *[1] * (updates.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * updates, 0.0), axis=0)


def summed(stacked: Aggregate | ClientOutput) -> Aggregate:
    """The sums of weighted updates and of weights over the leading axis."""
    total = jax.tree.map(lambda u: weighted_sum(u, stacked.weight), stacked.update)
    return Aggregate(total, jnp.sum(stacked.weight))


def averaged(total: Aggregate) -> Aggregate:
    """The weighted mean of updates, from the sums; zeros where all weights are 0."""
    safe = jnp.where(total.weight > 0, total.weight, 1.0)
    return Aggregate(jax.tree.map(lambda x: (x / safe).astype(x.dtype), total.update), total.weight)


def parameters_of(update: PyTree) -> PyTree:
    """The parameters in an update: its field `params`, as in a `local.Weights`; without such a field, the whole update."""
    return getattr(update, "params", update)


def exchanged(tree: PyTree, old: PyTree, new: PyTree, otherwise: str) -> PyTree:
    """The tree with the arrays of `new` in place of those of `old`, which are arrays of the tree itself.

    ValueError with the text `otherwise` where one of `old` is no array of the tree, but computed from some.
    """
    found = {id(x): y for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)}
    if not found.keys() <= {id(x) for x in jax.tree.leaves(tree)}:
        raise ValueError(otherwise)
    return jax.tree.map(lambda x: found.get(id(x), x), tree)


class Method(NamedTuple):
    """A federated method, as pure functions that the simulation jits, maps and shards.

    Attributes:
        init: (key, DataSpec) -> (server, clients). `clients` is `()` or a pytree with leading axis K.
        broadcast: (server, clients, Cohort) -> (shared, per_client): what every client receives alike, and a pytree with
            leading axis M (or `()`) that differs from client to client. `clients` is None unless `Requires.all_states`.
        client_update: (shared, per_client, client_state, ClientData, key) -> ClientOutput, written for one client.
        server_update: (server, Aggregate, ServerData, key) -> (server, metrics).
        predict: name -> (server, images uint8 [B, H, W, ch] or features float32 [B, V, D], mask bool [B] of the real ones)
            -> logits float32 [B, C]. The first function gives `eval/accuracy`; each other one gives `eval/accuracy_<name>`.
        requires: which data the method reads, and where labels may be.
        prepare: (server, ServerData, key) -> (server, metrics): the server's work before round 1; its metrics are logged with
            those of round 1. By default there is none.
        aggregator: `sum`, a weighted mean that streams over chunks of clients, or `stack`, which needs all updates at once.
        predict_client: name -> (server, client_state, images, mask) -> logits, as in `predict`, of one client's own model,
            which its state holds, and NaN where it holds none yet; `launch.evaluate --clients` evaluates it on the client's own
            test examples. By default there is none.
        parameters: a function from an update to the part of it that changes parameters, without batch-norm statistics, counts
            and whatever else a client sends. `client/update_norm` and `client/cosine` are computed from this part. By default
            `parameters_of`.
    """

    init: Callable[[Key, DataSpec], tuple[PyTree, PyTree]]
    broadcast: Callable[[PyTree, PyTree, Cohort], tuple[PyTree, PyTree]]
    client_update: Callable[[PyTree, PyTree, PyTree, ClientData, Key], ClientOutput]
    server_update: Callable[[PyTree, Aggregate, ServerData, Key], tuple[PyTree, Metrics]]
    predict: Mapping[str, Callable[[PyTree, Shaped[Array, " B *_"], Mask], Logits]]
    requires: Requires = Requires()
    prepare: Callable[[PyTree, ServerData, Key], tuple[PyTree, Metrics]] = lambda server, _data, _key: (server, {})
    aggregator: str = "sum"
    parameters: Callable[[PyTree], PyTree] = parameters_of
    predict_client: Mapping[str, Callable[[PyTree, PyTree, Shaped[Array, " B *_"], Mask], Logits]] = MappingProxyType({})
