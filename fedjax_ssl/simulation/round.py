"""One federated round, as a pure function of (state, data).

cohort                     = sample(round)
shared, own                = broadcast(server, clients, cohort)
aggregate, states, metrics = client_update, over the cohort
server                     = server_update(server, aggregate)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import Array, Examples, FederatedData, Table
from fedjax_ssl.method import ClientOutput, Cohort, DataSpec, Method, ServerData, Shard
from fedjax_ssl.metrics import Mean, Metrics, Sum
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import CohortOutput, Execution, run_cohort

PyTree = Any
Message = tuple[PyTree, PyTree]  # (shared, own): what `Method.broadcast` returns


class RunState(NamedTuple):
    """All that persists in a run. What is not in here does not survive a round, a checkpoint or a resume.

    Attributes:
        server: the method's server state.
        clients: the method's client states, leading axis K, or `()`.
        round: int32 scalar, rounds finished.
        key: the run's root PRNG key; it never changes.
    """

    server: PyTree
    clients: PyTree
    round: Array
    key: Array


class RoundData(NamedTuple):
    """The data that one round reads.

    Attributes:
        images: uint8 [N, H, W, ch], the pool that all index tables here refer to: the whole training pool, or, where that
            stays on the host, the round's images alone.
        clients: `Shard` with leading axis M, its Examples without their pool (`images` None).
        server: ServerData, its Examples without their pool.
    """

    images: Array
    clients: Shard
    server: ServerData


class ClientInputs(NamedTuple):
    """What differs from client to client, leading axis M: own broadcast, persistent state, data rows, PRNG key."""

    own: PyTree
    state: PyTree
    rows: Shard
    key: jax.Array


def _rows(table: Table, which: jax.Array | int, labels: jax.Array | None) -> Examples:
    """Rows `which` of an index table as Examples without their pool."""
    index, count = table.index[which], table.count[which]
    return Examples(None, index, count, None if labels is None else labels[index])


def gather(data: FederatedData, cohort: Cohort, next_cohort: Cohort) -> RoundData:
    """The rows of a round's cohort, and what the server may read at its end; of JAX or of NumPy arrays."""
    labels = data.train.labels
    unlabeled, pooled = _rows(data.unlabeled, cohort.ids, None), _rows(data.pooled, 0, None)
    return RoundData(
        images=data.train.images,
        clients=Shard(_rows(data.labeled, cohort.ids, labels), unlabeled, labels[unlabeled.index]),
        server=ServerData(
            labeled=_rows(data.server, 0, labels),
            unlabeled=pooled,
            truth=labels[pooled.index],
            next_cohort=_rows(data.client_data, next_cohort.ids, None),
            round=cohort.round,
        ),
    )


def attach(tree: PyTree, images: jax.Array) -> PyTree:
    """Gives every Examples in `tree` its pool of images."""

    def is_examples(x: Any) -> bool:
        return isinstance(x, Examples)

    return jax.tree.map(lambda x: x._replace(images=images) if is_examples(x) else x, tree, is_leaf=is_examples)


def _all_finite(tree: PyTree) -> jax.Array:
    # A maximum passes NaN on; on a CPU it takes half of the time of jnp.isfinite and jnp.all.
    largest = [jnp.max(jnp.abs(x), initial=0) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack(largest or [jnp.zeros(())]) < jnp.inf)


def _contain(output: ClientOutput, state: PyTree) -> ClientOutput:
    """A client whose update is not finite takes no part, keeps its old state and is counted in `client/non_finite`."""
    finite = _all_finite(output.update)

    def keep(metric: Mean | Sum) -> Mean | Sum:
        return Mean(*(jnp.where(finite, x, 0.0) for x in metric)) if isinstance(metric, Mean) else metric

    return ClientOutput(
        update=output.update,
        weight=jnp.where(finite, output.weight, 0.0),
        client_state=jax.tree.map(lambda new, old: jnp.where(finite, new, old), output.client_state, state),
        metrics={name: keep(m) for name, m in output.metrics.items()} | {"client/non_finite": Sum((~finite).astype(jnp.int32))},
    )


def run_cohort_round(
    method: Method, state: RunState, message: Message, cohort: Cohort, data: RoundData, execution: Execution
) -> tuple[RunState, Metrics]:
    """One round over the clients of a cohort, whose states and data have been gathered.

    Args:
        method: the method.
        state: the state before the round, its `clients` those of the cohort alone (leading axis M).
        message: what the method broadcasts.
        cohort: who takes part.
        data: the data of the cohort and of the server.
        execution: how clients are mapped.

    Returns:
        The state after the round (`clients` again of the cohort alone), and the round's metrics: server scalars, and
        client metrics stacked to [M].
    """
    output = run_clients(method, message[0], data.images, client_inputs(state, message, cohort, data), execution)
    return close_round(method, state, output, cohort, data)


