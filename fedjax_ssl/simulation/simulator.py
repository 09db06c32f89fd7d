"""The compiled programs of a run: initialization, the round and evaluation, each traced and compiled once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from fedjax_ssl.data import batching
from fedjax_ssl.data.federated import FederatedData, Pool
from fedjax_ssl.method import Cohort, DataSpec, Method
from fedjax_ssl.metrics import Mean, Metrics, mean, reduce
from fedjax_ssl.simulation import memory
from fedjax_ssl.simulation.execution import CLIENTS, Execution, multiplied_in
from fedjax_ssl.simulation.round import RunState, initialize, run_round
from fedjax_ssl.ssl import losses

PyTree = Any
_log = logging.getLogger(__name__)


LEAN: dict[str, str | bool] = {
    "xla_cpu_enable_concurrency_optimized_scheduler": False,
    "xla_cpu_copy_insertion_use_region_analysis": True,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE",
}
"""Options for CPUs: operations in an order that is easy on the caches, not one that lets many run beside each other; no copies
of what a loop may overwrite; convolutions by Eigen in place of YNNPACK."""
ON_GPU: dict[str, str | bool] = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": "0",
}
"""Options for GPUs, so that the same run gives the same bits: no sums in whatever order threads come, and nothing that is
chosen by trial while it is compiled. Matrix products are cuBLAS's, as Triton's take long to compile."""

LARGE_S = 2.0
"""Seconds of compiling after which `memory.trim`, which takes a fraction of one, is worth it."""


def compiler_options(platform: str, compiler: str = "default") -> dict[str, str | bool]:
    """What XLA is asked for; the environment variable XLA_FLAGS goes first.

    A CPU has LLVM's optimization level 2, which compiles faster than 3, the default; `lean` adds LEAN, of which
    `benchmarks/round_time.py` measures what it does to each network. A GPU has ON_GPU.

    Args:
        platform: as `jax.default_backend()` names it; there are options for `cpu` and `gpu`.
        compiler: one of COMPILERS, of a CPU.
    """
    on_cpu = {"xla_backend_optimization_level": "2"} | (LEAN if compiler == "lean" else {})
    options = {"cpu": on_cpu, "gpu": ON_GPU}.get(platform, {})
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


class Program:
    """A function that is compiled at its first call, ahead of time, and never traced again.

    A call with other shapes, dtypes or placements is an error, not a silent second compilation.

    Args:
        function: what to compile.
        execution: in whose precision matrices are multiplied, and by whose compiler's options it is made.
        **jit_options: for `jax.jit`.

    Attributes:
        compile_s: seconds that tracing and compiling took, failures included; 0 before the first call.
        has_room: whether it was found that the memory it needs is there; whoever finds that says so here.
    """

    def __init__(self, function: Callable, execution: Execution, **jit_options: Any) -> None:
        self._jitted = jax.jit(function, **jit_options)
        self._execution = execution
        self._compiled: jax.stages.Compiled | None = None
        self.compile_s = 0.0
        self.has_room = False

    def eval_shape(self, *args: Any) -> Any:
        """Shapes and dtypes of the function's results."""
        return self._jitted.eval_shape(*args)

    @property
    def memory_bytes(self) -> int:
        """Device memory that a call needs at most, arguments and results included; 0 before the first call, or unknown."""
        if (needs := self._needs()) is None:
            return 0
        sizes = needs.argument_size_in_bytes + needs.output_size_in_bytes + needs.temp_size_in_bytes
        return sizes - needs.alias_size_in_bytes

    @property
    def argument_bytes(self) -> int:
        """How much of that the arguments take, which are there before the call."""
        return 0 if (needs := self._needs()) is None else needs.argument_size_in_bytes

    def _needs(self) -> Any:
        return self._compiled.memory_analysis() if self._compiled is not None else None

    def __call__(self, *args: Any) -> Any:
        """Runs the function, compiling it first where this is the first call."""
        return self.compiled(*args)(*args)

    def compiled(self, *args: Any) -> jax.stages.Compiled:
        """The program for such arguments, compiled where it is not yet."""
        if self._compiled is None:
            start = time.perf_counter()
            try:
                with multiplied_in(self._execution.precision):
                    lowered = self._jitted.lower(*args)
                self._compiled = compile_with_known(lowered, compiler_options(jax.default_backend(), self._execution.compiler))
            finally:
                if time.perf_counter() - start > LARGE_S:
                    memory.trim()
                self.compile_s += time.perf_counter() - start
        return self._compiled


