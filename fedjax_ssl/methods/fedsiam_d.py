"""FedSiam-D: FedSiam-Pi for some rounds, then FedSiam-MT whose clients upload chosen layers of the online network.

In the simulation clients return the updates of both networks and the distances of their layers, and the server takes the chosen
layers. The released code has another linear curve and another window of distances, which no option follows.
"""

from typing import Annotated, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl.local import Server, ServerState, Setup, Task, Training, Weights
from fedjax_ssl.method import Aggregate, ClientOutput, DataSpec, Method, ServerData, averaged, summed
from fedjax_ssl.methods.fedsiam import FedSiamClientState, FedSiamMTOptions, Networks, each, method_of
from fedjax_ssl.metrics import Metrics, Sum, mean, num_bytes
from fedjax_ssl.options import Count, Fraction, Phase, ReadWhere, rounds_of
from fedjax_ssl.ssl import siamese


class FedSiamDOptions(FedSiamMTOptions):
    """Options of FedSiam-D: those of FedSiam-MT, and which layers are uploaded."""

    curve: Literal["linear", "rectangle"] = Field(
        default="linear",
        description="How the uploaded share tau of the online network changes over rounds: it falls to 0 (`linear`, Eq. 11), "
        "or it is constant between the rounds `pi_rounds` and `end_round` and 0 elsewhere (`rectangle`, Eq. 12).",
    )
    saved: Fraction = Field(
        default=0.5, description="Share of the online network's layers that are not uploaded, over a whole run (mu)."
    )
    pi_rounds: Phase = Field(
        default=0.06,
        description="Two numbers in one: how many rounds at the start use one network (phi_g), and over how many of the most "
        "recent rounds distances are kept to decide what is uploaded. A number below 1 is a share of all rounds.",
    )
    target_delay: Count = Field(
        default=0,
        description="Number of further rounds with one network, in which the target's decay alpha stays 0; the released code "
        "has 1 here, because it counts rounds from 0.",
    )
    end_round: Annotated[Phase, ReadWhere(curve=("rectangle",))] = Field(
        default=0.8,
        description="Round, counted from 1, from which on the online network is not uploaded, where curve=rectangle "
        "(varphi_g). A number below 1 is a share of all rounds.",
    )

    def for_rounds(self, rounds: int) -> Self:
        """The options with `pi_rounds` and `end_round` as numbers of rounds; ValueError where tau (Eq. 12) would be above 1."""
        linear = self.curve == "linear"
        pi_rounds = rounds_of("pi_rounds", self.pi_rounds, rounds, maximum=None if linear else rounds)
        last = max(rounds + 1, int(self.end_round) if linear else 0)
        end_round = rounds_of("end_round", self.end_round, rounds, maximum=last)
        if not linear:
            first = pi_rounds + (1 - self.saved) * rounds  # the end round with tau = 1 (Eq. 12), which cannot be above 1
            if end_round <= pi_rounds or end_round < first - 1e-6:
                accepted = f"a number >= method.pi_rounds + (1 - method.saved) rounds = {first:g}, and > method.pi_rounds"
                raise ValueError(f"method.end_round: got {end_round}, accepted: {accepted}, where method.curve=rectangle")
        return self.model_copy(update={"pi_rounds": pi_rounds, "end_round": end_round})


def fedsiam_d(*, task: Task, client: Training, server: Server, options: FedSiamDOptions = FedSiamDOptions()) -> Method:
    """FedSiam-D: Pi at first, then MT whose clients upload the online layers that differ most from the target's.

    Clients send the distances of all layers (FSM, Eq. 10). A layer is uploaded if its distance reaches the boundary, the
    (1 - tau)-quantile of the distances of the last rounds; otherwise the average takes the target's layer instead.
    `comm/bytes_up` counts the target, the chosen layers and the distances; `comm/bytes_down` counts both networks and the
    boundary. `client/upload_fraction` is the share of layers that are chosen. `client/upload_bytes_fraction` is the bytes of
    these layers and of the distances, as a share of the online network's bytes.
    """

    def both_sent(number: jax.Array) -> jax.Array:
        return number - options.pi_rounds > options.target_delay

    def alpha_max(number: jax.Array) -> jax.Array:
        return jnp.where(both_sent(number), options.alpha_max, 0.0)

    method = method_of(Setup(task, client, server, options), alpha_max, with_distances)

    def init(key: jax.Array, spec: DataSpec) -> tuple[ServerState, FedSiamClientState]:
        state, clients = method.init(key, spec)
        num_layers = len(siamese.layers(state.weights.params.online))
        window = siamese.empty_window(max(int(options.pi_rounds), 1), spec.cohort_size, num_layers)
        return state._replace(extra=window), clients

    def server_update(state: ServerState, stacked: Aggregate, data: ServerData, key: jax.Array) -> tuple[ServerState, Metrics]:
        number = data.round + 1
        both = both_sent(number)
        tau = jnp.where(both, upload_share(options, data.rounds, number), 0.0)
        state, aggregate, sent = choose(state, stacked, tau, round=data.round, both_sent=both)
        state, metrics = method.server_update(state, aggregate, data, key)
        return state, {**metrics, **sent}

    changed = method._replace(init=init, server_update=server_update, aggregator="stack")
    requires = method.requires._replace(rounds=True)
    return changed._replace(parameters=lambda upload: upload.weights.params, requires=requires)


