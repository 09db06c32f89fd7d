"""FedSiam-D: Pi for some rounds, then MT whose clients upload chosen layers (`fedjax_ssl.methods.fedsiam` has the rest).

Clients send both networks' updates and the distances of their layers; the server says which of the online network's it takes.

The released code's curve and window are its own, which no option follows: its linear share falls from 1 in round 2 to .1 in
round 41 of 50 and stays there (Eq. 11's falls to 0 in the last round), and its boundary looks back on the last round, then on
all since the third, then on ten.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.local import Server, ServerState, Task, Training, Weights
from fedjax_ssl.local.networks import Networks, networks
from fedjax_ssl.local.server import mean_of_stack
from fedjax_ssl.method import Aggregate, ClientOutput, DataSpec, Method, ServerData
from fedjax_ssl.methods.choices import choice
from fedjax_ssl.methods.fedsiam import ClientState, FedSiamMTOptions, method_of
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.ssl import siamese

PyTree = Any


@dataclasses.dataclass(frozen=True)
class FedSiamDOptions(FedSiamMTOptions):
    """Settings of D, besides those of MT.

    Attributes:
        curve: of tau, the share of the online network's layers that is uploaded: `linear` (Eq. 11) or `rectangle` (Eq. 12).
        saved: mu in [0, 1], the share of the online network's layers that is saved over a run, but for what the curve cuts; the
            target's are always sent. What that is in bytes (`client/upload_bytes_fraction`) depends on the layers that are far
            from the target's, which may be the large ones.
        pi_rounds: phi_g: the first rounds, with one network; then the boundary looks back on as many rounds.
        end_round: varphi_g, of the rectangle: from this round on tau = 0. At least (1 - mu) R_G rounds after `pi_rounds`, so
            that tau does not have to be above 1; at most R_G + 1, so that the whole rectangle is within the run.
    """

    curve: str = choice("linear", "rectangle")
    saved: float = 0.5
    pi_rounds: int = 3
    end_round: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.saved <= 1:
            raise ValueError(f"method.saved: got {self.saved}, accepted: a number in [0, 1]")
        if self.pi_rounds < 0:
            raise ValueError(f"method.pi_rounds: got {self.pi_rounds}, accepted: a number >= 0")
        if self.curve == "rectangle" and self.end_round <= self.pi_rounds:
            raise ValueError(
                f"method.end_round: got {self.end_round}, accepted: a number > method.pi_rounds = {self.pi_rounds}"
            )


def fedsiam_d(*, task: Task, client: Training, server: Server, options: FedSiamDOptions = FedSiamDOptions()) -> Method:
    """FedSiam-D: Pi at first, then MT whose clients upload the layers of the online network that differ from the target's.

    Clients send the distances of all layers (FSM, Eq. 10); the (1 - tau)-quantile of those of the last rounds is the boundary
    under which a layer is not uploaded, and the target's stands in for it before averaging. Rounds with one network have no
    distances. `comm/bytes_up` counts the target, the chosen layers and the distances, `comm/bytes_down` both networks and the
    boundary. `client/upload_fraction` is the share of layers that is chosen, `client/upload_bytes_fraction` what is sent beside
    the target, in bytes of one network.

    Args:
        task: network and views.
        client: local training.
        server: as in `fedsiam_pi`.
        options: losses, the target's decay, and the share to upload.

    Returns:
        The method, as of `fedsiam_pi`.

    Raises:
        ValueError: the linear curve has no rounds after `pi_rounds`, or the rectangle too few for the share to upload, or it
            outlasts the run.
    """
    method = method_of(
        task,
        client,
        server,
        options,
        lambda number: jnp.where(number > options.pi_rounds, options.alpha_max, 0.0),
        with_distances,
    )

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, ClientState]:
        state, clients = method.init(key, spec)
        return with_window(state, max(options.pi_rounds, 1), spec.cohort_size), clients

    def server_update(state: ServerState, stacked: Aggregate, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        number = data.round + 1
        tau, both_travel = upload_share(options, data.rounds, number), number > options.pi_rounds
        state, aggregate, sent = choose(state, stacked, tau, round=data.round, both_travel=both_travel)
        state, metrics = method.server_update(state, aggregate, data, key)
        return state, {**metrics, **sent}

    return method._replace(init=init, server_update=server_update, aggregator="stack")


def check_curve(options: FedSiamDOptions, rounds: int) -> None:
    """Raises ValueError where a run of so many rounds has no place for the curve."""
    if options.curve == "linear":
        if options.pi_rounds >= rounds:
            accepted = f"a number < rounds = {rounds} where method.curve=linear"
            raise ValueError(f"method.pi_rounds: got {options.pi_rounds}, accepted: {accepted}")
        return
    least = options.pi_rounds + (1 - options.saved) * rounds  # where Eq. 12's tau is 1
    if options.end_round < least - 1e-6:
        accepted = f"a number >= method.pi_rounds + (1 - method.saved) rounds = {least:g}"
        raise ValueError(f"method.end_round: got {options.end_round}, accepted: {accepted} where method.curve=rectangle")
    if options.end_round > rounds + 1:
        accepted = f"a number <= rounds + 1 = {rounds + 1} where method.curve=rectangle; lower method.pi_rounds with it"
        raise ValueError(f"method.end_round: got {options.end_round}, accepted: {accepted}, or set method.curve=linear")


def upload_share(options: FedSiamDOptions, rounds: jax.Array | int, number: jax.Array) -> jax.Array:
    """The share tau of online layers to upload in the round `number` of `rounds` (from 1): float32 scalar."""
    if options.curve == "linear":
        return siamese.linear_share(number, saved=options.saved, pi_rounds=options.pi_rounds, rounds=rounds)
    ends = {"pi_rounds": options.pi_rounds, "end_round": options.end_round}
    return siamese.rectangle_share(number, saved=options.saved, rounds=rounds, **ends)


class Upload(NamedTuple):
    """What a client of D returns.

    Attributes:
        weights: the update of both networks; which layers of the online network's are taken is the server's choice.
        distances: float32 [J], FSM.
    """

    weights: Weights
    distances: jax.Array


def with_window(state: ServerState, rounds: int, cohort_size: int) -> ServerState:
    """A server whose window over the distances of so many rounds is empty."""
    return state._replace(own=siamese.empty_window(rounds, cohort_size, len(siamese.layers(state.weights.params.online))))


def with_distances(output: ClientOutput, trained: Networks, both_travel: jax.Array) -> ClientOutput:
    """What a client of D returns: FSM too, for which it is told the boundary where both networks travel.

    The bytes that it sends are the server's to count, once layers are chosen.
    """
    metrics = {name: metric for name, metric in output.metrics.items() if name != "comm/bytes_up"}
    metrics["comm/bytes_down"] = Sum(metrics["comm/bytes_down"].total + jnp.where(both_travel, 4, 0))
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
    besides = jnp.sum(jnp.where(chosen, sizes, 0), axis=1) + jnp.where(both_travel, num_bytes(distances[0]), 0)
    metrics: Metrics = {
        "client/upload_fraction": mean(chosen, jnp.broadcast_to(took_part[:, None], chosen.shape)),
        "client/upload_bytes_fraction": mean(besides / sizes.sum(), took_part),
        "comm/bytes_up": Sum((sizes.sum() + besides).astype(jnp.int32)),
    }
    return state._replace(own=window), mean_of_stack(Aggregate(filled, stacked.weight)), metrics
