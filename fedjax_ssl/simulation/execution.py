"""How the clients of a cohort are mapped to hardware: all at once, one after another, in chunks, over devices.

A method's `client_update` is written for one client. Which of these runs it changes time and memory, not results: the
strategies agree to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_ssl.method import Aggregate, ClientOutput, weighted_sum
from fedjax_ssl.metrics import Metrics

PyTree = Any
RUNS, CLIENTS = "runs", "clients"
"""The axes of the mesh of devices: runs at the same time, and the devices that share the clients of each."""
STRATEGIES = ("vmap", "scan", "chunked", "sharded")
PRECISIONS = ("default", "tensorfloat32", "float32")


class Execution(NamedTuple):
    """A mapping of runs, clients and their arithmetic to hardware.

    Attributes:
        chunk_size: clients that are vmapped together; the chunks run one after another. 0: all that a device has (`vmap`); 1:
            one client at a time, without vmap (`scan`).
        devices: D, which share the clients of a run (`sharded`); each runs its clients in chunks.
        runs_at_once: runs that have devices of their own at the same time.
        vmap_runs: whether the runs of a device are vmapped; else one follows another.
        batch_size: examples per forward-only pass, of evaluations and of pseudo-labels.
        precision: in which float32 matrices are multiplied, one of PRECISIONS: `default`, the device's own, or at least the
            one that is named.
        rounds: how many rounds one dispatch runs.
        auto_chunk: whether chunks are halved where the first round does not fit into memory.
    """

    chunk_size: int = 0
    devices: int = 1
    runs_at_once: int = 1
    vmap_runs: bool = False
    batch_size: int = 250
    precision: str = "default"
    rounds: int = 1
    auto_chunk: bool = False

    def mesh(self) -> Mesh | None:
        """The first devices as a mesh of RUNS x CLIENTS; None where one device does everything."""
        shape = (self.runs_at_once, self.devices)
        if shape == (1, 1):
            return None
        return Mesh(np.array(jax.devices()[: self.runs_at_once * self.devices]).reshape(shape), (RUNS, CLIENTS))

    def smaller(self, cohort_size: int) -> Execution | None:
        """An execution that takes less memory: without vmapped runs, or with chunks of half the size; None: there is none."""
        if self.vmap_runs:
            return self._replace(vmap_runs=False)
        of_device = -(-cohort_size // self.devices)
        chunk = min(self.chunk_size or of_device, of_device)
        return self._replace(chunk_size=-(-chunk // 2)) if self.auto_chunk and chunk > 1 else None


class CohortOutput(NamedTuple):
    """A cohort's results: the aggregate, and the clients' new states and metrics with leading axis M."""

    aggregate: Aggregate
    client_states: PyTree
    metrics: Metrics


class _Slot(NamedTuple):
    """One client's inputs, and whether it is a real client or padding."""

    inputs: PyTree
    real: jax.Array


ClientFn = Callable[[PyTree, PyTree], ClientOutput]


