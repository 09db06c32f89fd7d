"""How the clients of a cohort are mapped: all at once, one after another, in chunks, over devices, in programs of their own.

A method's `client_update` is written for one client. Which of these runs it changes time and memory, not results: the
strategies agree to float32 rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fedjax_ssl.method import Aggregate, ClientOutput, weighted_sum
from fedjax_ssl.metrics import Metrics

PyTree = Any
CLIENTS = "clients"
STRATEGIES = ("vmap", "scan", "chunked", "sharded", "separate")
COMPILERS = ("default", "lean")
PRECISIONS = ("default", "tensorfloat32", "float32")


class Execution(NamedTuple):
    """A mapping of clients, and of their arithmetic, to hardware.

    Attributes:
        chunk_size: clients that are vmapped together; the chunks run one after another. 0: the whole cohort (`vmap`); 1: one
            client at a time, without vmap (`scan`).
        mesh: None, or a mesh with the axis `clients` over whose devices the cohort is split (`sharded`), each device
            running its clients in chunks.
        precision: in which float32 matrices are multiplied, one of PRECISIONS: `default`, the device's own (on recent NVIDIA
            GPUs TensorFloat-32, on TPUs one pass of bfloat16, on CPUs float32), or at least the one that is named.
        compiler: one of COMPILERS, which options XLA gets, see `simulator.compiler_options`.
        shrinks: whether chunks get smaller where memory is short in the first round, see `memory.in_chunks_that_fit`.
        rounds: how many rounds one dispatch runs.
        share: D where a round is traced on each of the devices of such a mesh already, as several runs' rounds are: there is
            no mesh then, each device runs its share of the cohort, and has all results.
    """

    chunk_size: int = 0
    mesh: Mesh | None = None
    precision: str = "default"
    compiler: str = "default"
    shrinks: bool = False
    rounds: int = 1
    share: int = 1

    @property
    def num_devices(self) -> int:
        """D."""
        return self.mesh.size if self.mesh is not None else self.share


def multiplied_in(precision: str) -> contextlib.AbstractContextManager:
    """Within it, programs are traced whose float32 matrices are multiplied in a precision of PRECISIONS."""
    return contextlib.nullcontext() if precision == "default" else jax.default_matmul_precision(precision)


def client_mesh(num_devices: int) -> Mesh:
    """A mesh of the first devices, over which a cohort is split.

    On a CPU, XLA ends a process in which one device waits longer than a minute for another; `launch.command.use_all_cores` sets
    the two flags (MAY_WAIT) that let it wait, where JAX is one on which they were tried.
    """
    return Mesh(np.array(jax.devices()[:num_devices]), (CLIENTS,))


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
    real: jax.Array | None = None,
) -> CohortOutput:
    """Runs `client(shared, inputs_k)` for every client of a cohort and aggregates.

    Args:
        client: the update of one client.
        shared: pytree that every client receives alike. It is passed, never closed over: `shard_map` needs to see it.
        inputs: pytree with leading axis M.
        aggregator: `sum` (the weighted mean, accumulated chunk by chunk) or `stack` (all updates, with leading axis M).
        execution: how to map.
        work: number [M], about how much each client has to do; None: all as much. Clients with as much to do share a chunk, as
            a chunk takes as long as its longest one, and the chunks are dealt to the devices so that none has much more.
        real: bool [M], which are clients and not padding, whose weight is 0; None: all.

    Returns:
        CohortOutput.
    """
    size = jax.tree.leaves(inputs)[0].shape[0]
    devices = execution.num_devices
    chunk = min(execution.chunk_size or size, -(-size // devices))
    cohort = _Slot(inputs, jnp.ones(size, bool) if real is None else real)
    one_turn = devices == 1 and chunk in (1, size)  # one after another, or all at once: in whatever order
    if not one_turn:
        ranks = dealt(size, chunk, devices)
        order = jnp.arange(size) if work is None else jnp.argsort(-work, stable=True)
        # Padding repeats the client that has the least to do, with weight 0.
        cohort = jax.tree.map(lambda x: x[order[np.minimum(ranks, size - 1)]], cohort)
        cohort = cohort._replace(real=cohort.real & (ranks < size))

    def run(shared: PyTree, cohort: _Slot) -> tuple[Aggregate | None, PyTree]:
        return _run_chunks(client, shared, cohort, chunk, aggregator)

    if execution.mesh is not None:
        run = _over_devices(run, execution.mesh)
    elif devices > 1:
        run = _of_each_device(run, devices)
    total, stacked = run(shared, cohort)
    if not one_turn:
        slots = jnp.zeros(size, jnp.int32).at[order].set(np.argsort(ranks)[:size])
        stacked = jax.tree.map(lambda x: x[slots], stacked)
    if total is None:
        return CohortOutput(Aggregate(stacked.update, stacked.weight), stacked.client_state, stacked.metrics)
    safe = jnp.where(total.weight > 0, total.weight, 1.0)
    mean = jax.tree.map(lambda x: (x / safe).astype(x.dtype), total.update)
    return CohortOutput(Aggregate(mean, total.weight), stacked.client_state, stacked.metrics)


def dealt(size: int, chunk: int, devices: int) -> np.ndarray:
    """Which of M clients, by rank, has which slot of the devices' chunks: int [slots], ranks from M on being padding.

    A chunk has clients of neighboring ranks. Chunks go to the devices in turn, forwards and backwards: with two devices the
    first has chunks 0, 3, 4, 7, ..., the second 1, 2, 5, 6, ...
    """
    turns = -(-size // (chunk * devices))
    chunks = np.arange(turns * devices).reshape(turns, devices)
    chunks[1::2] = chunks[1::2, ::-1]
    return (chunks.T.reshape(-1, 1) * chunk + np.arange(chunk)).reshape(-1)


def _over_devices(run: Callable, mesh: Mesh) -> Callable:
    """`run` with the cohort split over the mesh's devices, and the weighted sums added up over them."""

    def local(shared: PyTree, cohort: _Slot) -> tuple[Aggregate | None, PyTree]:
        total, stacked = run(shared, cohort)
        return jax.lax.psum(total, CLIENTS), stacked

    split, whole = PartitionSpec(CLIENTS), PartitionSpec()
    # The replication check would ask every method to mark the constants of its loops as varying over devices.
    return jax.shard_map(local, mesh=mesh, in_specs=(whole, split), out_specs=(whole, split), check_vma=False)


def _of_each_device(run: Callable, devices: int) -> Callable:
    """`_over_devices` for what is traced on each of the devices: they run their shares, and exchange what came out."""

    def local(shared: PyTree, cohort: _Slot) -> tuple[Aggregate | None, PyTree]:
        number = jax.lax.axis_index(CLIENTS)
        own = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:])[number], cohort)
        total, stacked = run(shared, own)
        gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, CLIENTS, tiled=True), stacked)
        return jax.lax.psum(total, CLIENTS), gathered

    return local


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
