"""A simulator whose clients run in programs of their own: in a round one opens it, one runs turns of clients, one closes it.

No loop over clients is in any of them; with local steps written out (`Training.unrolled`) none is around a network at all. The
programs follow each other on the devices without waiting for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.method import Aggregate, Cohort
from fedjax_ssl.metrics import Metrics
from fedjax_ssl.simulation.execution import CohortOutput, Execution
from fedjax_ssl.simulation.round import (
    ClientInputs,
    RunState,
    client_inputs,
    close_round,
    open_round,
    run_clients,
    scatter,
    work,
)
from fedjax_ssl.simulation.simulator import Problem, Program, Simulator, placement, report, run_if_it_fits

PyTree = Any


class _Opened(NamedTuple):
    """What a round begins with.

    Attributes:
        order: int32 [M], which of the cohort the first, second, ... of `inputs` is: a turn takes as long as its longest client.
        shared: what all clients receive alike.
        inputs: what each has of its own.
        results: of no client so far.
    """

    order: jax.Array
    shared: PyTree
    inputs: ClientInputs
    results: CohortOutput


def combined(a: Aggregate, b: Aggregate) -> Aggregate:
    """The aggregate of two groups of clients from their weighted means: a + (b - a) w_b / (w_a + w_b)."""
    weight = a.weight + b.weight
    share = b.weight / jnp.where(weight > 0, weight, 1.0)
    return Aggregate(jax.tree.map(lambda x, y: (x + (y - x) * share).astype(x.dtype), a.update, b.update), weight)


class SeparateSimulator(Simulator):
    """Runs a problem as `Simulator` does, one client on each device at a time, each such turn a run of a program.

    Args:
        problem: what to simulate.
        execution: over which devices.
        eval_batch_size: test images per forward pass.
    """

    def __init__(self, problem: Problem, execution: Execution, eval_batch_size: int) -> None:
        super().__init__(problem, execution, eval_batch_size)
        method, _, _, size = problem
        streams = method.aggregator == "sum"
        self._cohort_size = size
        # What is closed over below is no part of `self`: a cycle would keep all of it in memory once it is dropped.
        turn_size = self._turn_size = min(execution.num_devices, size)

        @jax.jit  # so that it is traced once, for its shapes and for the turns
        def train(shared: PyTree, images: jax.Array, inputs: ClientInputs, first: jax.Array) -> CohortOutput:
            slots = first + jnp.arange(turn_size)
            own = jax.tree.map(lambda x: x[jnp.minimum(slots, size - 1)], inputs)
            return run_clients(method, shared, images, own, execution, slots < size)

        def open_(state: RunState, data: FederatedData) -> _Opened:
            cohort, rows, of_cohort, message = open_round(method, state, data, size)
            order = jnp.argsort(-work(rows.clients), stable=True)
            own = jax.tree.map(lambda x: x[order], client_inputs(of_cohort, message, cohort, rows))
            turn = jax.eval_shape(train, message[0], data.train.images, own, jnp.int32(0))
            total = turn.aggregate if streams else _of_all(turn.aggregate, size)
            shapes = CohortOutput(total, _of_all(turn.client_states, size), _of_all(turn.metrics, size))
            results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return _Opened(order, message[0], own, results)

        def turn_(
            results: CohortOutput, shared: PyTree, images: jax.Array, inputs: ClientInputs, order: jax.Array, first: jax.Array
        ) -> CohortOutput:
            new = train(shared, images, inputs, first)
            slots = first + jnp.arange(turn_size)
            places = order.at[slots].get(mode="fill", fill_value=size)  # padding has none

            def put(all_: PyTree, of_turn: PyTree) -> PyTree:
                return jax.tree.map(lambda x, y: x.at[places].set(y, mode="drop"), all_, of_turn)

            merge = combined if streams else put
            states, metrics = put(results.client_states, new.client_states), put(results.metrics, new.metrics)
            return CohortOutput(merge(results.aggregate, new.aggregate), states, metrics)

        def close_(state: RunState, data: FederatedData, results: CohortOutput) -> tuple[RunState, Cohort, Metrics]:
            # Opened again, and not handed over: what of it is not read here is not computed, and no pool of data is copied.
            cohort, rows, _, _ = open_round(method, state, data, size)
            new, metrics = close_round(method, state, results, cohort, rows)
            return scatter(state, new, cohort), cohort, metrics

        whole = placement(execution.mesh)
        self._open = Program(open_, execution, out_shardings=whole)
        self._turn = Program(turn_, execution, donate_argnums=0, out_shardings=whole)
        self._close = Program(close_, execution, donate_argnums=0, out_shardings=(self._where, whole, whole))

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return super().compile_s + sum(program.compile_s for program in (self._open, self._turn, self._close))

    @property
    def memory_bytes(self) -> int:
        """Memory of one device that the largest of a round's programs needs; 0 before round 1."""
        return max(program.memory_bytes for program in (self._open, self._turn, self._close))

    def dispatch(self, state: RunState) -> tuple[RunState, list[dict[str, float]]]:
        """One round: the state after it (the one given is consumed) and its metrics."""
        devices, images = self.execution.num_devices, self._data.train.images
        opened = run_if_it_fits(self._open, devices, state, self._data)
        results = opened.results
        for first in range(0, self._cohort_size, self._turn_size):
            where = jax.device_put(np.int32(first), self._where.round)
            turn = (results, opened.shared, images, opened.inputs, opened.order, where)
            results = run_if_it_fits(self._turn, devices, *turn)
        state, cohort, metrics = run_if_it_fits(self._close, devices, state, self._data, results)
        return state, [report(cohort, metrics)]


def _of_all(turn: PyTree, size: int) -> PyTree:
    """The shapes of `size` clients' results, from those of a turn's."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), turn)