def client_inputs(state: RunState, message: Message, cohort: Cohort, data: RoundData) -> ClientInputs:
    """What each client of a cohort has of its own; arguments as in `run_cohort_round`."""
    return ClientInputs(message[1], state.clients, data.clients, rng.client_keys(state.key, cohort.round, cohort.ids))


def run_clients(
    method: Method, shared: PyTree, images: jax.Array, inputs: ClientInputs, execution: Execution, real: jax.Array | None = None
) -> CohortOutput:
    """The clients' part of a round: their updates, contained and aggregated.

    Args:
        method: the method.
        shared: what all clients receive alike.
        images: the pool that the rows in `inputs` refer to.
        inputs: of M clients.
        execution: how clients are mapped.
        real: bool [M], which of them are clients and not padding; None: all.
    """

    def client(common: tuple[PyTree, jax.Array], inputs: ClientInputs) -> ClientOutput:
        shared, images = common
        shard = attach(inputs.rows, images)
        return _contain(method.client_update(shared, inputs.own, inputs.state, shard, inputs.key), inputs.state)

    return run_cohort(
        client,
        (shared, images),
        inputs,
        aggregator=method.aggregator,
        execution=execution,
        work=work(inputs.rows),
        real=real,
    )


def work(rows: Shard) -> jax.Array:
    """About how much each client has to do, int32 [M]: its examples."""
    return rows.labeled.count + rows.unlabeled.count


def close_round(
    method: Method, state: RunState, output: CohortOutput, cohort: Cohort, data: RoundData
) -> tuple[RunState, Metrics]:
    """The server's part of a round, and what `run_cohort_round` returns."""
    server, metrics = method.server_update(
        state.server,
        output.aggregate,
        attach(data.server, data.images),
        rng.round_key(state.key, "server", cohort.round),
    )
    metrics = {**output.metrics, **metrics, "server/non_finite": Sum((~_all_finite(server)).astype(jnp.int32))}
    return RunState(server, output.client_states, state.round + 1, state.key), metrics


def initialize(
    method: Method, data: FederatedData, spec: DataSpec, cohort_size: int, key: jax.Array
) -> tuple[RunState, Metrics]:
    """The state before round 1, by the method's `init` and `prepare`, and the metrics of the latter."""
    server, clients = method.init(rng.stream(key, "init"), spec)
    first = sample(key, jnp.zeros((), jnp.int32), data.num_clients, cohort_size)
    server, metrics = prepare(method, server, gather(data, first, first), key)
    return RunState(server, clients, jnp.zeros((), jnp.int32), key), metrics


def prepare(method: Method, server: PyTree, data: RoundData, key: jax.Array) -> tuple[PyTree, Metrics]:
    """The server's work before round 1; `data.server.next_cohort` is the first cohort's."""
    return method.prepare(server, attach(data.server, data.images), rng.stream(key, "prepare"))


def run_round(
    method: Method, state: RunState, data: FederatedData, cohort_size: int, execution: Execution
) -> tuple[RunState, Cohort, Metrics]:
    """One round with all data and all clients' states at hand: draws the cohort, gathers, runs, scatters back."""
    cohort, rows, of_cohort, message = open_round(method, state, data, cohort_size)
    new, metrics = run_cohort_round(method, of_cohort, message, cohort, rows, execution)
    return scatter(state, new, cohort), cohort, metrics


def open_round(
    method: Method, state: RunState, data: FederatedData, cohort_size: int
) -> tuple[Cohort, RoundData, RunState, Message]:
    """What a round begins with: its cohort, their data, the state with the cohort's clients alone, and the broadcast."""
    cohort, next_cohort = (sample(state.key, r, data.num_clients, cohort_size) for r in (state.round, state.round + 1))
    message = method.broadcast(state.server, state.clients, cohort)
    of_cohort = state._replace(clients=jax.tree.map(lambda x: x[cohort.ids], state.clients))
    return cohort, gather(data, cohort, next_cohort), of_cohort, message


def scatter(before: RunState, after: RunState, cohort: Cohort) -> RunState:
    """The state after a round, of all clients, from that of its cohort alone."""
    clients = jax.tree.map(lambda x, y: x.at[cohort.ids].set(y), before.clients, after.clients)
    return after._replace(clients=clients)
