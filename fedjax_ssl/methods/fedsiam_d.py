"""FedSiam-D: Pi for some rounds, then MT whose clients upload chosen layers (`fedjax_ssl.methods.fedsiam` has the rest).

Clients send both networks' updates and the distances of their layers; the server says which of the online network's it takes.

The released code's curve and window are its own, which no option follows: its linear share falls from 1 in round 2 to .1 in
round 41 of 50 and stays there (Eq. 11's falls to 0 in the last round), and its boundary looks back on the last round, then on
all since the third, then on ten.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from fedjax_ssl.local import Server, ServerState, Task, Training, Weights
from fedjax_ssl.local.networks import Networks, networks
from fedjax_ssl.local.server import mean_of_stack
from fedjax_ssl.method import Aggregate, ClientOutput, DataSpec, Method, ServerData
from fedjax_ssl.methods.fedsiam import ClientState, FedSiamMTOptions, method_of
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.options import Fraction, Phase, rounds_of
from fedjax_ssl.ssl import siamese

PyTree = Any


class FedSiamDOptions(FedSiamMTOptions):
    """Settings of D, besides those of MT."""

    curve: Literal["linear", "rectangle"] = Field(
        default="linear",
        description=(
            "Of tau, the share of the online network's layers that is uploaded: `linear` (Eq. 11) or `rectangle` (Eq. 12)."
        ),
    )
    saved: Fraction = Field(
        default=0.5,
        description=(
            "Mu in [0, 1], the share of the online network's layers that is saved over a run, but for what the curve "
            "cuts; the target's are always sent. What that is in bytes (`client/upload_bytes_fraction`) depends on the "
            "layers that are far from the target's, which may be the large ones."
        ),
    )
    pi_rounds: Phase = Field(
        default=0.06,
        description="Phi_g: the first rounds, with one network; then the boundary looks back on as many rounds.",
    )
    end_round: Phase = Field(
        default=0.8,
        description=(
            "Varphi_g, of the rectangle: from this round on tau = 0. At least (1 - mu) R_G rounds after `pi_rounds`, "
            "so that tau does not have to be above 1; at most R_G + 1, so that the whole rectangle is within the run."
        ),
    )

    def for_run(self, rounds: int, counts: np.ndarray, batch_size: int) -> Self:
        """With `pi_rounds` and `end_round` as numbers of rounds, between which the curve has a place."""
        linear = self.curve == "linear"
        pi_rounds = rounds_of("pi_rounds", self.pi_rounds, rounds, most=None if linear else rounds)
        end_round = rounds_of("end_round", self.end_round, rounds, most=max(rounds + 1, int(self.end_round) if linear else 0))
        if not linear:
            check_rectangle(pi_rounds, end_round, self.saved, rounds)
        return self.model_copy(update={"pi_rounds": pi_rounds, "end_round": end_round})


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
        return with_window(state, max(int(options.pi_rounds), 1), spec.cohort_size), clients

    def server_update(state: ServerState, stacked: Aggregate, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        number = data.round + 1
        tau, both_travel = upload_share(options, data.rounds, number), number > options.pi_rounds
        state, aggregate, sent = choose(state, stacked, tau, round=data.round, both_travel=both_travel)
        state, metrics = method.server_update(state, aggregate, data, key)
        return state, {**metrics, **sent}

    return method._replace(init=init, server_update=server_update, aggregator="stack")


def check_rectangle(pi_rounds: int, end_round: int, saved: float, rounds: int) -> None:
    """Raises ValueError where a run of so many rounds has no place for the rectangle."""
    least = pi_rounds + (1 - saved) * rounds  # where Eq. 12's tau is 1
    if end_round <= pi_rounds or end_round < least - 1e-6:
        accepted = f"a number >= method.pi_rounds + (1 - method.saved) rounds = {least:g}, and > method.pi_rounds"
        raise ValueError(f"method.end_round: got {end_round}, accepted: {accepted}, where method.curve=rectangle")


def upload_share(options: FedSiamDOptions, rounds: jax.Array | int, number: jax.Array) -> jax.Array:
    """The share tau of online layers to upload in the round `number` of `rounds` (from 1): float32 scalar."""
    pi_rounds, end_round = int(options.pi_rounds), int(options.end_round)  # numbers since `for_run`
    if options.curve == "linear":
        return siamese.linear_share(number, saved=options.saved, pi_rounds=pi_rounds, rounds=rounds)
    return siamese.rectangle_share(number, saved=options.saved, rounds=rounds, pi_rounds=pi_rounds, end_round=end_round)


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
