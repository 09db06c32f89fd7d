"""Several runs of one problem as one program: each with its own split, key and state, over one pool of examples.

Several devices share the runs. Where there are twice as many devices as runs, or more, a run has several, which share its
clients; each of them has its whole state. On a CPU the runs of a device follow one another. On an accelerator they are vmapped
as long as each has all of its clients at once; where that is too much for its memory, or clients go in chunks anyway, they
follow one another there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fedjax_ssl.data.federated import FederatedData, Pool, Table
from fedjax_ssl.method import Cohort, DataSpec, Method
from fedjax_ssl.metrics import Metrics, reduce
from fedjax_ssl.simulation.execution import CLIENTS, Execution
from fedjax_ssl.simulation.round import RunState, initialize, run_round
from fedjax_ssl.simulation.simulator import (
    Compiling,
    Program,
    evaluate,
    in_chunks_that_fit,
    is_key,
    placed,
    placement,
    report,
    run_if_it_fits,
)

PyTree = Any
RUNS = "runs"


class Spread(NamedTuple):
    """How runs are mapped to devices.

    Attributes:
        mesh: None, or a mesh with the axes `runs`, over which they are split, and `clients`, the devices of each run.
        vmapped: whether those of one device are vmapped where each has its clients all at once; else one follows the other.
    """

    mesh: Mesh | None
    vmapped: bool

    @property
    def num_devices(self) -> int:
        """D."""
        return self.mesh.size if self.mesh is not None else 1

    def slots(self, num_runs: int) -> int:
        """R, rounded up to as many as have their turns at the same time, or a multiple."""
        at_once = self.mesh.shape[RUNS] if self.mesh is not None else 1
        return -(-num_runs // at_once) * at_once


def spread_of(num_runs: int, num_devices: int, of_run: int = 1) -> Spread:
    """The spread of R runs, each over `of_run` devices: the fewest of the first `num_devices` that take no more turns.

    Raises:
        ValueError: there are fewer devices than one run has.
    """
    if num_devices < of_run:
        raise ValueError(f"num_devices: got {num_devices}, accepted: at least {of_run}, the devices of one run")
    turns = -(-num_runs // (num_devices // of_run))
    at_once = -(-num_runs // turns)
    devices = np.array(jax.devices()[: at_once * of_run])
    mesh = Mesh(devices.reshape(at_once, of_run), (RUNS, CLIENTS)) if devices.size > 1 else None
    return Spread(mesh, turns > 1 and devices[0].platform != "cpu")


class ManyProblem(NamedTuple):
    """What is simulated: R runs that differ in their splits, in their seeds, and in a number that their method may read.

    Attributes:
        method: the number, a traced float32 scalar, or None where there is none -> the method. One structure serves all runs:
            its static sizes are those of the largest client of any.
        train: the training pool of all.
        test: the test pool of all.
        tables: per run, the index tables of its data (TABLES), all of the same shapes.
        seeds: per run.
        numbers: per run, or None.
        spec: static facts about the data.
        cohort_size: M.
    """

    method: Callable[[Any], Method]
    train: Pool
    test: Pool
    tables: Sequence[Mapping[str, Table]]
    seeds: Sequence[int]
    numbers: Sequence[float] | None
    spec: DataSpec
    cohort_size: int


class _Inputs(NamedTuple):
    """What differs from run to run, leading axis R."""

    tables: Mapping[str, Any]
    number: Any


class ManySimulator(Compiling):
    """Runs the R runs of a problem together. Every state and every result has a leading axis of R runs, padded where devices
    share them unevenly: the runs past R repeat the first one, and nothing is reported of them.

    Args:
        problem: what to simulate.
        spread: how runs are mapped.
        execution: how the clients of a run are mapped; it has no mesh, but a share on each of a run's devices.
        eval_batch_size: test images per forward pass.

    Attributes:
        spread: as given.
        execution: as given; from the first round on with chunks that fit into memory, where memory may be short.
    """

    def __init__(self, problem: ManyProblem, spread: Spread, execution: Execution, eval_batch_size: int) -> None:
        self.execution, self.spread, self._num_runs = execution, spread, len(problem.seeds)
        self._cohort_size = problem.cohort_size
        self._whole = placement(spread.mesh)
        # What is closed over below is no part of `self`: a cycle would keep all of it in memory once it is dropped.
        split = self._split = NamedSharding(spread.mesh, PartitionSpec(RUNS)) if spread.mesh is not None else self._whole
        slots = spread.slots(self._num_runs)
        self._pools = jax.device_put((problem.train, problem.test), self._whole)
        self._inputs = jax.device_put(_Inputs(stack(padded(problem.tables, slots)), _numbers(problem, slots)), self._split)
        keys = jnp.stack([jax.random.key(seed) for seed in padded(problem.seeds, slots)])
        self._keys = jax.device_put(keys, self._split)
        self._slots = slots

        def setup(inputs: _Inputs, pools: tuple[Pool, Pool]) -> tuple[Method, FederatedData]:
            return problem.method(inputs.number), FederatedData(*pools, **inputs.tables)

        def initialize_(one: tuple[_Inputs, jax.Array], pools: tuple[Pool, Pool]) -> tuple[RunState, Metrics]:
            method, data = setup(one[0], pools)
            return initialize(method, data, problem.spec, problem.cohort_size, one[1])

        def evaluate_(one: tuple[_Inputs, PyTree], pools: tuple[Pool, Pool]) -> Metrics:
            method, data = setup(one[0], pools)
            return evaluate(method, one[1], data.test, eval_batch_size, execution)

        def program(function: Callable, execution: Execution, **options: Any) -> Program:
            vmapped = spread.vmapped and execution.chunk_size == 0

            def of_all(own: PyTree, inputs: _Inputs, pools: tuple[Pool, Pool]) -> PyTree:
                return over_runs(function, (inputs, own), pools, spread._replace(vmapped=vmapped))

            return Program(of_all, execution, out_shardings=split, **options)

        def round_program(execution: Execution) -> Program:
            def round_(one: tuple[_Inputs, RunState], pools: tuple[Pool, Pool]) -> tuple[RunState, Cohort, Metrics]:
                method, data = setup(one[0], pools)
                return run_round(method, one[1], data, problem.cohort_size, execution)

            return program(round_, execution, donate_argnums=0)

        def evaluate_program(execution: Execution) -> Program:
            return program(evaluate_, execution)

        self._round_program, self._evaluate_program = round_program, evaluate_program
        # One run after another: it is done once, and so needs no more memory than a round of one run.
        self._initialize = program(initialize_, execution._replace(chunk_size=1))
        self._round, self._evaluate = round_program(execution), evaluate_program(execution)

    def trace(self) -> None:
        """Traces the programs without compiling them: what a method cannot do with a number that is traced is raised."""
        state, _ = self._initialize.eval_shape(self._keys, self._inputs, self._pools)
        self._round.eval_shape(placed(state, self._split), self._inputs, self._pools)
        self._evaluate.eval_shape(placed(state.server, self._split), self._inputs, self._pools)

    def template(self) -> RunState:
        """A run's state as `of_runs` has it, of which nothing is computed: NumPy arrays, but for the shape of its key."""
        state, _ = self._initialize.eval_shape(self._keys, self._inputs, self._pools)
        place = SingleDeviceSharding(jax.devices()[0])

        def of_one(x: jax.ShapeDtypeStruct) -> Any:
            one = jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=place)
            return one if is_key(one) else np.empty(one.shape, one.dtype)

        return jax.tree.map(of_one, state)

    def join(self, states: Sequence[RunState]) -> RunState:
        """The state of all runs, placed, from each one's own."""
        return jax.device_put(stack(padded(states, self._slots)), self._split)

    def initialize(self) -> tuple[RunState, list[dict[str, float]]]:
        """The state before round 1, and each run's metrics of the server's preparation."""
        state, metrics = self._initialize(self._keys, self._inputs, self._pools)
        return state, self._each(metrics)

    def round(self, state: RunState, names: Sequence[str | None]) -> tuple[RunState, list[dict[str, float]]]:
        """One round of each run: the state after it (the one given is consumed) and its metrics, run by run.

        `names` are what the log calls the runs; of one without a name it says nothing.
        """
        state, cohort, metrics = self._run_round(state)
        cohort, metrics = jax.device_get((cohort, metrics))
        each = [_of_run((cohort, metrics), i) for i in range(self._num_runs)]
        return state, [report(c, m, name) if name else reduce(m) for (c, m), name in zip(each, names, strict=True)]

    def _run_round(self, state: RunState) -> tuple[RunState, Cohort, Metrics]:
        """The round's program; the first time what fits into memory, where it is not given how many clients run at once."""
        execution = self.execution
        side_by_side = self.spread.vmapped and execution.chunk_size == 0
        if self._round.compile_s or not (execution.shrinks or side_by_side):
            return run_if_it_fits(self._round, self.spread.num_devices, state, self._inputs, self._pools)
        one_after_another = [execution._replace(chunk_size=self._cohort_size)] if side_by_side else []
        self._round, self.execution, results = in_chunks_that_fit(
            self._round_program,
            [execution, *one_after_another],
            self._cohort_size,
            self._split,
            state,
            self._inputs,
            self._pools,
        )
        if self.execution != execution:  # runs that follow one another are evaluated so, too
            self._evaluate = self._evaluate_program(self.execution)
        return results

    def evaluate(self, state: RunState) -> list[dict[str, float]]:
        """Accuracy and loss of each run's global model on the test set."""
        return self._each(self._evaluate(state.server, self._inputs, self._pools))

    def _each(self, metrics: Metrics) -> list[dict[str, float]]:
        metrics = jax.device_get(metrics)
        return [reduce(_of_run(metrics, i)) for i in range(self._num_runs)]


