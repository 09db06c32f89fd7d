"""Where a run's data and client states are: on the device, or on the host, which sends each round what its cohort needs.

Both sources have the same functions. `initialize`, `open` and `close` are traced, as parts of the simulator's programs. The
others are not: `start` gives the state before round 1, and `trace` and `shapes` give its shapes; `fetch` gives a round's
arguments, and `store` gives the state after the round. `tables` and `pools` are sent to the devices once, before round 1.
`shards` is the number of devices that share the client states.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from fedjax_ssl.arrays import Number, PyTree
from fedjax_ssl.data.federated import Examples, FederatedData, Pool, Table
from fedjax_ssl.method import Cohort, DataSpec, Method
from fedjax_ssl.metrics import ClientMetrics, Metrics
from fedjax_ssl.simulation import client_states, contract, rng
from fedjax_ssl.simulation.asynchronous import buffered
from fedjax_ssl.simulation.cohort import draw
from fedjax_ssl.simulation.execution import CLIENTS, Execution
from fedjax_ssl.simulation.program import Program
from fedjax_ssl.simulation.round import Round, RoundData, RunState, assemble, gather, prepare, run_client
from fedjax_ssl.simulation.system import System

DRAWN = 64  # rounds whose cohorts the host draws by one call


class Problem(NamedTuple):
    """What is simulated: R runs, which differ in their splits, their seeds, and in a number that their method may read."""

    method: Callable[[Number | None], Method]  # a run's number, a traced float32 scalar, or None if it has none -> its method
    train: Pool  # all runs share both pools
    test: Pool
    tables: tuple[Mapping[str, PyTree], ...]  # each run's index tables and profiles, by name, all of the same shapes
    seeds: tuple[int, ...]
    numbers: tuple[float, ...] | None  # one per run, or None
    spec: DataSpec
    rounds: int | None  # how many rounds a run has; None unless its method reads that (`Requires.rounds`)
    on_host: bool = False  # whether training images and client states stay on the host; for one run
    on_disk: bool = False  # whether client states that stay on the host are in a file
    system: System | None = None  # how uneven clients are treated; needs `profiles` among the tables
    scores: Callable[[np.ndarray, np.ndarray], Mapping[str, float]] | None = None  # of the test set's logits and labels
    stop: bool = False  # whether a round in which a client is left out leaves the state as it was

    @property
    def num_runs(self) -> int:
        """The number R of runs."""
        return len(self.seeds)

    def checked_method(self, number: Number | None) -> Method:
        """The method for a run's number, with functions that check what they return."""
        method = contract.checked(self.method(number), self.spec)
        if self.system is None or not self.system.is_async:
            return method
        system = self.system
        return buffered(method, self.spec, system.concurrency, system.staleness, lambda: self._update(method))

    def _update(self, method: Method) -> PyTree:
        """The shapes of a client's update."""

        def update(key: jax.Array, data: FederatedData) -> PyTree:
            cohort = Cohort(jnp.zeros(self.spec.cohort_size, jnp.int32), jnp.int32(0), self.rounds)
            server, clients = method.init(key, self.spec)
            state = RunState(server, clients, cohort.round, key)
            ready = assemble(method, state, cohort, cohort, data)
            return run_client(method, ready.shared, jax.tree.map(lambda x: x[0], ready.inputs)).update

        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.data)
        return jax.eval_shape(update, jax.random.key(0), shapes)

    @property
    def first_number(self) -> float | None:
        """The first run's number."""
        return None if self.numbers is None else self.numbers[0]

    @property
    def first_method(self) -> Method:
        """The first run's method, with the same checks."""
        return self.checked_method(self.first_number)

    @property
    def data(self) -> FederatedData:
        """The first run's data."""
        return FederatedData(self.train, self.test, **self.tables[0])


class RunInputs(NamedTuple):
    """A run's index tables and number, with leading axis R where runs are several."""

    tables: Mapping[str, PyTree]
    number: Number | None


Traced = tuple[RunState, Metrics, ClientMetrics]
"""Shapes and dtypes of what programs give: the state before round 1, the metrics of `prepare`, and those of a round."""


