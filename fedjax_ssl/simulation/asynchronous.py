"""Asynchronous rounds, FedBuff (Nguyen et al. 2022, Algorithm 1): the server steps whenever M updates have arrived.

Of all clients C train at any time, each from the model that it was given when it began. A round of the simulation is a step of
the server, which averages the next M updates that arrive. In it M clients begin with the same model: the first one at once, in
the place left by the last update of the step before, and one more whenever one of the next M - 1 updates arrives. So C clients
stay at work. The first C / M rounds only let clients begin, at time 0, without a step of the server. After them C - 1
clients are at work: the first client of round 1 is left out, so that one place is free.

An update that comes s steps after its client has begun is multiplied by (1 + s)^-a, and the step averages

    sum_k n_k (1 + s_k)^-a update_k / sum_k n_k

A client computes its update when it begins; until it arrives, by the seconds of `simulation.system`, the update waits in the
server's state. All clients may be drawn, also those whose update is still under way.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.arrays import Key, PyTree
from fedjax_ssl.method import Aggregate, Cohort, DataSpec, Method, ServerData, averaged, summed
from fedjax_ssl.metrics import Metrics, Sum, mean

_Pair = tuple[jax.Array, jax.Array]
STEP = "internal/step_seconds"  # a metric: the seconds from one step of the server to the next
FREE = np.float32(1e30)  # the seconds of a place that nobody has; infinity would count as a fault of the server's state


class Arrival(NamedTuple):
    """What a client sends, and after how many seconds it arrives."""

    update: PyTree
    seconds: jax.Array  # float32 scalar


class Pending(NamedTuple):
    """Updates that are under way, with leading axis C; between two rounds one place is free, see FREE."""

    update: PyTree
    weight: jax.Array  # float32 [C]
    seconds: jax.Array  # float32 [C], until it arrives
    begun: jax.Array  # int32 [C], the server's step at which its client has begun; -1: there is none


class Buffered(NamedTuple):
    """The server's state, and what is under way to it."""

    server: PyTree
    pending: Pending
    steps: jax.Array  # int32 scalar, how many steps the server has made


def inner(server: PyTree) -> PyTree:
    """The method's own server state in that of a run, asynchronous or not."""
    return server.server if isinstance(server, Buffered) else server


def buffered(method: Method, spec: DataSpec, concurrency: int, exponent: float, update: Callable[[], PyTree]) -> Method:
    """The method with asynchronous rounds; `update` gives the shapes of an update.

    The update of each client has to become an `Arrival` before updates are stacked.
    """

    def init(key: Key, data_spec: DataSpec) -> tuple[PyTree, PyTree]:
        server, clients = method.init(key, data_spec)
        none = jax.tree.map(lambda x: jnp.zeros((concurrency, *x.shape), x.dtype), update())
        empty = Pending(none, *(jnp.full(concurrency, x) for x in (jnp.float32(0), jnp.float32(0), jnp.int32(-1))))
        return Buffered(server, empty, jnp.int32(0)), clients

    def broadcast(server: PyTree, clients: PyTree, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return method.broadcast(server.server, clients, cohort)

    def server_update(server: PyTree, aggregate: Aggregate, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
        begun = jnp.full(spec.cohort_size, server.steps)
        started = Pending(aggregate.update.update, aggregate.weight, aggregate.update.seconds, begun)
        is_filling = server.pending.begun[-1] < 0
        arrived, pending, seconds = jax.lax.cond(is_filling, _filled, _advanced, server.pending, started)
        staleness = server.steps - arrived.begun
        scaled = jax.tree.map(lambda x: _scaled(x, (1.0 + staleness) ** -exponent), arrived.update)
        average = averaged(summed(Aggregate(scaled, arrived.weight)))

        def step() -> tuple[PyTree, Metrics]:
            return method.server_update(server.server, average, data, key)

        def rest() -> tuple[PyTree, Metrics]:
            return server.server, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step)[1])

        new, metrics = jax.lax.cond(is_filling, rest, step)
        own = {STEP: Sum(seconds), "sim/staleness": mean(staleness, arrived.weight > 0)}
        return Buffered(new, pending, server.steps + ~is_filling), {**metrics, **own}

    def prepare(server: PyTree, data: ServerData, key: Key) -> tuple[PyTree, Metrics]:
        new, metrics = method.prepare(server.server, data, key)
        return server._replace(server=new), metrics

    def of_inner(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda server, *arguments: function(inner(server), *arguments)

    return method._replace(
        init=init,
        broadcast=broadcast,
        server_update=server_update,
        prepare=prepare,
        predict={name: of_inner(function) for name, function in method.predict.items()},
        predict_client={name: of_inner(function) for name, function in method.predict_client.items()},
        aggregator="stack",
        parameters=lambda sent: method.parameters(sent.update if isinstance(sent, Arrival) else sent),
    )


def _filled(pending: Pending, started: Pending) -> tuple[Pending, Pending, jax.Array]:
    """While places are empty: nothing arrives, and those who begin take places; no time passes."""
    first = jnp.sum(pending.begun >= 0)

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), first, axis=0)

    nothing = started._replace(weight=jnp.zeros_like(started.weight))
    filled = jax.tree.map(put, pending, started)
    return nothing, filled._replace(seconds=filled.seconds.at[0].set(FREE)), jnp.float32(0)


def _advanced(pending: Pending, started: Pending) -> tuple[Pending, Pending, jax.Array]:
    """What has arrived, what is under way then, and the seconds until the last one has arrived.

    The first of those who begin takes the free place. Whenever an update arrives, the next one takes its place; the last
    update's place stays free.
    """
    size, number = len(pending.weight), len(started.weight)
    free = jnp.argmax(pending.seconds)
    first = jnp.arange(size).at[free].set(size), pending.seconds.at[free].set(started.seconds[0])

    def next_one(carry: _Pair, one: jax.Array) -> tuple[_Pair, _Pair]:
        places, ends = carry  # which update is in each place, and when it arrives
        at = jnp.argmin(ends)
        now, arrived = ends[at], places[at]
        end = jnp.where(one < number, now + started.seconds[jnp.minimum(one, number - 1)], FREE)
        return (places.at[at].set(size + jnp.minimum(one, number - 1)), ends.at[at].set(end)), (arrived, now)

    (places, ends), (arrived, times) = jax.lax.scan(next_one, first, jnp.arange(1, number + 1))
    both = jax.tree.map(lambda x, new: jnp.concatenate([x, new.astype(x.dtype)]), pending, started)
    taken, left = (jax.tree.map(lambda x, rows=rows: x[rows], both) for rows in (arrived, places))
    return taken, left._replace(seconds=jnp.where(ends < FREE, ends - times[-1], FREE)), times[-1]


def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Floats [M, ...] times a factor [M]; other numbers, such as counts, as they are."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return (x * factor.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype) if is_float else x
