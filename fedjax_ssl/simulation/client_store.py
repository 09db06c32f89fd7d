"""A simulator for data and client states that do not fit on the device: both live on the host, in NumPy arrays.

Each round fetches the cohort's images and states, so that its cost on the device does not grow with the number of clients.
While the device computes a round, the host gathers the images of the next one and sends them. Cohorts are drawn for many rounds
at once. What does not overlap: before a round the states of its clients are gathered and sent, after it they are written back,
and the device waits. A client may take part in the next round too, and a second copy of the states would take its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import Examples, FederatedData, Pool, Table
from fedjax_ssl.method import Cohort
from fedjax_ssl.metrics import Metrics, reduce
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.round import RoundData, RunState, gather, prepare, run_cohort_round
from fedjax_ssl.simulation.simulator import (
    Compiling,
    Problem,
    Program,
    client_sharding,
    evaluate,
    in_chunks_that_fit,
    placed,
    placement,
    report,
    run_if_it_fits,
)

PyTree = Any
DRAWN = 64
"""Rounds whose cohorts are drawn by one call."""


def capacity(data: FederatedData, cohort_size: int, *, reads_next: bool) -> int:
    """The most images that a round can read: of the server, of the largest cohort, and of the next one where that is read."""
    of_clients = [data.labeled.count + data.unlabeled.count, *([data.client_data.count] if reads_next else [])]
    return int(sum(np.sort(counts)[-cohort_size:].sum() for counts in of_clients) + data.server.count.sum())


def gather_images(data: FederatedData, cohort: Cohort, next_cohort: Cohort, size: int, *, reads_next: bool) -> RoundData:
    """What `gather` returns, with a pool of the round's own images, in the order of its index tables.

    Args:
        data: federated data in NumPy arrays.
        cohort: who takes part.
        next_cohort: who takes part in the round to come.
        size: images in the pool, >= those that the round reads; the rest is zeros.
        reads_next: whether the server reads the data of the cohort to come.

    Returns:
        RoundData of NumPy arrays. `server.unlabeled` is empty, as the whole pool is not at hand, and so is `truth`;
        `server.next_cohort` is None where it is not read.
    """
    none = Table(np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    rows = gather(data._replace(pooled=none), cohort, next_cohort)
    if not reads_next:
        rows = rows._replace(server=rows.server._replace(next_cohort=cast(Examples, None)))  # to read it is an error
    pool = data.train.images
    images = np.zeros((size, *pool.shape[1:]), pool.dtype)
    used = 0

    def fetch(examples: Any) -> Any:
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
    return RoundData(images, clients, server)


class _Drawn(NamedTuple):
    """The cohorts of a run (its root key's data) in rounds first, ..., first + DRAWN - 1: int32 [DRAWN, M]."""

    run: bytes
    first: int
    ids: np.ndarray


class _Fetched(NamedTuple):
    """A round's data on the device: of which run (its root key's data), which round, whose."""

    run: bytes
    round: int
    cohort: Cohort
    next_cohort: Cohort
    data: RoundData


class HostSimulator(Compiling):
    """Runs a problem whose training images and client states stay on the host.

    It has the methods of `Simulator` and gives the same results. A method whose `broadcast` reads the states of all clients
    cannot run here: it is handed None in their place.

    Args:
        problem: what to simulate, its data in NumPy arrays.
        execution: how clients are mapped.
        eval_batch_size: test images per forward pass.

    Attributes:
        execution: as given; from the first round on with chunks that fit into memory.
    """

    def __init__(self, problem: Problem, execution: Execution, eval_batch_size: int) -> None:
        self._problem, self.execution = problem, execution
        method, data, spec, cohort_size = problem
        self._placement = whole = placement(execution.mesh)
        self._test = jax.device_put(data.test, whole)
        self._capacity = capacity(data, cohort_size, reads_next=method.next_cohort)
        self._ahead: _Fetched | None = None
        self._drawn: _Drawn | None = None
        state = RunState(server=whole, clients=client_sharding(execution.mesh, cohort_size), round=whole, key=whole)

        def cohorts_(key: jax.Array, first: jax.Array) -> jax.Array:
            return jax.vmap(lambda r: sample(key, r, spec.num_clients, cohort_size).ids)(first + jnp.arange(DRAWN))

        def prepare_(server: PyTree, data: RoundData, key: jax.Array) -> tuple[PyTree, Metrics]:
            return prepare(method, server, data, key)

        def evaluate_(server: PyTree, test: Pool) -> Metrics:
            return evaluate(method, server, test, eval_batch_size, execution)

        self._cohorts = Program(cohorts_, execution)
        self._prepare = Program(prepare_, execution, out_shardings=(whole, whole))
        self._where = state
        self._round = self._program(execution)
        self._evaluate = Program(evaluate_, execution)

    def _program(self, execution: Execution) -> Program:
        """The round."""
        method = self._problem.method

        def round_(state: RunState, cohort: Cohort, data: RoundData) -> tuple[RunState, Metrics]:
            message = method.broadcast(state.server, None, cohort)
            return run_cohort_round(method, state, message, cohort, data, execution)

        return Program(round_, execution, donate_argnums=0, out_shardings=(self._where, self._where.round))

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return sum(program.compile_s for program in (self._cohorts, self._prepare, self._round, self._evaluate))

    @property
    def memory_bytes(self) -> int:
        """Memory of one device that a round needs at most, with the next cohort's images; 0 before round 1."""
        ahead = 0 if self._ahead is None else sum(x.nbytes for x in jax.tree.leaves(self._ahead.data))
        return super().memory_bytes + ahead

    def template(self, seed: int) -> RunState:
        """The shapes, dtypes and placement of a run's state, without computing one; client states are NumPy's."""
        server, clients = jax.eval_shape(self._init, jax.random.key(seed))
        key = jax.device_put(jax.random.key(seed), self._placement)
        clients = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), clients)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        server, number, key = placed((server, number, key), self._placement)
        return RunState(server, clients, number, key)

    def initialize(self, seed: int) -> tuple[RunState, dict[str, float]]:
        """The state before round 1, and the metrics of the server's preparation."""
        with jax.default_device(cpu()):  # the states of all clients need not fit on the accelerator
            server, clients = jax.jit(self._init)(jax.random.key(seed))
        leaves, tree = jax.tree.flatten(clients)
        del clients  # of which each leaf is freed once it is copied
        clients = jax.tree.unflatten(tree, copied_one_by_one(leaves))
        zero = jnp.zeros((), jnp.int32)
        key, server, number = jax.device_put((jax.random.key(seed), server, zero), self._placement)
        run = _identity(key)
        first = self._draw(key, run, 0)
        server, metrics = self._prepare(server, self._gather(run, 0, first, first).data, key)
        return RunState(server, clients, number, key), reduce(jax.device_get(metrics))

    def _init(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        return self._problem.method.init(rng.stream(key, "init"), self._problem.spec)

    def dispatch(self, state: RunState) -> tuple[RunState, list[dict[str, float]]]:
        """`round`, as `Simulator.dispatch` returns it."""
        state, metrics = self.round(state)
        return state, [metrics]

    def round(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """One round: the state after it (the one given is consumed) and its metrics."""
        run, number = _identity(state.key), int(state.round)
        now = self._ahead
        if now is None or (now.run, now.round) != (run, number):
            now = self._gather(run, number, *(self._draw(state.key, run, r) for r in (number, number + 1)))
        cohort = now.cohort
        after_next = self._draw(state.key, run, number + 2)  # before the round takes the device
        of_cohort = jax.tree.map(lambda x: x[cohort.ids], state.clients)
        of_cohort = jax.device_put(of_cohort, self._where.clients)
        placed_cohort = jax.device_put(cohort, self._placement)
        own, size = state._replace(clients=of_cohort), self._problem.cohort_size
        to_fit = self.execution.shrinks and not self._round.compile_s
        if to_fit:
            # The next cohort's images are there beside each round, and so while it is found out what fits.
            self._ahead = self._gather(run, number + 1, now.next_cohort, after_next)
            fitted = in_chunks_that_fit(self._program, (self.execution,), size, self._where, own, placed_cohort, now.data)
            self._round, self.execution, (new, metrics) = fitted
        else:
            new, metrics = run_if_it_fits(self._round, self.execution.num_devices, own, placed_cohort, now.data)
        jax.tree.map(lambda x: x.copy_to_host_async(), new.clients)  # once they are there
        if not to_fit:
            self._ahead = self._gather(run, number + 1, now.next_cohort, after_next)  # while the device is at work
        for kept, changed in zip(jax.tree.leaves(state.clients), jax.tree.leaves(new.clients), strict=True):
            kept[cohort.ids] = np.asarray(changed)
        return new._replace(clients=state.clients), report(cohort, metrics)

    def evaluate(self, state: RunState) -> dict[str, float]:
        """Accuracy and loss of the global model on the test set."""
        return reduce(jax.device_get(self._evaluate(state.server, self._test)))

    def _gather(self, run: bytes, number: int, cohort: Cohort, next_cohort: Cohort) -> _Fetched:
        reads_next = self._problem.method.next_cohort
        data = gather_images(self._problem.data, cohort, next_cohort, self._capacity, reads_next=reads_next)
        return _Fetched(run, number, cohort, next_cohort, jax.device_put(data, self._placement))

    def _draw(self, key: jax.Array, run: bytes, number: int) -> Cohort:
        """The cohort of a round; the device is asked once in DRAWN rounds."""
        first = number // DRAWN * DRAWN
        if self._drawn is None or (self._drawn.run, self._drawn.first) != (run, first):
            ids = self._cohorts(key, jax.device_put(np.int32(first), self._placement))
            self._drawn = _Drawn(run, first, np.asarray(ids))
        return Cohort(self._drawn.ids[number - first], np.asarray(number, np.int32))


def copied_one_by_one(leaves: list[jax.Array]) -> Iterator[np.ndarray]:
    """Copies in NumPy that can be written to; the list loses each leaf before the next is copied: only one is there twice."""
    while leaves:
        yield np.array(leaves.pop(0))


def cpu() -> jax.Device | None:
    """The host as a device; None, for which the default one stands, where JAX was told to leave it out (JAX_PLATFORMS)."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def _identity(key: jax.Array) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()
