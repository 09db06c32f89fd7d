"""A simulator whose clients run in programs of their own: in a round one opens it, one runs turns of clients, one closes it.

No loop over clients is in any of them; with local steps written out (`Training.unrolled`) none is around a network at all. The
programs follow each other on the devices without waiting for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.method import Aggregate, Cohort
from fedjax_ssl.metrics import Metrics
from fedjax_ssl.simulation.execution import CohortOutput, Execution
from fedjax_ssl.simulation.round import (
    ClientInputs,
    RoundData,
    RunState,
    client_inputs,
    close_round,
    open_round,
    run_clients,
    scatter,
    work,
)
from fedjax_ssl.simulation.simulator import Problem, Program, Simulator, placement, report

PyTree = Any


class _Opened(NamedTuple):
    """What a round begins with: who takes part, what all clients receive, what each has of its own, and the server's data.

    `order` int32 [M]: which of the cohort the first, second, ... of `inputs` is. A turn takes as long as its longest client.
    """

    cohort: Cohort
    order: jax.Array
    shared: PyTree
    inputs: ClientInputs
    data: RoundData


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
        method, _, _, self._cohort_size = problem
        self._streams = method.aggregator == "sum"
        self._turn_size, whole = min(execution.num_devices, self._cohort_size), placement(execution.mesh)

        def open_(state: RunState, data: FederatedData) -> _Opened:
            cohort, rows, of_cohort, message = open_round(method, state, data, self._cohort_size)
            order = jnp.argsort(-work(rows.clients), stable=True)
            own = jax.tree.map(lambda x: x[order], client_inputs(of_cohort, message, cohort, rows))
            without_pool = rows._replace(images=None)  # it would be copied
            return _Opened(cohort, order, message[0], own, without_pool)

        def turn_(shared: PyTree, images: jax.Array, inputs: ClientInputs, first: jax.Array) -> CohortOutput:
            slots = first + jnp.arange(self._turn_size)
            real = slots < self._cohort_size
            own = jax.tree.map(lambda x: x[jnp.minimum(slots, self._cohort_size - 1)], inputs)
            return run_clients(method, shared, images, own, execution, real)

        def close_(
            state: RunState,
            cohort: Cohort,
            order: jax.Array,
            data: RoundData,
            images: jax.Array,
            turns: list[tuple[PyTree, Metrics]],
            updates: list[Aggregate],
        ) -> tuple[RunState, Cohort, Metrics]:
            states, metrics = self._in_one(turns, order)
            output = CohortOutput(updates[0] if self._streams else self._in_one(updates, order), states, metrics)
            new, metrics = close_round(method, state, output, cohort, data._replace(images=images))
            return scatter(state, new, cohort), cohort, metrics

        self._open = Program(open_, execution, out_shardings=whole)
        self._turn = Program(turn_, execution, out_shardings=whole)
        self._combine = Program(combined, execution, out_shardings=whole)
        self._close = Program(close_, execution, donate_argnums=0, out_shardings=(self._where, whole, whole))

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return super().compile_s + sum(p.compile_s for p in (self._open, self._turn, self._combine, self._close))

    @property
    def memory_bytes(self) -> int:
        """Memory of one device that the largest of a round's programs needs; 0 before round 1."""
        return max(program.memory_bytes for program in (self._open, self._turn, self._combine, self._close))

    def _in_one(self, turns: list[PyTree], order: jax.Array) -> PyTree:
        """What the turns returned, without their padding, in the order of the cohort."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[jnp.argsort(order)], *turns)

    def dispatch(self, state: RunState) -> tuple[RunState, list[dict[str, float]]]:
        """One round: the state after it (the one given is consumed) and its metrics."""
        opened, images = self._open(state, self._data), self._data.train.images
        turns: list[tuple[PyTree, Metrics]] = []
        updates: list[Aggregate] = []  # where they stream, one: of all turns so far
        for first in range(0, self._cohort_size, self._turn_size):
            where = jax.device_put(jnp.int32(first), self._where.round)
            output = self._turn(opened.shared, images, opened.inputs, where)
            turns.append((output.client_states, output.metrics))
            if self._streams and updates:
                updates = [self._combine(updates[0], output.aggregate)]
            else:
                updates.append(output.aggregate)
        state, cohort, metrics = self._close(state, opened.cohort, opened.order, opened.data, images, turns, updates)
        return state, [report(cohort, metrics)]