def upload_share(options: FedSiamDOptions, rounds: jax.Array | int, number: jax.Array) -> jax.Array:
    """The share tau of online layers to upload in round `number`, from 1, of `rounds`: float32 scalar."""
    pi_rounds, end_round = int(options.pi_rounds), int(options.end_round)  # numbers since `for_rounds`
    if options.curve == "linear":
        return siamese.linear_share(number, saved=options.saved, pi_rounds=pi_rounds, rounds=rounds)
    return siamese.rectangle_share(number, saved=options.saved, rounds=rounds, pi_rounds=pi_rounds, end_round=end_round)


class Upload(NamedTuple):
    """What a client of D returns: the update of both networks, and the distances FSM of their layers, float32 [J]."""

    weights: Weights
    distances: jax.Array


def with_distances(output: ClientOutput, trained: Weights, both_sent: jax.Array) -> ClientOutput:
    """A client's output with the distances of its layers. The server counts `comm/bytes_up`, once it has chosen layers."""
    metrics = {name: metric for name, metric in output.metrics.items() if name != "comm/bytes_up"}
    of_model = metrics["comm/bytes_down"]
    assert isinstance(of_model, Sum)
    metrics["comm/bytes_down"] = Sum(of_model.total + jnp.where(both_sent, 4, 0))  # 4: the boundary
    distances = siamese.layer_distances(trained.params.target, trained.params.online)
    return output._replace(update=Upload(output.update, distances), metrics=metrics)


def choose(
    state: ServerState, stacked: Aggregate, tau: jax.Array, *, round: jax.Array, both_sent: jax.Array
) -> tuple[ServerState, Aggregate, Metrics]:
    """The weighted mean (Eq. 2) of both networks, with the target's layers in place of online layers that are not uploaded.

    `stacked` is an Upload with leading axis M, `tau` the share of online layers to upload. If not `both_sent`, tau is 0 and
    distances are not recorded. Returns the state with the new window, the aggregate, and metrics.
    """
    update, distances = stacked.update
    took_part = stacked.weight > 0
    window = siamese.remember(state.extra, round, distances, took_part & both_sent)
    chosen = siamese.uploaded(distances, siamese.boundary(window, tau), tau)
    online, _ = each(state.weights)
    names = siamese.layers(online.params)

    def fill(sent: Networks, update: Networks) -> Networks:
        # An update is sent - local. With the local target in place of the local online layer: sent.online - local target.
        instead = jax.tree.map(lambda online, target, u: online - target + u, sent.online, sent.target, update.target)
        return Networks(siamese.select_layers(names, chosen, update.online, instead), update.target)

    stats_sent = update.stats != ()
    stats = fill(state.weights.stats, update.stats) if stats_sent else ()
    filled = Weights(fill(state.weights.params, update.params), stats)
    sent = online if stats_sent else (online.params,)
    sizes, of_target = siamese.layer_bytes(names, *sent), num_bytes(sent)
    added = jnp.sum(jnp.where(chosen, sizes, 0), axis=1) + jnp.where(both_sent, num_bytes(distances[0]), 0)
    metrics: Metrics = {
        "client/upload_fraction": mean(chosen, jnp.broadcast_to(took_part[:, None], chosen.shape)),
        "client/upload_bytes_fraction": mean(added / sizes.sum(), took_part),
        "comm/bytes_up": Sum((of_target + added).astype(jnp.int32)),
    }
    return state._replace(extra=window), averaged(summed(Aggregate(filled, stacked.weight))), metrics
