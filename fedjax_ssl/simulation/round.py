"""One federated round of one run, as a pure function.

cohort                     = sample(round)
shared, per_client         = broadcast(server, clients, cohort)
aggregate, states, metrics = client_update, over the cohort
server                     = server_update(server, aggregate)
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.federated import Array, Examples, FederatedData, Table
from fedjax_ssl.method import ClientData, ClientOutput, Cohort, Method, ServerData
from fedjax_ssl.metrics import ClientMetrics, Mean, Metrics, PerClient, Sum
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.asynchronous import STEP, Arrival
from fedjax_ssl.simulation.contract import check_names
from fedjax_ssl.simulation.costs import with_passes
from fedjax_ssl.simulation.execution import Execution, run_cohort
from fedjax_ssl.simulation.system import SECONDS, System, allowance, arrived, result_where, slots

FAULTS = ("the update", "the weight", "the client state", "a metric", "a negative weight")
"""What may be wrong with a client's results: NaN or infinity in one of four parts, or a weight below 0."""
FAULT = "internal/fault"  # a metric: which of FAULTS are in a client's results, one bit for each
SENT = "internal/sent"  # a metric: whether a client sent its results; a client of weight 0 did not
UPLOAD = ("comm/bytes_up", "client/upload")  # the beginnings of metrics' names that count only clients that sent their results


class RunState(NamedTuple):
    """All that persists in a run: nothing else survives a round, a checkpoint or a resume."""

    server: PyTree  # the method's server state
    clients: PyTree  # the method's client states, leading axis K, or `()`
    round: Array  # int32 scalar, rounds finished
    key: Array  # the run's root PRNG key, which never changes


class RoundData(NamedTuple):
    """The data that one round reads: the images once, and Examples without them (`Examples.images` is None)."""

    images: Array  # uint8 [N, H, W, ch]: the training pool, or the round's own images where the pool stays on the host
    clients: ClientData  # with leading axis M
    server: ServerData
    profiles: PyTree = None  # of the clients' devices, with leading axis M, where they are uneven


class ClientInputs(NamedTuple):
    """What differs from client to client, with leading axis M: its broadcast, state, data and PRNG key."""

    per_client: PyTree
    state: PyTree
    rows: ClientData
    key: jax.Array
    slot: PyTree = None  # an UnevenClient, where clients are uneven


class Round(NamedTuple):
    """A round that is ready to run: `run_round` needs nothing else."""

    method: Method
    cohort: Cohort
    data: RoundData
    state: RunState  # the state before the round; its `clients` are the cohort's alone, with leading axis M
    message: tuple[PyTree, PyTree]  # what `Method.broadcast` returns: (shared, per_client)
    system: System | None = None  # None: all clients take part and need no time

    @property
    def shared(self) -> tuple[PyTree, jax.Array]:
        """What all clients have alike: the broadcast's first part, and the images."""
        return self.message[0], self.data.images

    @property
    def inputs(self) -> ClientInputs:
        """What differs from client to client. Clients who cannot be reached or drop out have no data: they compute nothing."""
        keys = rng.client_keys(self.state.key, self.cohort.round, self.cohort.ids)
        inputs = ClientInputs(self.message[1], self.state.clients, self.data.clients, keys)
        if self.system is None:
            return inputs
        slot = slots(self.system, self.state.key, self.cohort, self.data.profiles)
        works, (labeled, unlabeled, true_labels) = slot.available & slot.stays, inputs.rows
        return inputs._replace(
            slot=slot, rows=ClientData(restricted(labeled, works), restricted(unlabeled, works), true_labels)
        )


def assemble(
    method: Method,
    state: RunState,
    cohort: Cohort,
    next_cohort: Cohort,
    data: FederatedData,
    take: Callable[[jax.Array, jax.Array], jax.Array] = lambda x, ids: x[ids],
) -> Round:
    """The round of a cohort, from the state and the data of all clients; `take` gives rows of the client states."""
    message = method.broadcast(state.server, state.clients, cohort)  # a checked method does not see all states unasked
    of_cohort = state._replace(clients=jax.tree.map(lambda x: take(x, cohort.ids), state.clients))
    return Round(method, cohort, gather(data, cohort, next_cohort), of_cohort, message)