def compile_with_known(lowered: jax.stages.Lowered, options: dict[str, str | bool]) -> jax.stages.Compiled:
    """The program, compiled with the options; without those that this XLA does not know, and a line in the log for each."""
    options = dict(options)
    while True:
        try:
            return lowered.compile(options)
        except jax.errors.JaxRuntimeError as error:
            unknown = [name for name in options if f"No such compile option: '{name}'" in str(error)]
            if not unknown:
                raise
            _log.warning("XLA of jax %s has no option %s: compiling without", jax.__version__, unknown[0])
            del options[unknown[0]]


class Problem(NamedTuple):
    """What is simulated.

    Attributes:
        method: the method.
        data: the federated data.
        spec: static facts about it.
        cohort_size: M.
    """

    method: Method
    data: FederatedData
    spec: DataSpec
    cohort_size: int


class Compiling:
    """What is known of the programs of a simulator once they are compiled."""

    _initialize: Program
    _round: Program
    _evaluate: Program

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return sum(program.compile_s for program in (self._initialize, self._round, self._evaluate))

    @property
    def memory_bytes(self) -> int:
        """Memory of one device that a round needs at most, data and states included; 0 before round 1."""
        return self._round.memory_bytes


class Simulator(Compiling):
    """Runs a problem with all data and client states on the device.

    Args:
        problem: what to simulate.
        execution: how clients are mapped.
        eval_batch_size: test images per forward pass.

    Attributes:
        execution: as given; from the first round on with chunks that fit into memory.
    """

    def __init__(self, problem: Problem, execution: Execution, eval_batch_size: int) -> None:
        method, data, spec, cohort_size = problem
        self.execution = execution
        whole = placement(execution.mesh)
        self._data = jax.device_put(data, whole)
        by_client = client_sharding(execution.mesh, spec.num_clients)
        state = RunState(server=whole, clients=by_client, round=whole, key=whole)

        def initialize_(data: FederatedData, key: jax.Array) -> tuple[RunState, Metrics]:
            return initialize(method, data, spec, cohort_size, key)

        def evaluate_(server: PyTree, test: Pool) -> Metrics:
            return evaluate(method, server, test, eval_batch_size, execution)

        # The state is placed before round 1 and comes back placed alike, so that the round is compiled once.
        self._initialize = Program(initialize_, execution, out_shardings=(state, whole))
        self._evaluate = Program(evaluate_, execution)
        self._where, self._problem = state, problem
        self._round = self._program(execution)

    def _program(self, execution: Execution) -> Program:
        """The rounds of one dispatch; where they are several, cohorts and metrics have a leading axis of rounds."""
        method, _, _, cohort_size = self._problem

        def round_(state: RunState, data: FederatedData) -> tuple[RunState, Cohort, Metrics]:
            if execution.rounds == 1:
                return run_round(method, state, data, cohort_size, execution)

            def one(state: RunState, _: None) -> tuple[RunState, tuple[Cohort, Metrics]]:
                state, cohort, metrics = run_round(method, state, data, cohort_size, execution)
                return state, (cohort, metrics)

            state, (cohorts, metrics) = jax.lax.scan(one, state, length=execution.rounds)
            return state, cohorts, metrics

        shared = self._where.round
        return Program(round_, execution, donate_argnums=0, out_shardings=(self._where, shared, shared))

    def template(self, seed: int) -> RunState:
        """The shapes, dtypes and placement of a run's state, without computing one."""
        state, _ = self._initialize.eval_shape(self._data, self._key(seed))
        return RunState(*(placed(part, where) for part, where in zip(state, self._where, strict=True)))

    def _key(self, seed: int) -> jax.Array:
        return jax.device_put(jax.random.key(seed), self._where.key)

    def initialize(self, seed: int) -> tuple[RunState, dict[str, float]]:
        """The state before round 1, and the metrics of the server's preparation."""
        state, metrics = self._initialize(self._data, self._key(seed))
        return state, reduce(jax.device_get(metrics))

    def round(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """One round: the state after it (the one given is consumed) and its metrics. For `execution.rounds` of 1."""
        state, (metrics,) = self.dispatch(state)
        return state, metrics

    def dispatch(self, state: RunState) -> tuple[RunState, list[dict[str, float]]]:
        """`execution.rounds` rounds: the state after them (the one given is consumed), and each one's metrics.

        The first one finds out what fits into memory, where the execution says that chunks may shrink.
        """
        if self.execution.shrinks and not self._round.compile_s:
            size = self._problem.cohort_size
            fitted = in_chunks_that_fit(self._program, (self.execution,), size, self._where, state, self._data)
            self._round, self.execution, (state, cohort, metrics) = fitted
        else:
            state, cohort, metrics = run_if_it_fits(self._round, self.execution.num_devices, state, self._data)
        if self.execution.rounds == 1:
            return state, [report(cohort, metrics)]
        found = jax.device_get((cohort, metrics))
        return state, [report(*jax.tree.map(lambda x, i=i: x[i], found)) for i in range(self.execution.rounds)]

    def evaluate(self, state: RunState) -> dict[str, float]:
        """Accuracy and loss of the global model on the test set."""
        return reduce(jax.device_get(self._evaluate(state.server, self._data.test)))


def run_if_it_fits(program: Program, devices: int, *args: Any) -> Any:
    """The results of a round's program, over so many devices, in an execution that stays as it is.

    On a CPU, where the system ends a process that takes too much memory, it is not begun if it asks for more than nine tenths
    of what is free.

    Raises:
        OutOfMemoryError: the message says what to do.
    """
    if not program.has_room and jax.default_backend() == "cpu":
        program.compiled(*args)
        try:
            memory.check(program.memory_bytes, devices, program.argument_bytes)
        except memory.OutOfMemoryError as error:
            raise memory.OutOfMemoryError(f"no memory ({error}): {memory.ADVICE}") from error
        program.has_room = True
    return program(*args)


def in_chunks_that_fit(
    make: Callable[[Execution], Program],
    executions: Sequence[Execution],
    cohort_size: int,
    where: PyTree,
    state: RunState,
    *data: Any,
) -> tuple[Program, Execution, Any]:
    """The first round, so that it fits into memory: its program, the execution that it was made for, and its results.

    The program's `compile_s` has the seconds of all that were compiled to find it.

    Args:
        make: the program of a round (state, *data) for an execution.
        executions: to begin with, see `memory.in_chunks_that_fit`.
        cohort_size: M.
        where: placement of the state, or of its parts.
        state: before the round; it is consumed.
        *data: the program's other arguments.
    """
    kept = copied(state)  # a round that fails may have consumed it
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array):  # and not a copy on the host
            leaf.delete()
    abstract = jax.tree.map(lambda sharding, part: placed(part, sharding), where, kept)
    programs: dict[int, Program] = {}
    devices = len(jax.tree.leaves(where)[0].device_set)

    def place() -> RunState:
        return jax.device_put(jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else x, kept), where)

    def program_of(execution: Execution) -> Program:
        if execution.chunk_size not in programs:
            programs[execution.chunk_size] = make(execution)
        return programs[execution.chunk_size]

    def run(execution: Execution) -> tuple[Program, Any]:
        program, placed_state = program_of(execution), place()
        program.compiled(placed_state, *data)
        memory.check(program.memory_bytes, devices, program.argument_bytes)
        results = jax.block_until_ready(program(placed_state, *data))
        program.has_room = True
        return program, results

    def needs(execution: Execution) -> int:
        program = program_of(execution)
        if not program.compile_s:  # one that could not be compiled is not tried again
            try:
                program.compiled(abstract, *data)
            except jax.errors.JaxRuntimeError as error:
                if not memory.is_short(error):
                    raise
        return program.memory_bytes

    (program, results), execution = memory.in_chunks_that_fit(run, needs, executions, cohort_size, devices)
    program.compile_s = sum(one.compile_s for one in programs.values())
    return program, execution, results


