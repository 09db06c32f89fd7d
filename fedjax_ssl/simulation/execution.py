"""How the clients of a cohort run: all at once, one after another, in chunks, over devices.

A method's `client_update` is written for one client. How it is mapped changes time and memory, and results only by rounding.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.method import Aggregate, ClientOutput, averaged, summed
from fedjax_ssl.metrics import ClientMetrics, PerClient

RUNS, CLIENTS = "runs", "clients"  # the mesh's axes: runs at the same time, and the devices that share the clients of each


class Execution(NamedTuple):
    """How runs and clients are mapped to hardware, and in which arithmetic.

    Chunks of `chunk_size` clients, which are vmapped together, run one after another. 0: all clients of a device; 1: one client
    at a time, without vmap.
    """

    chunk_size: int = 0
    devices: int = 1  # D, which share the clients of a run
    runs_at_once: int = 1  # how many runs are computed at the same time, each on devices of its own
    vmap_runs: bool = False  # whether the runs of a device are vmapped; else they run one after another
    batch_size: int = 250  # examples per forward-only pass, of evaluations and of pseudo-labels
    precision: str = "default"  # least precision of float32 matrix products: `tensorfloat32`, `float32`, the device's `default`
    rounds: int = 1  # how many rounds one dispatch runs
    conv: str = "xla"  # how the method's network convolves, which may ask for options of the compiler
    auto_chunk: bool = False  # whether chunks are halved where the first round does not fit into memory

    def mesh(self) -> Mesh | None:
        """The devices as a mesh of RUNS x CLIENTS; None for a single device."""
        shape = (self.runs_at_once, self.devices)
        if shape == (1, 1):
            return None
        return Mesh(np.array(jax.devices()[: self.runs_at_once * self.devices]).reshape(shape), (RUNS, CLIENTS))

    def smaller(self, cohort_size: int) -> Self | None:
        """The next execution that needs less memory, without vmapped runs or with half the chunk size; None if none does."""
        if self.vmap_runs:
            return self._replace(vmap_runs=False)
        of_device = -(-cohort_size // self.devices)
        chunk = min(self.chunk_size or of_device, of_device)
        return self._replace(chunk_size=-(-chunk // 2)) if self.auto_chunk and chunk > 1 else None


class CohortOutput(NamedTuple):
    """The aggregate of a cohort, and the new states and metrics of its clients, with leading axis M."""

    aggregate: Aggregate
    client_states: PyTree
    metrics: ClientMetrics


class _Slot(NamedTuple):
    inputs: PyTree  # one client's
    real: jax.Array  # whether it is a client or padding


ClientFn = Callable[[PyTree, PyTree], ClientOutput]


def run_cohort(
    client: ClientFn,
    shared: PyTree,
    inputs: PyTree,
    *,
    aggregator: str,
    execution: Execution,
    work: jax.Array | None = None,
    record: Callable[[PyTree], PyTree] | None = None,
) -> CohortOutput:
    """Runs `client(shared, inputs_k)` for every client k of a cohort, and aggregates.

    With several devices this is traced under `shard_map` over the axis CLIENTS: each device runs its share of the cohort, and
    all of them get all results.

    `inputs` has the leading axis M. `work` [M] estimates how much each client computes; None: all alike. A chunk takes as long
    as its longest client, so clients with similar work share a chunk, and devices get similar sums of work. `record` is a
    `Method.parameters`; with it, metrics contain what `compared` adds, and all updates of a device are kept in memory.
    """
    size = jax.tree.leaves(inputs)[0].shape[0]
    devices = execution.devices
    chunk = min(execution.chunk_size or size, -(-size // devices))
    cohort = _Slot(inputs, jnp.ones(size, bool))
    order_matters = devices > 1 or chunk not in (1, size)
    if order_matters:
        ranks = deal(size, chunk, devices)
        order = jnp.arange(size) if work is None else jnp.argsort(-work, stable=True)
        # Padding repeats the client with the least work, at weight 0.
        cohort = jax.tree.map(lambda x: x[order[np.minimum(ranks, size - 1)]], cohort)
        cohort = cohort._replace(real=cohort.real & (ranks < size))
    if devices > 1:
        number = jax.lax.axis_index(CLIENTS)
        cohort = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:])[number], cohort)
    total, stacked = _run_chunks(client, shared, cohort, chunk, aggregator, record is not None)
    if devices > 1:
        total = jax.lax.psum(total, CLIENTS)
    if record is not None and total is not None:  # before devices exchange their results, so that they exchange no updates
        stacked = compared(stacked, averaged(total).update, record)._replace(update=(), weight=())
    if devices > 1:
        stacked = jax.tree.map(lambda x: jax.lax.all_gather(x, CLIENTS, tiled=True), stacked)
    if order_matters:
        slots = jnp.zeros(size, jnp.int32).at[order].set(np.argsort(ranks)[:size])
        stacked = jax.tree.map(lambda x: x[slots], stacked)
    if total is None:
        stacked = stacked if record is None else compared(stacked, averaged(summed(stacked)).update, record)
        return CohortOutput(Aggregate(stacked.update, stacked.weight), stacked.client_state, stacked.metrics)
    return CohortOutput(averaged(total), stacked.client_state, stacked.metrics)


def compared(stacked: ClientOutput, mean: PyTree, parameters: Callable[[PyTree], PyTree]) -> ClientOutput:
    """Stacked outputs whose metrics have each client's weight, its update's L2 norm, and its cosine to the weighted `mean`.

    Norm and cosine are those of the updates' `parameters`. The cosine is NaN where the update or the mean is 0.
    """
    changes, mean = jax.vmap(parameters)(stacked.update), parameters(mean)
    norm = jax.vmap(optax.tree.norm)(changes)
    lengths = norm * optax.tree.norm(mean)
    cosine = jax.vmap(optax.tree.vdot, (0, None))(changes, mean) / jnp.where(lengths > 0, lengths, jnp.nan)
    found = {"client/weight": stacked.weight, "client/update_norm": norm, "client/cosine": cosine}
    return stacked._replace(metrics={**stacked.metrics, **{name: PerClient(value) for name, value in found.items()}})


def deal(size: int, chunk: int, devices: int) -> np.ndarray:
    """The rank of the client in each slot of the devices' chunks: int [slots]; ranks from M on are padding.

    A chunk has neighboring ranks. Of two devices the first gets the chunks 0, 3, 4, 7, ..., and the second gets 1, 2, 5, 6, ...
    """
    rows = -(-size // (chunk * devices))
    chunks = np.arange(rows * devices).reshape(rows, devices)
    chunks[1::2] = chunks[1::2, ::-1]
    return (chunks.T.reshape(-1, 1) * chunk + np.arange(chunk)).reshape(-1)


def _run_chunks(
    client: ClientFn, shared: PyTree, cohort: _Slot, chunk: int, aggregator: str, record: bool
) -> tuple[Aggregate | None, ClientOutput]:
    """Runs the slots in chunks: (the sums of weighted updates and of weights, or None; the stacked outputs).

    The outputs of aggregator `sum` are without updates and weights, unless `record`.
    """

    @jax.jit  # so that the two uses below trace the client once
    def run_chunk(shared: PyTree, slots: _Slot) -> tuple[Aggregate | None, ClientOutput]:
        if chunk == 1:
            output = client(shared, jax.tree.map(lambda x: x[0], slots.inputs))
            output = jax.tree.map(lambda x: x[None], output)
        else:
            output = jax.vmap(client, (None, 0))(shared, slots.inputs)
        output = output._replace(weight=jnp.where(slots.real, output.weight, 0.0))
        if aggregator == "stack":
            return None, output
        return summed(output), output if record else output._replace(update=(), weight=())

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