class DeviceSource:
    """All data and all client states on the device; the states may be spread over several, `shards`."""

    def __init__(self, problem: Problem, shards: int = 1) -> None:
        self._problem, self.shards = problem, shards
        self.tables, self.pools = problem.tables, (problem.train, problem.test)

    def initialize(self, inputs: RunInputs, key: jax.Array, pools: tuple[Pool, Pool]) -> tuple[RunState, Metrics]:
        """The state before round 1, by the method's `init` and `prepare`, and the metrics of `prepare`."""
        method, spec = self._problem.checked_method(inputs.number), self._problem.spec
        data = FederatedData(*pools, **inputs.tables)
        server, clients = method.init(rng.stream(key, "init"), spec)
        first = self._cohort(key, jnp.zeros((), jnp.int32), data)
        server, metrics = prepare(method, server, gather(data, first, first), key)
        if self.shards > 1:
            number = jax.lax.axis_index(CLIENTS)
            clients = jax.tree.map(lambda x: x.reshape(self.shards, -1, *x.shape[1:])[number], clients)
        return RunState(server, clients, jnp.zeros((), jnp.int32), key), metrics

    def open(self, state: RunState, inputs: RunInputs, pools: tuple[Pool, Pool]) -> Round:
        """The next round, assembled."""
        method, data = self._problem.checked_method(inputs.number), FederatedData(*pools, **inputs.tables)
        cohort, next_cohort = (self._cohort(state.key, r, data) for r in (state.round, state.round + 1))
        return assemble(method, state, cohort, next_cohort, data, self._take)._replace(system=self._problem.system)

    def close(self, before: RunState, after: RunState, cohort: Cohort) -> RunState:
        """The states of all clients after a round, with the cohort's new ones."""
        clients = jax.tree.map(lambda x, new: self._put(x, cohort.ids, new), before.clients, after.clients)
        return after._replace(clients=clients)

    def start(self, program: Program, *data: Any) -> tuple[RunState, Metrics]:
        """The state before round 1, and the metrics of `prepare`; `program` is the compiled `initialize`."""
        return program(*data)

    def trace(self, start: Program, rounds: Program, inputs: Any, key: Any, pools: Any) -> Traced:
        """Traces two programs: `start`, which runs `initialize`, and `rounds`."""
        state, metrics = start.eval_shape(inputs, key, pools)
        return state, metrics, rounds.eval_shape(state, inputs, pools)[-1]

    def shapes(self, program: Program, *data: Any) -> RunState:
        """The shapes and dtypes of the state before round 1."""
        return program.eval_shape(*data)[0]

    def fetch(self, state: RunState, *data: Any) -> tuple[RunState, Any, Any]:
        """The arguments of a round's program, which takes what its cohort needs."""
        return state, *data

    def store(self, before: RunState, after: RunState) -> RunState:
        """Returns the state after a round, which stays on the device."""
        return after

    def _cohort(self, key: jax.Array, number: jax.Array, data: FederatedData) -> Cohort:
        return draw(key, number, self._problem.spec, self._problem.rounds, self._problem.system, data)

    def _take(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """The rows `ids` [M, ...], of which each device has a part."""
        if self.shards == 1:
            return x[ids]
        mine = (ids // len(x) == jax.lax.axis_index(CLIENTS)).reshape(-1, *[1] * (x.ndim - 1))
        rows = jnp.where(mine, x[ids % len(x)], jnp.zeros((), x.dtype))
        summable = rows.astype(jnp.uint8) if x.dtype == bool else rows
        return jax.lax.psum(summable, CLIENTS).astype(x.dtype)

    def _put(self, x: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
        if self.shards == 1:
            return x.at[ids].set(rows)
        mine = ids // len(x) == jax.lax.axis_index(CLIENTS)
        return x.at[jnp.where(mine, ids % len(x), len(x))].set(rows, mode="drop")


class HostSource:
    """Training images and client states on the host, in NumPy arrays (states perhaps `OnDisk`).

    `place` is the device placement to which a round's part of them is sent. A round's cost on the device does not grow with
    the number of clients. While the device computes a round, the host gathers and sends the images of the next one. A method
    that reads the whole pool or all clients' states cannot run so.
    """

    def __init__(self, problem: Problem, place: Sharding) -> None:
        self._problem, self._place, self._method, self._data = problem, place, problem.first_method, problem.data
        self.tables: tuple[Mapping[str, PyTree], ...] = ({},)
        self.pools: tuple[Pool | None, Pool] = (None, problem.test)
        # Of the training pool the examples that are evaluated alone are on the device.
        given = {"validation": self._data.validation, "client_test": self._data.client_test}
        if tables := {name: table for name, table in given.items() if table is not None}:
            rows = np.concatenate([table.index.ravel() for table in tables.values()])
            ends = np.cumsum([table.index.size for table in tables.values()])
            at = dict(zip(tables, np.split(np.arange(len(rows), dtype=np.int32), ends[:-1]), strict=True))
            self.tables = ({name: own._replace(index=at[name].reshape(own.index.shape)) for name, own in tables.items()},)
            self.pools = (Pool(problem.train.images[rows], problem.train.labels[rows]), problem.test)
        self.shards = 1
        self._capacity = capacity(self._data, problem.spec.cohort_size, reads_next=self._method.requires.next_cohort)
        self._ahead: tuple[int, Cohort, RoundData] | None = None
        self._drawn: dict[int, Cohort] = {}
        self._unused: PyTree = None  # the states before round 1, on disk, that `shapes` has made
        self._key = jax.random.key(problem.seeds[0])
        rules = problem.spec, problem.rounds, problem.system, self._data
        self._draw = jax.jit(jax.vmap(lambda number: draw(self._key, number, *rules)))

    def initialize(self, server: PyTree, key: jax.Array, data: RoundData) -> tuple[RunState, Metrics]:
        """The state before round 1, without the clients' states, from the server's state before `prepare`."""
        server, metrics = prepare(self._method, server, data, key)
        return RunState(server, (), jnp.zeros((), jnp.int32), key), metrics

    def open(self, state: RunState, cohort: Cohort, data: RoundData) -> Round:
        """The next round, assembled."""
        message = self._method.broadcast(state.server, None, cohort)
        return Round(self._method, cohort, data, state, message, self._problem.system)

    def close(self, before: RunState, after: RunState, cohort: Cohort) -> RunState:
        """The state after a round, with the cohort's clients alone; `store` writes their states to the host."""
        return after

    def start(self, program: Program, inputs: RunInputs, key: jax.Array, pools: Any) -> tuple[RunState, Metrics]:
        """The state before round 1, its clients in NumPy arrays, and the metrics of `prepare`; `program` is `initialize`."""
        clients, self._unused = self._initial() if self._unused is None else self._unused, None
        with jax.default_device(cpu()):
            server = jax.jit(lambda key: self._init(key)[0])(self._key)
        first = self._cohort(0)
        state, metrics = program(jax.device_put(server, self._place), key, self._send(first, first))
        return state._replace(clients=clients), metrics

    def trace(self, start: Program, rounds: Program, inputs: Any, key: Any, pools: Any) -> Traced:
        """Traces two programs: `start`, which runs `initialize`, and `rounds`."""
        server, clients = jax.eval_shape(self._init, key)
        _, cohort, data = self._ahead = self._gather(0)
        state, metrics = start.eval_shape(server, key, data)
        size, where = len(cohort.ids), self._place
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=where), clients)
        of_round = rounds.eval_shape(state._replace(clients=rows), jax.device_put(cohort, where), data)[-1]
        return state, metrics, of_round

    def shapes(self, program: Program, inputs: RunInputs, key: jax.Array, pools: Any) -> RunState:
        """Shapes and dtypes of the state. `clients` are arrays of arbitrary values, or on disk the states before round 1."""
        server, clients = jax.eval_shape(self._init, key)
        if self._problem.on_disk:
            clients = self._unused = self._initial()
        else:
            clients = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), clients)
        return RunState(server, clients, jax.ShapeDtypeStruct((), jnp.int32), key)

    def fetch(self, state: RunState, inputs: Any, pools: Any) -> tuple[RunState, Cohort, RoundData]:
        """The arguments of a round's program: the state with the cohort's clients alone, the cohort, its data."""
        number = int(state.round)
        if self._ahead is None or self._ahead[0] != number:
            self._ahead = self._gather(number)
        _, cohort, data = self._ahead
        clients = jax.device_put(jax.tree.map(lambda x: x[cohort.ids], state.clients), self._place)
        return state._replace(clients=clients), jax.device_put(cohort, self._place), data

    def store(self, before: RunState, after: RunState) -> RunState:
        """Writes the cohort's new states to the host's, and gathers the next round's data while the device computes."""
        assert self._ahead is not None
        number, cohort, _ = self._ahead
        jax.tree.map(lambda x: x.copy_to_host_async(), after.clients)
        self._ahead = following = self._gather(number + 1)
        if self._problem.on_disk:  # what the next round needs is read meanwhile, and is in memory then
            jax.tree.map(lambda x: x[following[1].ids], before.clients)
        for old, new in zip(jax.tree.leaves(before.clients), jax.tree.leaves(after.clients), strict=True):
            old[cohort.ids] = np.asarray(new)
        return after._replace(clients=before.clients)

    def _initial(self) -> PyTree:
        """The states of all clients before round 1, which need not fit on the accelerator."""

        def rows(start: Number, number: int) -> PyTree:
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, number), self._init(self._key)[1])

        shapes = jax.eval_shape(self._init, self._key)[1]
        with jax.default_device(cpu()):
            return client_states.initial(rows, shapes, on_disk=self._problem.on_disk)

    def _init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        return self._method.init(rng.stream(key, "init"), self._problem.spec)

    def _gather(self, number: int) -> tuple[int, Cohort, RoundData]:
        cohort = self._cohort(number)
        return number, cohort, self._send(cohort, self._cohort(number + 1))

    def _send(self, cohort: Cohort, next_cohort: Cohort) -> RoundData:
        reads_next = self._method.requires.next_cohort
        data = gather_images(self._data, cohort, next_cohort, self._capacity, reads_next=reads_next)
        return jax.device_put(data, self._place)

    def _cohort(self, number: int) -> Cohort:
        """The cohort of a round; one call of the device draws those of DRAWN rounds."""
        first = number // DRAWN * DRAWN
        if first not in self._drawn:
            drawn = self._draw(first + np.arange(DRAWN, dtype=np.int32))
            self._drawn = {**dict(list(self._drawn.items())[-1:]), first: jax.device_get(drawn)}
        return jax.tree.map(lambda x: x[number - first], self._drawn[first])