def copied(state: PyTree) -> PyTree:
    """A state on the host, in arrays of its own but for typed keys: what a round does with the original leaves it alone."""
    return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else np.array(x), state)


def is_key(x: Any) -> bool:
    """Whether an array is of typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def report(cohort: Cohort, metrics: Metrics, run: str = "") -> dict[str, float]:
    """A round's metrics as numbers; waits for the device. Clients whose update was not finite are named in the log.

    `run` names the run there, where there are several.
    """
    cohort, metrics = jax.device_get((cohort, metrics))
    broken = cohort.ids[metrics["client/non_finite"].total > 0]
    if len(broken):
        names = ", ".join(map(str, broken.tolist()))
        where = f"{run}, round" if run else "round"
        _log.warning("%s %d: client(s) %s returned NaN or infinity and were left out", where, cohort.round + 1, names)
    return reduce(metrics)


def placed(tree: PyTree, where: Sharding) -> PyTree:
    """The shapes and dtypes of `tree`, with a placement."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def placement(mesh: Mesh | None) -> Sharding:
    """Where arrays that every device needs are placed."""
    return NamedSharding(mesh, PartitionSpec()) if mesh is not None else SingleDeviceSharding(jax.devices()[0])


def client_sharding(mesh: Mesh | None, num_clients: int) -> Sharding:
    """Client states are spread over the devices where K allows it, so that they take no device more than its share."""
    if mesh is not None and num_clients % mesh.size == 0:
        return NamedSharding(mesh, PartitionSpec(CLIENTS))
    return placement(mesh)


