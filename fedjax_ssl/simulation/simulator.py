"""The compiled programs of a simulation: initialization, rounds and evaluation, each compiled once, for R runs.

The states and programs of a single run have no axis of runs.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.data.federated import Pool
from fedjax_ssl.method import Cohort
from fedjax_ssl.metrics import ClientMetrics, Metrics, reduce
from fedjax_ssl.simulation import contract, memory
from fedjax_ssl.simulation.distributed import fetched, from_first, is_key, put
from fedjax_ssl.simulation.execution import CLIENTS, RUNS, Execution
from fedjax_ssl.simulation.program import Program
from fedjax_ssl.simulation.results import CLIENTS_KEY, Row, each_client, evaluate, of_clients, report
from fedjax_ssl.simulation.round import RunState, run_round
from fedjax_ssl.simulation.source import Problem, RunInputs, source_of

_log = logging.getLogger(__name__)


class _Specs(NamedTuple):
    """How arrays lie on the mesh: what all runs share, what each run has, and the parts of a state."""

    whole: Any
    runs: Any
    state: RunState


class Simulator:
    """Runs a problem's rounds; after the first round, `execution` has chunks that fit into memory."""

    def __init__(self, problem: Problem, execution: Execution) -> None:
        self.problem, self.execution = problem, execution
        self._several = problem.num_runs > 1
        self._on_host = self._several or jax.process_count() > 1  # whether the states of `split` and `join` are on the host
        self._mesh = execution.mesh()
        # A multiple of `runs_at_once`: slots past the R runs repeat the first run, and are not reported.
        self._slots = -(-problem.num_runs // execution.runs_at_once) * execution.runs_at_once
        whole, axis = PartitionSpec(), (RUNS,) if self._several else ()
        self._source = source_of(problem, execution, self._placed(whole))
        runs = PartitionSpec(*axis)
        clients = PartitionSpec(*axis, CLIENTS) if self._source.shards > 1 else runs
        self._specs = _Specs(whole, runs, RunState(runs, clients, runs, runs))
        self._where = self._placed(self._specs)
        self._pools = put(self._source.pools, self._where.whole)
        inputs = [RunInputs(tables, None) for tables in self._source.tables]
        self._inputs = put(self._join(inputs)._replace(number=self._numbers()), self._where.runs)
        self._key = put(self._join([jax.random.key(seed) for seed in problem.seeds]), self._where.runs)
        self._initialize, self._round, self._recorded, self._evaluate, self._of_clients = self._programs(execution)
        self._discarded_s = 0.0  # spent on programs that did not fit into memory
        self.prepared: list[Row] = [{}] * problem.num_runs  # each run's metrics of `prepare`, once it is initialized

    def _placed(self, specs: PyTree) -> PyTree:
        """The placements of arrays that lie on the mesh as `specs` say."""

        def place(spec: PartitionSpec) -> Sharding:
            return NamedSharding(self._mesh, spec) if self._mesh else SingleDeviceSharding(jax.devices()[0])

        return jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def _numbers(self) -> jax.Array | None:
        """The runs' numbers, float32 [R], weakly typed like Python floats, so arrays combined with them keep their dtype."""
        if self.problem.numbers is None:
            return None
        values = self._join([np.float32(number) for number in self.problem.numbers])
        return jnp.full(np.shape(values), 0.0).at[...].set(values)

    # --- programs ------------------------------------------------------------------------------------------------------

    def _programs(self, execution: Execution) -> tuple[Program, Program, Program, Program, Program]:
        """Initialization, the rounds of a dispatch, the same with clients recorded, evaluation, and evaluation of the clients.

        They do not refer to `self`, so that it can be freed.
        """
        problem, source, specs = self.problem, self._source, self._specs

        def one(state: RunState, data: tuple[Any, ...], record: bool) -> tuple[RunState, tuple[Cohort, ClientMetrics]]:
            ready = source.open(state, *data)
            new, metrics = run_round(ready, execution, record=record, stop=problem.stop)
            return source.close(state, new, ready.cohort), (ready.cohort, metrics)

        def rounds(state: RunState, *data: Any, record: bool = False) -> tuple[RunState, Cohort, ClientMetrics]:
            if execution.rounds == 1:
                state, (cohort, metrics) = one(state, data, record)
            else:
                state, (cohort, metrics) = jax.lax.scan(
                    lambda state, _: one(state, data, record), state, length=execution.rounds
                )
            return state, cohort, metrics

        def recorded_rounds(state: RunState, *data: Any) -> tuple[RunState, Cohort, ClientMetrics]:
            return rounds(state, *data, record=True)

        def evaluation(server: PyTree, inputs: RunInputs, pools: tuple[Pool, Pool]) -> tuple[Metrics, jax.Array | None]:
            method, validation = problem.checked_method(inputs.number), inputs.tables.get("validation")
            num_classes = problem.spec.num_classes if problem.scores else 0
            found, logits = evaluate(method, server, pools[1], execution, num_classes=num_classes)
            if validation is not None:
                found |= evaluate(method, server, pools[0], execution, validation=validation)[0]
            return found, logits

        def clients(server: PyTree, inputs: RunInputs, pools: tuple[Pool, Pool]) -> jax.Array:
            method = problem.checked_method(inputs.number)
            return of_clients(method, server, pools[0], execution, inputs.tables["client_test"])

        each, state, shared, one_by_one = specs.runs, specs.state, [specs.whole], execution._replace(vmap_runs=False)
        initialize = self._program(source.initialize, one_by_one, [each, each], shared, (state, each))
        of_rounds, recorded = (
            self._program(function, execution, [state, each], shared, (state, each, each), donate_argnums=0)
            for function in (rounds, recorded_rounds)
        )
        evaluated, of_each = (self._program(f, execution, [each, each], shared, each) for f in (evaluation, clients))
        return initialize, of_rounds, recorded, evaluated, of_each

    def _program(
        self,
        function: Callable[..., PyTree],
        execution: Execution,
        per_run: list[PyTree],
        shared: list[PyTree],
        results: PyTree,
        **options: Any,
    ) -> Program:
        """`function(*per_run, *shared)` of one run, for all runs and devices; `per_run` are specs of each run's arguments."""
        several, mesh, where = self._several, self._mesh, self._placed(results)

        def local(*args: PyTree) -> PyTree:
            if not several:
                return function(*args)
            of_runs, of_all = args[: len(per_run)], args[len(per_run) :]
            if execution.vmap_runs:
                return jax.vmap(lambda *one: function(*one, *of_all))(*of_runs)
            return jax.lax.map(lambda one: function(*one, *of_all), of_runs)

        local.__name__ = function.__name__  # the program's, in profiles and caches
        if mesh is not None:
            # The replication check would ask every method to mark the constants of its loops as varying over devices.
            local = jax.shard_map(local, mesh=mesh, in_specs=(*per_run, *shared), out_specs=results, check_vma=False)
        return Program(local, execution, out_shardings=where, **options)

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        programs = (self._initialize, self._round, self._recorded, self._evaluate, self._of_clients)
        return self._discarded_s + sum(program.compile_s for program in programs)

    @property
    def memory_bytes(self) -> int:
        """Device memory of a round, data and states included; 0 before round 1."""
        return self._round.memory_bytes()[0]

    @property
    def _local_devices(self) -> int:
        return len(self._mesh.local_devices) if self._mesh else 1

    def trace(self) -> None:
        """Traces the programs without compiling them; a method that breaks its contract is an error here.

        What is traced once is not traced again when it is compiled.
        """
        state, prepared, metrics = self._source.trace(self._initialize, self._round, self._inputs, self._key, self._pools)
        contract.check_names(prepared, metrics, "prepare", "a round")
        self._evaluate.eval_shape(state.server, self._inputs, self._pools)

    def compile(self) -> None:
        """Compiles a round without running it; OutOfMemoryError where it does not fit. For data on the device."""
        state, _ = self._initialize.eval_shape(self._inputs, self._key, self._pools)
        self._round.compiled(placed(state, self._where.state), self._inputs, self._pools)
        memory.check(*self._round.memory_bytes(), self._local_devices)

    # --- rounds --------------------------------------------------------------------------------------------------------

    def initialize(self) -> RunState:
        """The state before round 1; round 1's rows have the metrics of `prepare`."""
        self.trace()
        state, metrics = self._source.start(self._initialize, self._inputs, self._key, self._pools)
        self.prepared = self._of_each_run(metrics)
        return state

    def dispatch(
        self, state: RunState, labels: Sequence[str | None] = ("",), *, record: bool = False
    ) -> tuple[RunState, list[list[Row]]]:
        """Runs `execution.rounds` rounds: the state after them, and a row per round and run. It consumes the given `state`.

        `labels` are the runs' names in the log; nothing is logged of a run whose label is None. With `record` each row also has
        what `each_client` gives, under CLIENTS_KEY; this takes a second program, which is compiled once as well.
        """
        check_alive(state)
        args = self._source.fetch(state, self._inputs, self._pools)
        program = self._recorded if record else self._round
        new, cohort, metrics = program(*args) if program.fits else self._first_round(record, *args)
        new = self._source.store(state, new)
        cohort, metrics = jax.device_get(jax.block_until_ready((cohort, metrics)))

        def row(run: int, number: int, label: str | None) -> Row:
            at = (run,) * self._several + (number,) * (self.execution.rounds > 1)
            whose, what = jax.tree.map(lambda x: x[at] if at else x, (cohort, metrics))
            found = report(whose, what, label) | ({CLIENTS_KEY: each_client(whose, what)} if record else {})
            return found | self.prepared[run] if whose.round == 0 else found

        return new, [[row(i, j, label) for i, label in enumerate(labels)] for j in range(self.execution.rounds)]

    def round(self, state: RunState) -> tuple[RunState, Row]:
        """One round of one run, where a dispatch is one round: the state after it and its metrics."""
        state, ((row,),) = self.dispatch(state)
        return state, row

    def _first_round(self, record: bool, state: RunState, *data: PyTree) -> tuple[RunState, Cohort, ClientMetrics]:
        """The first round of its program, in chunks that are halved until it fits into memory."""
        size = self.problem.spec.cohort_size
        saved = copied(state) if self.execution.smaller(size) else None  # a round that fails may have consumed it
        while True:
            program = self._recorded if record else self._round
            try:
                program.compiled(state, *data)
                memory.check(*program.memory_bytes(), self._local_devices)
                results = jax.block_until_ready(program(state, *data))
                program.fits = True
                return results
            except (memory.OutOfMemoryError, jax.errors.JaxRuntimeError) as error:
                if not memory.is_short(error):
                    raise
                if (smaller := self.execution.smaller(size)) is None:
                    raise memory.OutOfMemoryError(memory.explained(error)) from error
                chunk = smaller.chunk_size
                unit = {0: "one run after another", 1: "one client at a time"}.get(chunk, f"{chunk} clients at a time")
                _log.warning("no memory (%s): %s from now on", memory.reason(error), unit)
            gone = (self._round, self._recorded, self._evaluate, self._of_clients)
            self._discarded_s += sum(program.compile_s for program in gone)
            self.execution = smaller
            _, self._round, self._recorded, self._evaluate, self._of_clients = self._programs(smaller)
            state = jax.device_put(copied(saved), self._where.state)

    def evaluate(self, state: RunState) -> list[Row]:
        """Accuracy and loss of each run's global model on the test set and, as `eval/val_...`, on the validation examples.

        The problem's scores on the test set are there as `eval/...`, unless they are NaN.
        """
        check_alive(state)
        metrics, logits = jax.device_get(jax.block_until_ready(self._evaluate(state.server, self._inputs, self._pools)))
        rows = self._of_each_run(metrics)
        if self.problem.scores is not None:
            labels = np.asarray(self.problem.test.labels)
            for row, own in zip(rows, logits if self._several else [logits], strict=False):  # slots past the runs have no row
                found = self.problem.scores(own, labels)
                row.update({f"eval/{key}": value for key, value in found.items() if not np.isnan(value)})
        return rows

    def client_accuracies(self, state: RunState) -> list[np.ndarray]:
        """For each run the global model's accuracy on each client's own test examples, float64 [K]; NaN where there is none."""
        check_alive(state)
        right = np.asarray(jax.device_get(self._of_clients(state.server, self._inputs, self._pools)))
        found = []
        for tables, own in zip(self.problem.tables, right if self._several else [right], strict=False):
            count = np.asarray(tables["client_test"].count, np.float64)
            found.append(np.divide(own.sum(axis=1), count, out=np.full(len(count), np.nan), where=count > 0))
        return found

    def _of_each_run(self, metrics: Metrics) -> list[Row]:
        """Each run's metrics as numbers."""
        metrics = jax.device_get(jax.block_until_ready(metrics))
        if not self._several:
            return [reduce(metrics)]
        return [reduce(jax.tree.map(lambda x, i=i: x[i], metrics)) for i in range(self.problem.num_runs)]

    # --- states --------------------------------------------------------------------------------------------------------

    def template(self) -> RunState:
        """The shapes and placements, without values, of one run's state as `join` takes it."""
        state = self._source.shapes(self._initialize, self._inputs, self._key, self._pools)
        if not self._on_host:
            return placed(state, self._where.state)

        def of_one(x: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
            shape = x.shape[1:] if self._several else x.shape
            return jnp.empty(shape, x.dtype) if is_key(x) else np.empty(shape, x.dtype)

        return jax.tree.map(of_one, state)

    def join(self, states: Sequence[RunState]) -> RunState:
        """The state of all runs, on the devices, from each run's own; with several processes those of process 0 count."""
        return put(from_first(self._join(states)), self._where.state) if self._on_host else states[0]

    def split(self, state: RunState) -> list[RunState]:
        """Each run's own state; with several runs or processes it is in NumPy arrays, except for typed keys."""
        check_alive(state)
        if not self._on_host:
            return [state]
        host = fetched(state)
        return [jax.tree.map(lambda x, i=i: x[i], host) for i in range(self.problem.num_runs)] if self._several else [host]

    def _join(self, trees: Sequence[PyTree]) -> PyTree:
        """Pytrees of all runs as one with a leading axis, padded to `_slots` runs; of one run as it is."""
        if not self._several:
            return trees[0]
        trees = [*trees, *[trees[0]] * (self._slots - len(trees))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves) if is_key(leaves[0]) else np.stack(leaves), *trees)


def check_alive(state: PyTree) -> None:
    """Raises ValueError for a state that a round has consumed."""
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        accepted = "the newest, or a copy from before: fedjax_ssl.copied(state)"
        raise ValueError(f"state: got one that a round has consumed, accepted: {accepted}")


def copied(state: PyTree) -> PyTree:
    """A copy of a state in NumPy arrays, except for typed keys; it stays when a round consumes the original."""
    check_alive(state)
    return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else np.array(x), state)


def placed(state: RunState, where: RunState) -> RunState:
    """The shapes and dtypes of a state, with a placement for each part; NumPy arrays stay on the host."""

    def of_part(part: PyTree, place: Sharding) -> PyTree:
        def of_leaf(x: Any) -> Any:
            return x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(of_leaf, part)

    return RunState(*map(of_part, state, where))