def run_client(method: Method, shared: tuple[PyTree, jax.Array], inputs: ClientInputs) -> ClientOutput:
    """What one client returns, from what a Round has for all clients (`shared`) and for this one (`inputs`)."""
    message, images = shared
    return method.client_update(message, inputs.per_client, inputs.state, attach(inputs.rows, images), inputs.key)


def gather(data: FederatedData, cohort: Cohort, next_cohort: Cohort) -> RoundData:
    """The data of a round's cohort, and what the server may read at its end, in JAX or NumPy arrays."""
    labels = data.train.labels
    unlabeled, pooled = _rows(data.unlabeled, cohort.ids, None), _rows(data.pooled, 0, None)
    return RoundData(
        images=data.train.images,
        clients=ClientData(_rows(data.labeled, cohort.ids, labels), unlabeled, labels[unlabeled.index]),
        server=ServerData(
            labeled=_rows(data.server, 0, labels),
            unlabeled=pooled,
            true_labels=labels[pooled.index],
            next_cohort=restricted(_rows(data.client_data, next_cohort.ids, None), next_cohort.available),
            round=cohort.round,
            rounds=cohort.rounds,
        ),
        profiles=jax.tree.map(lambda x: x[cohort.ids], data.profiles),
    )


def _rows(table: Table, which: jax.Array | int, labels: jax.Array | None) -> Examples:
    """Rows `which` of an index table, as Examples without images."""
    index, count = table.index[which], table.count[which]
    return Examples(None, index, count, None if labels is None else labels[index])


def restricted(examples: Examples, which: Array | None) -> Examples:
    """Examples [M, n] of the clients in `which` bool [M], and none of the others; None: of all."""
    return examples if which is None else examples._replace(count=examples.count * which)


def attach(tree: PyTree, images: jax.Array) -> PyTree:
    """Gives every Examples in `tree` its images."""

    def with_images(x: PyTree) -> PyTree:
        return x._replace(images=images) if isinstance(x, Examples) else x

    return jax.tree.map(with_images, tree, is_leaf=lambda x: isinstance(x, Examples))


def run_round(
    ready: Round, execution: Execution, *, record: bool = False, stop: bool = False
) -> tuple[RunState, ClientMetrics]:
    """One round: the state after it, and its metrics.

    The returned state contains only the cohort's clients; their states and metrics have leading axis M. With `record` the
    metrics contain what is recorded of each client; otherwise that is not computed. With `stop` the state does not change if
    any client is left out.
    """
    method, cohort, data, state, _, system = ready
    inputs = ready.inputs

    def update(shared: tuple[PyTree, jax.Array], inputs: ClientInputs) -> ClientOutput:
        output = run_client(method, shared, inputs)
        keep: Callable[[ClientMetrics], ClientMetrics] = recorded if record else unrecorded
        return output._replace(metrics=keep(output.metrics))

    def client(shared: tuple[PyTree, jax.Array], inputs: ClientInputs) -> ClientOutput:
        if not method.requires.clients:
            return contain(run_client(method, shared, inputs), inputs.state)
        allowed = partial(allowance, system, inputs.slot) if system is not None and system.shortens else None
        output, passes = with_passes(update, allowed)(shared, inputs)
        costs = {"cost/forward_passes": passes.forward, "cost/backward_passes": passes.backward}
        of_client: ClientMetrics = {**output.metrics, **costs}
        output = output._replace(metrics=of_client)
        if system is not None:
            output = arrived(system, inputs.slot, output, passes, inputs.state)
            if system.is_async:
                output = output._replace(update=Arrival(output.update, jnp.float32(output.metrics[SECONDS][0])))
        return contain(output, inputs.state)

    output = run_cohort(
        client,
        ready.shared,
        inputs,
        aggregator=method.aggregator,
        execution=execution,
        work=inputs.rows.labeled.count + inputs.rows.unlabeled.count,
        record=method.parameters if record else None,
    )
    key = rng.round_key(state.key, "server", cohort.round)
    server, of_server = method.server_update(state.server, output.aggregate, attach(data.server, data.images), key)
    check_names(of_server, output.metrics, "server_update", "client_update")
    found: ClientMetrics = {**output.metrics, **of_server, "server/non_finite": Sum((~_all_finite(server)).astype(jnp.int32))}
    metrics = {name: _of_senders(name, metric, output.metrics[SENT][0]) for name, metric in found.items() if name != SENT}
    if not method.requires.clients:
        del metrics["client/participants"]
    if system is not None and system.is_timed:
        waited = metrics.pop(SECONDS)[0]
        seconds = metrics.pop(STEP)[0] if system.is_async else jnp.max(waited)
        metrics |= {"sim/seconds": Sum(seconds), **({"client/seconds": PerClient(waited)} if record else {})}
    new = RunState(server, output.client_states, state.round + 1, state.key)
    if stop:
        is_sound = jnp.all(output.metrics[FAULT][0] == 0)
        new = optax.tree.where(is_sound, new, state)
    return new, metrics


