"""FedSiam-D's layers: what its clients send besides both networks' updates, and which layers of them the server takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.method import Aggregate, ClientOutput
from fedjax_ssl.methods import server as server_side
from fedjax_ssl.methods.mean_teacher import Networks, networks
from fedjax_ssl.methods.server import ServerState
from fedjax_ssl.methods.task import Weights
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.ssl import siamese

PyTree = Any


class Upload(NamedTuple):
    """What a client of D returns.

    Attributes:
        weights: the update of both networks; which layers of the online network's are taken is the server's choice.
        distances: float32 [J], FSM.
    """

    weights: Weights
    distances: jax.Array


def init(state: ServerState, rounds: int, cohort_size: int) -> ServerState:
    """A server whose window over the distances of so many rounds is empty."""
    return state._replace(own=siamese.empty_window(rounds, cohort_size, len(siamese.layers(state.weights.params.online))))


def with_distances(output: ClientOutput, trained: Networks) -> ClientOutput:
    """What a client of D returns: FSM too. The bytes that it sends are the server's to count, once layers are chosen."""
    metrics = {name: metric for name, metric in output.metrics.items() if name != "comm/bytes_up"}
    distances = siamese.layer_distances(trained.target.params, trained.online.params)
    return output._replace(update=Upload(output.update, distances), metrics=metrics)


def choose(
    state: ServerState, stacked: Aggregate, tau: jax.Array, *, round: jax.Array, both_travel: jax.Array
) -> tuple[ServerState, Aggregate, Metrics]:
    """D's aggregation: which online layers are uploaded, the target's in place of the others, and the weighted mean (Eq. 2).

    Args:
        state: the server, with the weights that it sent.
        stacked: Upload with leading axis M, and the weights [M]; a client of weight 0 counts nowhere.
        tau: float32 scalar, the share of the online networks' layers to upload.
        round: int32 scalar, from 0.
        both_travel: bool scalar; where one network travels there are no distances, and tau is 0.

    Returns:
        The state with the new window, the aggregate of both networks, and what was sent.
    """
    update, distances = stacked.update
    took_part = stacked.weight > 0
    window = siamese.remember(state.own, round, distances, took_part & both_travel)
    chosen = siamese.uploaded(distances, siamese.boundary(window, tau), tau)
    online = networks(state.weights).online
    names = siamese.layers(online.params)

    def fill(sent: Networks, update: Networks) -> Networks:
        # Updates are sent - local: with the target's local value in place of the online one, sent.online - local target.
        instead = jax.tree.map(lambda online, target, u: online - target + u, sent.online, sent.target, update.target)
        return Networks(siamese.select_layers(names, chosen, update.online, instead), update.target)

    stats_travel = update.stats != ()
    stats = fill(state.weights.stats, update.stats) if stats_travel else ()
    filled = Weights(fill(state.weights.params, update.params), stats)
    sizes = siamese.layer_bytes(names, *(online if stats_travel else (online.params,)))
    sent = sizes.sum() + jnp.sum(jnp.where(chosen, sizes, 0), axis=1) + jnp.where(both_travel, num_bytes(distances[0]), 0)
    metrics: Metrics = {
        "client/upload_fraction": mean(chosen, jnp.broadcast_to(took_part[:, None], chosen.shape)),
        "comm/bytes_up": Sum(sent.astype(jnp.int32)),
    }
    return state._replace(own=window), server_side.mean_of_stack(Aggregate(filled, stacked.weight)), metrics