def run_cohort(
    client: ClientFn,
    shared: PyTree,
    inputs: PyTree,
    *,
    aggregator: str,
    execution: Execution,
    work: jax.Array | None = None,
) -> CohortOutput:
    """Runs `client(shared, inputs_k)` for every client of a cohort and aggregates.

    With several devices it is to be traced on each of them, under `shard_map` over the axis CLIENTS: each runs its share of the
    cohort, and all have all results.

    Args:
        client: the update of one client.
        shared: pytree that every client receives alike.
        inputs: pytree with leading axis M.
        aggregator: `sum` (the weighted mean, accumulated chunk by chunk) or `stack` (all updates, with leading axis M).
        execution: how to map.
        work: number [M], about how much each client has to do; None: all as much. Clients with as much to do share a chunk, as
            a chunk takes as long as its longest client. Chunks are dealt to the devices so that none has much more.
    """
    size = jax.tree.leaves(inputs)[0].shape[0]
    devices = execution.devices
    chunk = min(execution.chunk_size or size, -(-size // devices))
    cohort = _Slot(inputs, jnp.ones(size, bool))
    order_matters = devices > 1 or chunk not in (1, size)
    if order_matters:
        ranks = deal(size, chunk, devices)
        order = jnp.arange(size) if work is None else jnp.argsort(-work, stable=True)
        # Padding repeats the client that has the least to do, with weight 0.
        cohort = jax.tree.map(lambda x: x[order[np.minimum(ranks, size - 1)]], cohort)
        cohort = cohort._replace(real=cohort.real & (ranks < size))
    run = _on_each_device if devices > 1 else _run_chunks
    total, stacked = run(client, shared, cohort, chunk, aggregator)
    if order_matters:
        slots = jnp.zeros(size, jnp.int32).at[order].set(np.argsort(ranks)[:size])
        stacked = jax.tree.map(lambda x: x[slots], stacked)
    if total is None:
        return CohortOutput(Aggregate(stacked.update, stacked.weight), stacked.client_state, stacked.metrics)
    safe = jnp.where(total.weight > 0, total.weight, 1.0)
    mean = jax.tree.map(lambda x: (x / safe).astype(x.dtype), total.update)
    return CohortOutput(Aggregate(mean, total.weight), stacked.client_state, stacked.metrics)


def deal(size: int, chunk: int, devices: int) -> np.ndarray:
    """Which of M clients, by rank, has which slot of the devices' chunks: int [slots]; ranks from M on are padding.

    A chunk has clients of neighboring ranks. Chunks go to the devices in turn, forwards and backwards: of two devices the
    first has chunks 0, 3, 4, 7, ..., the second 1, 2, 5, 6, ...
    """
    turns = -(-size // (chunk * devices))
    chunks = np.arange(turns * devices).reshape(turns, devices)
    chunks[1::2] = chunks[1::2, ::-1]
    return (chunks.T.reshape(-1, 1) * chunk + np.arange(chunk)).reshape(-1)


def _on_each_device(
    client: ClientFn, shared: PyTree, cohort: _Slot, chunk: int, aggregator: str
) -> tuple[Aggregate | None, ClientOutput]:
    """`_run_chunks` of the device's own share; sums are added up over the devices, and all have all clients' outputs."""
    devices, number = jax.lax.axis_size(CLIENTS), jax.lax.axis_index(CLIENTS)
    own = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:])[number], cohort)
    total, stacked = _run_chunks(client, shared, own, chunk, aggregator)
    gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, CLIENTS, tiled=True), stacked)
    return jax.lax.psum(total, CLIENTS), gathered


def _run_chunks(
    client: ClientFn, shared: PyTree, cohort: _Slot, chunk: int, aggregator: str
) -> tuple[Aggregate | None, ClientOutput]:
    """Runs the slots in chunks: (sum of weighted updates and of weights, or None; the stacked outputs)."""

    # jit so that the two uses below trace the client once.
    @jax.jit
    def run_chunk(shared: PyTree, slots: _Slot) -> tuple[Aggregate | None, ClientOutput]:
        if chunk == 1:
            output = client(shared, jax.tree.map(lambda x: x[0], slots.inputs))
            output = jax.tree.map(lambda x: x[None], output)
        else:
            output = jax.vmap(client, (None, 0))(shared, slots.inputs)
        output = output._replace(weight=jnp.where(slots.real, output.weight, 0.0))
        if aggregator == "stack":
            return None, output
        total = Aggregate(jax.tree.map(lambda u: weighted_sum(u, output.weight), output.update), jnp.sum(output.weight))
        return total, output._replace(update=(), weight=())

    size = cohort.real.shape[0]
    if chunk == size:
        return run_chunk(shared, cohort)
    chunks = jax.tree.map(lambda x: x.reshape(size // chunk, chunk, *x.shape[1:]), cohort)
    shapes, _ = jax.eval_shape(run_chunk, shared, jax.tree.map(lambda x: x[0], chunks))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(total: Aggregate | None, slots: _Slot) -> tuple[Aggregate | None, ClientOutput]:
        new, output = run_chunk(shared, slots)
        return jax.tree.map(jnp.add, total, new), output

    total, stacked = jax.lax.scan(step, start, chunks)
    return total, jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), stacked)