def evaluate(method: Method, server: PyTree, test: Pool, batch_size: int, execution: Execution) -> Metrics:
    """Accuracy (fraction) and mean cross-entropy (nats) of the global model on a pool of labeled images.

    Args:
        method: whose `predict` is evaluated, and `predict_also` by accuracy.
        server: its server state.
        test: N images and labels.
        batch_size: images per forward pass.
        execution: whose devices share the batches.
    """
    (n,) = test.labels.shape
    size = min(batch_size, n)
    accuracies = {"eval/accuracy": method.predict} | {f"eval/accuracy_{k}": f for k, f in method.predict_also.items()}

    def of_batch(number: jax.Array, server: PyTree, test: Pool) -> dict[str, Mean]:
        batch = batching.in_order(number, jnp.int32(n), n, size)
        images, labels = test.images[batch.positions], test.labels[batch.positions]
        logits = {name: predict(server, images, batch.mask) for name, predict in accuracies.items()}
        new = {name: mean(jnp.argmax(outputs, axis=-1) == labels, batch.mask) for name, outputs in logits.items()}
        new["eval/loss"] = mean(losses.cross_entropy(logits["eval/accuracy"], labels), batch.mask)
        return new

    def every(server: PyTree, test: Pool, first: jax.Array | int = 0, stride: int = 1) -> dict[str, Mean]:
        """The batches first, first + stride, ...; those past the end are empty."""

        def step(s: jax.Array, total: dict[str, Mean]) -> dict[str, Mean]:
            return jax.tree.map(jnp.add, total, of_batch(first + s * stride, server, test))

        zero = Mean(jnp.zeros(()), jnp.zeros(()))
        return jax.lax.fori_loop(0, -(-n // (size * stride)), step, dict.fromkeys((*accuracies, "eval/loss"), zero))

    if execution.num_devices == 1:
        return every(server, test)

    def share(server: PyTree, test: Pool) -> dict[str, Mean]:
        return jax.lax.psum(every(server, test, jax.lax.axis_index(CLIENTS), execution.num_devices), CLIENTS)

    if execution.mesh is None:
        return share(server, test)
    whole = PartitionSpec()
    return jax.shard_map(share, mesh=execution.mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False)(server, test)