def source_of(problem: Problem, execution: Execution, place: Sharding) -> DeviceSource | HostSource:
    """The source of a problem's data; `place` is the placement of arrays that all devices have."""
    if problem.on_host:
        return HostSource(problem, place)
    spread = problem.spec.num_clients % execution.devices == 0 and not problem.first_method.requires.all_states
    return DeviceSource(problem, execution.devices if spread else 1)


def capacity(data: FederatedData, cohort_size: int, *, reads_next: bool) -> int:
    """The largest number of images that a round can read: the server's, a cohort's, and, if read, those of the next cohort."""
    of_clients = [data.labeled.count + data.unlabeled.count, *([data.client_data.count] if reads_next else [])]
    return int(sum(np.sort(counts)[-cohort_size:].sum() for counts in of_clients) + data.server.count.sum())


def gather_images(data: FederatedData, cohort: Cohort, next_cohort: Cohort, size: int, *, reads_next: bool) -> RoundData:
    """What `gather` gives, in NumPy arrays, with a pool that has the round's own images alone.

    `server.unlabeled` is empty, as the whole pool is not there; `server.next_cohort` is None unless `reads_next`. The pool has
    room for `size` images, as `capacity` gives it; zeros fill the rest.
    """
    none = Table(np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    rows = gather(data._replace(pooled=none), cohort, next_cohort)
    if not reads_next:
        rows = rows._replace(server=rows.server._replace(next_cohort=cast(Examples, None)))  # to read it is an error
    pool = data.train.images
    images = np.zeros((size, *pool.shape[1:]), pool.dtype)
    used = 0

    def fetch(examples: PyTree) -> PyTree:
        nonlocal used
        if not isinstance(examples, Examples):
            return examples
        real = np.arange(examples.index.shape[-1]) < np.asarray(examples.count)[..., None]
        start, used = used, used + int(real.sum())
        images[start:used] = pool[examples.index[real]]
        index = np.zeros_like(examples.index)
        index[real] = np.arange(start, used)
        return examples._replace(index=index)

    clients, server = jax.tree.map(fetch, (rows.clients, rows.server), is_leaf=lambda x: isinstance(x, Examples))
    return rows._replace(images=images, clients=clients, server=server)


def cpu() -> jax.Device | None:
    """The host as a device; None, which means the default device, where JAX_PLATFORMS leaves the CPU out."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None
