"""An experiment that is ready to run: its rounds, one by one, with their metrics, and its model's predictions."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.experiment.layout import Layout, evaluation_batch_size
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.methods import steps
from fedjax_ssl.simulation.client_store import HostSimulator
from fedjax_ssl.simulation.execution import Execution, multiplied_in
from fedjax_ssl.simulation.round import RunState, initialize, run_round
from fedjax_ssl.simulation.simulator import Problem, Simulator

COSTS = ("comm/bytes_up", "comm/bytes_down", "cost/forward_passes", "cost/backward_passes")
TOTALS = (*COSTS, "time/total_s", "time/compile_s")  # what adds up over a run's rounds, resumes included
DIVERGED = "NaN or infinity"
"""What every message says that names a divergence: a DivergedError's, and that of clients that were left out."""


class DivergedError(RuntimeError):
    """The global model holds NaN or infinity, or nothing else came back from a round's clients."""


def divergence(number: int, metrics: Mapping[str, Any], cohort_size: int) -> str:
    """What a DivergedError says of round `number`, by a simulator's metrics of it; empty: it did not diverge."""
    if metrics["server/non_finite"]:
        return (
            f"round {number}: the global model holds {DIVERGED}; lower client.optimizer.learning_rate or "
            "server.optimizer.learning_rate, or set their clip_norm"
        )
    if metrics["client/non_finite"] == cohort_size:  # all left out: the model would stand still
        return (
            f"round {number}: all {cohort_size} clients returned {DIVERGED}; lower "
            "client.optimizer.learning_rate, or set client.optimizer.clip_norm"
        )
    return ""


def timed(metrics: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """A simulator's metrics of a round as a row has them, with the seconds that the round took."""
    row = {name: value for name, value in metrics.items() if name not in ("server/non_finite", "perf/client_images")}
    row["time/round_s"] = seconds
    if images := metrics.get("perf/client_images", 0):
        row["perf/client_images_per_s"] = images / seconds
    return row


def is_evaluated(settings: Settings, number: int) -> bool:
    """Whether round `number` is evaluated: each `eval_every`-th, and the last one."""
    return number % settings.eval_every == 0 or number == settings.rounds


def most_steps(problem: Problem) -> int:
    """The most steps that a client, or the server, takes at a time, as methods count them; their programs are traced for it."""

    def begin_and_run(data: FederatedData, key: jax.Array) -> Any:
        state, _ = initialize(problem.method, data, problem.spec, problem.cohort_size, key)
        return run_round(problem.method, state, data, problem.cohort_size, Execution(chunk_size=1))

    return steps.most(begin_and_run, problem.data, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment that is ready to run.

    Attributes:
        settings: what it was built from.
        problem: method, data and cohort size.
        simulator: its programs.
        num_params: parameters of the network.
        layout: what `execution.*` stands for here.
        views: how networks see the data.
    """

    settings: Settings
    problem: Problem
    simulator: Simulator | HostSimulator
    num_params: int
    layout: Layout
    views: Views

    @functools.cached_property
    def most_steps(self) -> int:
        """The most steps that a client, or the server, takes at a time, see `most_steps`."""
        return most_steps(self.problem)

    def start(self) -> tuple[RunState, dict[str, Any]]:
        """The state before round 1, and its row of metrics: round 0 and the totals so far."""
        began, compiled = time.perf_counter(), self.simulator.compile_s
        state, _ = self.simulator.initialize(self.settings.seed)
        seconds = {"time/total_s": time.perf_counter() - began, "time/compile_s": self.simulator.compile_s - compiled}
        return state, {"round": 0, **dict.fromkeys(COSTS, 0), **seconds}

    def rounds(
        self, state: RunState | None = None, last: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[RunState, dict[str, Any]]]:
        """Runs the rounds that are left, one per step: (state, row of metrics), evaluated where the settings say so.

        Each step consumes the state before it: keep `fedjax_ssl.copied(state)` if you need an old one. Where one dispatch runs
        several rounds, each of them comes with the state after the last.

        Args:
            state: where to go on from; None: a new run.
            last: the row of the round before, whose totals go on; None: they start at 0.

        Raises:
            DivergedError: the global model is not finite, or no client's update of a round is.
        """
        if state is None:
            state, last = self.start()
        before = {key: last[key] if last else 0 for key in TOTALS}
        totals = dict(before)
        began, compiled = time.perf_counter(), self.simulator.compile_s
        for first in range(int(state.round) + 1, self.settings.rounds + 1, self.settings.execution.rounds_per_dispatch):
            state, found, seconds = self._dispatch(state)
            for number, metrics in enumerate(found, start=first):
                if message := divergence(number, metrics, self.problem.cohort_size):
                    raise DivergedError(message)
                row = timed(metrics, seconds)
                if is_evaluated(self.settings, number):
                    row |= self.simulator.evaluate(state)
                for key in COSTS:
                    totals[key] += row.get(key, 0)
                totals["time/compile_s"] = before["time/compile_s"] + self.simulator.compile_s - compiled
                totals["time/total_s"] = before["time/total_s"] + time.perf_counter() - began
                yield state, {"round": number, **row, **totals}

    def _dispatch(self, state: RunState) -> tuple[RunState, list[dict[str, float]], float]:
        """The rounds of one dispatch: the state after them, each one's metrics, and the seconds that one took."""
        compiled, start = self.simulator.compile_s, time.perf_counter()
        state, found = self.simulator.dispatch(state)
        seconds = time.perf_counter() - start - (self.simulator.compile_s - compiled)
        return state, found, seconds / len(found)

    def predict(self, state: RunState, images: np.ndarray) -> np.ndarray:
        """Logits float32 [N, C] of the global model for uint8 images [N, H, W, ch], or float32 features [N, 1, D].

        Images have the size that the dataset has here: where `data.image_size` padded it, pad them likewise. A forward pass has
        `execution.batch_size` of them, or as many as an evaluation has that no search has changed; the last is padded.
        """
        size = self.settings.execution.batch_size or evaluation_batch_size(jax.default_backend(), self.settings)
        logits = []
        for start in range(0, len(images), size):
            batch = np.asarray(images[start : start + size])
            padding = size - len(batch)  # one shape, so that it is compiled once
            padded = np.pad(batch, ((0, padding), *((0, 0),) * (batch.ndim - 1)))
            with multiplied_in(self.settings.execution.precision):
                outputs = self._predict(state.server, jnp.asarray(padded), jnp.arange(size) < len(batch))
            logits.append(np.asarray(outputs)[: len(batch)])
        return np.concatenate(logits)

    @functools.cached_property
    def _predict(self) -> Callable:
        return jax.jit(self.problem.method.predict)