def over_runs(function: Callable, inputs: PyTree, shared: PyTree, spread: Spread) -> PyTree:
    """`function(inputs_r, shared)` for each run, stacked; `inputs` have a leading axis of runs."""

    def local(inputs: PyTree, shared: PyTree) -> PyTree:
        if spread.vmapped:
            return jax.vmap(function, (0, None))(inputs, shared)
        return jax.lax.map(lambda one: function(one, shared), inputs)

    if spread.mesh is None:
        return local(inputs, shared)
    split, whole = PartitionSpec(RUNS), PartitionSpec()
    return jax.shard_map(local, mesh=spread.mesh, in_specs=(split, whole), out_specs=split, check_vma=False)(inputs, shared)


def of_runs(state: RunState, num_runs: int) -> list[RunState]:
    """Each run's state, as it has it alone: in NumPy arrays, but for typed keys."""
    leaves, structure = jax.tree.flatten(state)
    host = jax.device_get([jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves])

    def one(run: int) -> list[Any]:
        both = zip(leaves, host, strict=True)
        return [jax.random.wrap_key_data(h[run], impl=jax.random.key_impl(x)) if is_key(x) else h[run] for x, h in both]

    return [jax.tree.unflatten(structure, one(run)) for run in range(num_runs)]


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Pytrees of the same shapes as one with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves) if is_key(leaves[0]) else np.stack(leaves), *trees)


def padded(items: Sequence[Any], slots: int) -> list[Any]:
    """The items, and the first one again until there are as many as `slots`."""
    return [*items, *[items[0]] * (slots - len(items))]


def _of_run(tree: PyTree, run: int) -> PyTree:
    return jax.tree.map(lambda x: x[run], tree)


def _numbers(problem: ManyProblem, slots: int) -> jax.Array | None:
    """The numbers float32 [R], weakly typed as Python's are, so that they leave the dtype of what they meet as it is."""
    if problem.numbers is None:
        return None
    values = np.array(padded(problem.numbers, slots), np.float32)
    return jnp.full(values.shape, 0.0).at[...].set(values)
