"""System heterogeneity: who can be reached, who drops out or is late, and how many simulated seconds a round takes.

A client that takes part receives the model, trains, and sends its update:

    seconds = bytes down / down + (forward + 2 backward passes) / speed + bytes up / up

with the bytes and passes of its metrics, whatever its method is. Round r begins at the time r round_s, however long the rounds
before it took, so that a cohort depends on seed and round alone.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.arrays import Number, PyTree
from fedjax_ssl.data.profiles import Profiles
from fedjax_ssl.method import ClientOutput, Cohort
from fedjax_ssl.metrics import Mean, PerClient, Sum, num_bytes
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.costs import Passes

SECONDS = "internal/seconds"  # a metric: how long the server waits for a client
ROUNDING = 1e-6  # of seconds in float32, relative: a client that plans to end at the deadline is in time


class System(NamedTuple):
    """The rules that are the same for all clients."""

    participation: str = "uniform"  # who is drawn: `uniform`, `weighted` by data size, or uniformly among those `available`;
    # or `async`: uniformly, and whoever is drawn begins while others are still at work (`simulation.asynchronous`)
    round_s: float = 600.0  # seconds of the trace from one round's begin to the next
    period_s: float = 86_400.0  # seconds after which the trace repeats
    dropout: float = 0.0  # the probability that a client drops out after it has received the model
    deadline_s: float = math.inf  # seconds after which the server waits for nobody
    is_timed: bool = False  # whether clients need time at all
    shortens: bool = False  # whether a slow client takes fewer steps, to end at the deadline; else its update is dropped
    concurrency: int = 0  # `async`: how many clients train at any time
    staleness: float = 0.5  # `async`: the exponent of the weight of updates that come late

    @property
    def is_async(self) -> bool:
        """Whether the server does not wait for all clients of a round."""
        return self.participation == "async"


class UnevenClient(NamedTuple):
    """One client of a cohort, or with leading axis M all of them."""

    profile: Profiles
    available: jax.Array  # whether it can be reached
    stays: jax.Array  # whether it does not drop out


def are_available(system: System, windows: jax.Array | None, round: jax.Array, size: int) -> jax.Array:
    """Which of `size` clients with windows [size, I, 2] can be reached in a round (int32 scalar, from 0): bool [size]."""
    if windows is None:
        return jnp.ones(size, bool)
    time = time_of_day(system, round)
    begin, end = windows[..., 0], windows[..., 1]
    later = time + system.period_s  # a window may end after the period
    return jnp.any(((begin <= time) & (time < end)) | ((begin <= later) & (later < end)), axis=-1)


def time_of_day(system: System, round: jax.Array) -> jax.Array:
    """When a round (int32 scalar, from 0) begins within the period, in seconds, float32: round * round_s modulo period_s.

    A float32 would not be exact for a large product, so each bit of the round adds its own seconds, modulo period_s.
    """
    bits = np.arange(31)
    seconds = np.fmod(np.ldexp(system.round_s, bits), system.period_s)
    return jnp.mod(jnp.sum((round >> bits & 1) * jnp.float32(seconds)), system.period_s)


def slots(system: System, key: jax.Array, cohort: Cohort, profiles: Profiles) -> UnevenClient:
    """The cohort's clients in a round, with leading axis M; `key` is the run's root key."""
    keys = rng.client_keys(key, cohort.round, cohort.ids, "dropout")
    assert cohort.available is not None  # `cohort.draw` says who is
    return UnevenClient(profiles, cohort.available, jax.vmap(jax.random.uniform)(keys) >= system.dropout)


def seconds(profile: Profiles, bytes_down: Number, passes: Passes, bytes_up: Number) -> jax.Array:
    """How long a client takes for a round, float32 scalar."""
    return bytes_down / profile.down + passes.as_forward / profile.speed + bytes_up / profile.up


def allowance(system: System, slot: UnevenClient, output: ClientOutput, passes: Passes) -> jax.Array:
    """Forward passes for which a client's training has time; `output` and `passes` are those of a round without any step."""
    down, up = transfers(output)
    needed = seconds(slot.profile, down, passes, jnp.maximum(up, num_bytes(output.update)))
    return (system.deadline_s - needed) * slot.profile.speed


def transfers(output: ClientOutput) -> tuple[Number, Number]:
    """The bytes that a client receives, and those that it sends: `comm/bytes_up` or, without this metric, its update's."""
    totals = {name: metric.number for name, metric in output.metrics.items() if isinstance(metric, Sum)}
    up = totals.get("comm/bytes_up", num_bytes(output.update))
    return totals.get("comm/bytes_down", 0), jnp.where(output.weight > 0, up, 0)


def arrived(system: System, slot: UnevenClient, output: ClientOutput, passes: Passes, old_state: PyTree) -> ClientOutput:
    """What arrives of a client's results, and what it costs.

    An update that does not arrive has weight 0, and so costs no upload, and the client's state stays as it was. A client that
    cannot be reached costs nothing. One that drops out costs its download, and a late one its download and its passes.
    """
    down, up = transfers(output)
    spent = seconds(slot.profile, down, passes, up)
    works = slot.available & slot.stays
    arrives = works & (spent <= system.deadline_s * (1 + ROUNDING))

    asked = slot.available | (system.participation != "available")
    waited = jnp.where(arrives, spent, jnp.where(asked & math.isfinite(system.deadline_s), system.deadline_s, 0.0))
    reached = {name: slot.available if name == "comm/bytes_down" else works for name in output.metrics}
    result = result_where(arrives, output, old_state, lambda name, part: jnp.where(reached[name], part, 0))
    added = {
        "sim/dropped": Sum((slot.available & ~arrives).astype(jnp.int32)),
        "sim/absent": Sum((~slot.available).astype(jnp.int32)),
    }
    added |= {SECONDS: Sum(waited)} if system.is_timed else {}
    return result._replace(metrics={**result.metrics, **added})


def result_where(
    counts: jax.Array, output: ClientOutput, old_state: PyTree, total: Callable[[str, jax.Array], jax.Array]
) -> ClientOutput:
    """A client's results, if the bool scalar `counts` is true.

    If not, its update and weight are 0, its state stays as it was, its means do not count, and what is recorded of it is NaN.
    In both cases each part of a summed metric is computed by the function `total(name, part)`.
    """

    def where(new: jax.Array, old: PyTree = 0) -> jax.Array:
        return jnp.where(counts, new, old).astype(new.dtype)

    def of(name: str, metric: Mean | Sum | PerClient) -> Mean | Sum | PerClient:
        if isinstance(metric, PerClient):
            return PerClient(where(metric.value, jnp.nan))
        if isinstance(metric, Mean):
            return Mean(*map(where, metric))
        return Sum(*(total(name, part).astype(part.dtype) for part in metric))

    return ClientOutput(
        update=jax.tree.map(where, output.update),
        weight=where(output.weight),
        client_state=jax.tree.map(where, output.client_state, old_state),
        metrics={name: of(name, metric) for name, metric in output.metrics.items()},
    )