def _of_senders(name: str, metric: Mean | Sum | PerClient, sent: jax.Array) -> Mean | Sum | PerClient:
    """A metric [M] of uploads without the clients that sent nothing; any other one as it is."""
    if not name.startswith(UPLOAD) or isinstance(metric, PerClient) or metric[0].ndim == 0:
        return metric
    return jax.tree.map(lambda x: jnp.where(sent > 0, x, 0), metric)


def reason(fault: int) -> str:
    """What is wrong in a client's results, in words, by the bits of FAULT."""
    *numbers, negative = (name if fault >> bit & 1 else "" for bit, name in enumerate(FAULTS))
    not_finite = ", ".join(filter(None, numbers))
    return " and ".join(filter(None, (not_finite and f"NaN or infinity in {not_finite}", negative)))


def unrecorded(metrics: ClientMetrics) -> dict[str, Mean | Sum]:
    """A client's metrics that are added up."""
    return {name: metric for name, metric in metrics.items() if not isinstance(metric, PerClient)}


def recorded(metrics: ClientMetrics) -> ClientMetrics:
    """A client's metrics without those of its examples."""
    return {name: metric for name, metric in metrics.items() if not name.startswith("example/")}


def contain(output: ClientOutput, old_state: PyTree) -> ClientOutput:
    """Leaves a client out of the round if it returns NaN, infinity or a negative weight.

    Its weight and update become 0, its state stays as it was, its means do not count; its finite sums (bytes, passes) do. Its
    recorded values (`PerClient`) become NaN; if only these are not finite, the client is not left out. A client whose own
    weight is 0 sends nothing; its other results stay as they are.
    """
    faults = (
        ~_all_finite(output.update),
        ~jnp.isfinite(output.weight),
        ~_all_finite(output.client_state),
        ~_all_finite(unrecorded(output.metrics)),
        output.weight < 0,
    )
    fault = sum(bad.astype(jnp.int32) << bit for bit, bad in enumerate(faults))
    sound = fault == 0

    result = result_where(sound, output, old_state, lambda _, total: jnp.where(jnp.isfinite(total), total, 0))
    added = {
        "client/non_finite": Sum((~sound).astype(jnp.int32)),
        "client/participants": Sum((result.weight > 0).astype(jnp.int32)),
        FAULT: Sum(fault),
        SENT: Sum((output.weight != 0).astype(jnp.int32)),
    }
    return result._replace(metrics={**result.metrics, **added})


def _all_finite(tree: PyTree) -> jax.Array:
    # A maximum passes NaN on, and takes less time than jnp.isfinite and jnp.all.
    largest = [jnp.max(jnp.abs(x), initial=0) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack(largest or [jnp.zeros(())]) < jnp.inf)


def prepare(method: Method, server: PyTree, data: RoundData, key: jax.Array) -> tuple[PyTree, Metrics]:
    """The server's work before round 1; `data.server.next_cohort` is the first cohort's."""
    return method.prepare(server, attach(data.server, data.images), rng.stream(key, "prepare"))
