"""An experiment that is ready to run: its rounds, one by one, with their metrics, and its model's predictions."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.arrays import Number
from fedjax_ssl.data.augment import Views
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.experiment import evaluation, inputs, inspection
from fedjax_ssl.experiment.best import ENDED_EARLY, best, ending
from fedjax_ssl.experiment.divergence import REASON, DivergedError, check_clients, divergence
from fedjax_ssl.experiment.expansion import Run
from fedjax_ssl.experiment.inspection import Inspection
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Method
from fedjax_ssl.options import plural
from fedjax_ssl.simulation.round import FAULT, RunState
from fedjax_ssl.simulation.simulator import Simulator, check_alive
from fedjax_ssl.simulation.source import Problem

Row = dict[str, Any]
COSTS = ("comm/bytes_up", "comm/bytes_down", "cost/forward_passes", "cost/backward_passes")
TOTALS = (*COSTS, "time/total_s", "time/compile_s")
"""What adds up over a run's rounds, resumes included."""


def is_over(row: Row, settings: Settings) -> bool:
    """Whether a run has no round after that of its `row`, or `row` says that it has none: it has diverged, or ended early."""
    return REASON in row or ENDED_EARLY in row or bool(ending(row, settings))


@dataclasses.dataclass(frozen=True, repr=False)
class Experiment:
    """One run, or several runs that are computed together, ready to begin; `num_params` is the network's size.

    `tiny_method` makes a run's method with a tiny network, to count steps and examples; `changed` makes the method with other
    values under dotted keys of the settings. Both take the run's number: its value of the setting that `vary` names, or None.
    """

    runs: tuple[Run, ...]
    problem: Problem
    layout: Layout
    num_params: int
    views: Views
    stored_shape: tuple[int, ...]  # of one example of the dataset, before images are padded
    classes: tuple[str, ...]  # the names of classes 0..C-1; empty where they are numbers alone
    dataset: Dataset  # the examples that `problem` divides among server and clients
    tiny_method: Callable[[Number | None], Method]
    changed: Callable[[Mapping[str, Any], Number | None], Method]
    unread: Mapping[str, str] = dataclasses.field(default_factory=dict)  # keys that no part reads, and what would read them
    fixed: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # parameters that are not trained, by their names
    start_digest: str = ""  # a digest of the weights that it starts from; empty: they are random
    lacking: str = ""  # why its rounds cannot run, such as clients' files that are gone; empty: they can

    def __repr__(self) -> str:
        settings, runs = self.settings, f"{len(self.runs)} runs of " if len(self.runs) > 1 else ""
        clients = f"{settings.data.num_clients} clients, " if self.method.requires.clients else ""
        of = f"{settings.method.name} on {settings.data.name}"
        return f"<Experiment: {of}, {clients}{runs}{plural(settings.rounds, 'round')}>"

    @property
    def settings(self) -> Settings:
        """The first run's settings; those of others have another seed, or another value of the number that varies."""
        return self.runs[0].settings

    @functools.cached_property
    def method(self) -> Method:
        """The first run's method."""
        return self.problem.first_method

    @functools.cached_property
    def simulator(self) -> Simulator:
        """The programs of the rounds; the first use sends the data to the device."""
        return Simulator(self.problem, self.layout.execution(self.settings))

    def only(self, which: Sequence[int]) -> Self:
        """The experiment of some of the runs, in this order."""
        if list(which) == [*range(len(self.runs))]:
            return self
        problem = self.problem
        of_runs = {"tables": problem.tables, "seeds": problem.seeds, "numbers": problem.numbers}
        some: Any = {name: tuple(values[i] for i in which) for name, values in of_runs.items() if values is not None}
        return dataclasses.replace(self, runs=tuple(self.runs[i] for i in which), problem=problem._replace(**some))

    def start(self) -> tuple[RunState, list[Row]]:
        """The state before round 1, and a row of metrics of round 0 for each run, with those of the method's `prepare`."""
        began, compiled = time.perf_counter(), self.simulator.compile_s
        state = self.simulator.initialize()
        seconds = {"time/total_s": time.perf_counter() - began, "time/compile_s": self.simulator.compile_s - compiled}
        return state, [{"round": 0, **own, **dict.fromkeys(COSTS, 0), **seconds} for own in self.simulator.prepared]

    def rounds(self, state: RunState | None = None, last: Any = None) -> Iterator[tuple[RunState, Any]]:
        """Runs the remaining rounds one by one: yields (state, row of metrics), or (state, list of rows) for several runs.

        They go on from `state`; what adds up over rounds goes on from `last`, the row or rows of the round before. The state of
        several runs has a leading axis R. Each round consumes the state before it; `fedjax_ssl.copied(state)` makes a copy that
        stays. With `execution.rounds_per_dispatch` > 1, all rounds of a dispatch come with the state after the last of them.
        DivergedError ends a single run; of several runs the others go on. With `patience`, a run ends early where its
        validation gets no better. StoppedError ends a run with `client.on_nonfinite=stop`. In the rounds that
        `diagnostics.clients_every` records, a row has under `clients` what each client did, in arrays [M].
        """
        one = len(self.runs) == 1
        for new, rows in self.steps(state, [last] if one and last else last):
            if one and REASON in rows[0]:
                raise DivergedError(rows[0][REASON])
            yield new, rows[0] if one else rows

    def steps(self, state: RunState | None = None, last: Sequence[Row] | None = None) -> Iterator[tuple[RunState, list[Row]]]:
        """As `rounds`, but always with a list of rows.

        The row of a run that has diverged is `{"round": ..., REASON: why}`. After a run has ended early, while others go on,
        its rows are `{"round": ..., ENDED_EARLY: why}`.
        """
        if self.lacking:
            raise ValueError(self.lacking)
        if state is None:
            state, last = self.start()
        self._check(state, len(self.runs))
        state = state._replace(key=jnp.copy(state.key))  # a round consumes it, and `copied` states are used again
        before = [dict(row) for row in last or [dict.fromkeys(TOTALS, 0)] * len(self.runs)]
        rows, began, compiled = before, time.perf_counter(), self.simulator.compile_s
        together = self.settings.execution.rounds_per_dispatch
        done = int(np.ravel(state.round)[0])
        for first in range(done + 1, self.settings.rounds + 1, together):
            if all(is_over(row, run.settings) for row, run in zip(rows, self.runs, strict=True)):
                return
            compiled_before, start = self.simulator.compile_s, time.perf_counter()
            labels = [None if is_over(row, run.settings) else str(run) for run, row in zip(self.runs, rows, strict=True)]
            every = self.settings.diagnostics.clients_every
            is_recorded = every > 0 and first % every == 0  # then a dispatch is one round
            state, found = self.simulator.dispatch(state, labels if len(labels) > 1 else [""], record=is_recorded)
            if self.settings.client.on_nonfinite == "stop":
                check_clients(first, found[0][0], state)
            compiling = self.simulator.compile_s - compiled_before
            seconds = (time.perf_counter() - start - compiling) / len(found)
            for number, metrics in enumerate(found, start=first):
                evaluated = number % self.settings.eval_every == 0 or number == self.settings.rounds
                accuracies = self.simulator.evaluate(state) if evaluated else [{} for _ in rows]
                each = self.settings.diagnostics.client_eval_every
                if each and number % each == 0:
                    of_all = map(evaluation.over_clients, self.simulator.client_accuracies(state))
                    accuracies = [own | clients for own, clients in zip(accuracies, of_all, strict=True)]
                spent = {"time/total_s": time.perf_counter() - began, "time/compile_s": self.simulator.compile_s - compiled}
                parts = zip(self.runs, metrics, accuracies, rows, before, strict=True)
                rows = [self._row(run, number, new | eval, seconds, spent, *so_far) for run, new, eval, *so_far in parts]
                yield state, rows

    @staticmethod
    def _row(run: Run, number: int, metrics: Row, seconds: float, spent: Row, last: Row, before: Row) -> Row:
        """The row of one run in a round.

        `last` is the previous round's row, and `before` the last row written before this process started.
        """
        if why := last.get(ENDED_EARLY) or ending(last, run.settings):
            return {"round": number, ENDED_EARLY: why}
        if reason := last.get(REASON) or divergence(number, metrics, run.settings):
            return {"round": number, REASON: reason}
        row = {name: value for name, value in metrics.items() if name not in ("server/non_finite", "perf/client_images", FAULT)}
        row["time/round_s"] = seconds
        if images := metrics.get("perf/client_images", 0):
            row["perf/client_images_per_s"] = images / seconds
        costs = {key: last[key] + metrics.get(key, 0) for key in COSTS}
        row = {"round": number, **row, **costs, **{key: before[key] + value for key, value in spent.items()}}
        return row | best(row, last, run.settings)

    def predict(self, state: RunState, images: np.ndarray) -> np.ndarray:
        """Logits float32 [N, C] of one run's global model.

        `images` are what the dataset takes: uint8 images [N, H, W, ch] or, of one channel, [N, H, W], which are padded as the
        dataset's are, or features float32 [N, D] or [N, V, D]. ValueError, with one line, for anything else.
        """
        self._check(state)
        size, precision = self.layout.batch_size, self.settings.execution.precision
        images = inputs.checked(images, self.stored_shape, self.problem.train.images.shape[1:])
        logits = [np.zeros((0, self.problem.spec.num_classes), np.float32)]
        for start in range(0, len(images), size):
            batch = images[start : start + size]
            padding = (0, size - len(batch))  # all batches have one shape: one compilation
            padded = np.pad(batch, (padding, *((0, 0),) * (batch.ndim - 1)))
            with jax.default_matmul_precision(None if precision == "default" else precision):
                outputs = self._predict(state.server, jnp.asarray(padded), jnp.arange(size) < len(batch))
            logits.append(np.asarray(outputs)[: len(batch)])
        return np.concatenate(logits)

    def inspect(self, state: RunState, client: int) -> Inspection:
        """A client's unlabeled examples, with the pseudo-labels that it would train on if it took part in the next round.

        `state` is the state before that round, and stays as it is. ValueError for an unknown client.
        """
        self._check(state)
        problem = self.problem
        found = self._examples(*inspection.of_one(problem, state, client))
        if "pseudo_label" not in found:
            table = problem.data.unlabeled
            logits = self.predict(state, problem.train.images[table.index[client][: table.count[client]]])
            made = evaluation.predictions(logits)
            found = {"pseudo_label": made.label, "confidence": made.confidence}
        return inspection.inspection(problem, client, found)

    def save_model(self, path: str | os.PathLike[str], state: RunState) -> None:
        """Writes the model that `predict` evaluates to a file NAME.npz or, with the package safetensors, NAME.safetensors.

        `numpy.load` alone gives parameters as `Dense_0/kernel` and batch-norm statistics as `batch_stats/BatchNorm_0/mean`;
        `metadata` is JSON with the network's options and its inputs' mean and standard deviation. ValueError for another
        ending, or a method that evaluates several networks.
        """
        from fedjax_ssl.experiment import export

        self._check(state)
        export.save(path, self, state)

    def _check(self, state: RunState, runs: int = 1) -> None:
        """Raises ValueError for a state that is gone, or of another number of runs."""
        if not isinstance(state, RunState):
            raise ValueError(f"state: got {type(state).__name__}, accepted: a state, as rounds() yields it before the metrics")
        check_alive(state)
        if np.ndim(state.round) != (runs > 1):
            several = "experiment.simulator.join(states), of one state for each run"
            accepted = several if runs > 1 else "one run's: experiment.only([i]) and experiment.simulator.split(state)[i]"
            raise ValueError(
                f"state: got that of {'several runs' if np.ndim(state.round) else 'one run'}, accepted: {accepted}"
            )

    @functools.cached_property
    def _examples(self) -> Callable:
        return inspection.examples_program(self.problem, self.layout.execution(self.settings))

    @functools.cached_property
    def _predict(self) -> Callable:
        return jax.jit(next(iter(self.method.predict.values())))
