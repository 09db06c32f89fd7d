"""Several runs of one config as one program: its seeds, or the values of a number.

A run here equals the run alone with its settings, within float32 rounding. Index tables get the width that the largest client
of any run needs; only methods that put labeled and unlabeled examples of a client into one table (FedSem, FedTriNet, FedSiam
with labels at the clients) draw other shuffles then than on tables of their own width.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError

from fedjax_ssl import models
from fedjax_ssl.data import sources
from fedjax_ssl.data.federated import TABLES, widened
from fedjax_ssl.experiment.build import Plan, check_unrolled, counts_of, plan_of
from fedjax_ssl.experiment.experiment import COSTS, TOTALS, divergence, is_evaluated, timed
from fedjax_ssl.experiment.layout import Layout, available_devices, resolve
from fedjax_ssl.experiment.runs import Run, replaced, runs_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Method
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.many import ManyProblem, ManySimulator, Spread, of_runs, spread_of
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.simulator import Problem

Row = dict[str, Any]
REASON = "diverged"
"""The key of a row that says why its run has ended; such a row has no other key but `round`."""


@dataclasses.dataclass(frozen=True)
class ManyExperiment:
    """R runs that are ready to run together.

    Attributes:
        runs: what each of them is.
        problem: their methods, data and keys.
        simulator: their programs.
        num_params: parameters of the network.
        layout: as of an Experiment; its devices share the runs.
    """

    runs: tuple[Run, ...]
    problem: ManyProblem
    simulator: ManySimulator
    num_params: int
    layout: Layout

    @property
    def settings(self) -> Settings:
        """The first run's, for what all have in common."""
        return self.runs[0].settings

    def only(self, which: Sequence[int]) -> ManyExperiment:
        """The experiment of some of the runs, on the same tables."""
        if len(which) == len(self.runs):
            return self
        tables, seeds, numbers = self.problem.tables, self.problem.seeds, self.problem.numbers
        problem = self.problem._replace(
            tables=[tables[i] for i in which],
            seeds=[seeds[i] for i in which],
            numbers=None if numbers is None else [numbers[i] for i in which],
        )
        return _assemble(tuple(self.runs[i] for i in which), problem, self.num_params)

    def start(self) -> tuple[RunState, list[Row]]:
        """The state before round 1, and each run's row of metrics: round 0 and the totals so far."""
        began, compiled = time.perf_counter(), self.simulator.compile_s
        state, _ = self.simulator.initialize()
        seconds = {"time/total_s": time.perf_counter() - began, "time/compile_s": self.simulator.compile_s - compiled}
        return state, [{"round": 0, **dict.fromkeys(COSTS, 0), **seconds} for _ in self.runs]

    def rounds(
        self, state: RunState | None = None, last: Sequence[Mapping[str, Any]] | None = None
    ) -> Iterator[tuple[RunState, list[Row]]]:
        """Runs the rounds that are left, one per step: (state with a leading axis of runs, a row of metrics per run).

        Each step consumes the state before it. A row has the keys of a single run's; its seconds are those of the program, and
        `perf/client_images_per_s` the run's images over them. A run that diverges does not end the others: from then on its
        rows have `round` and `diverged`, the reason. Once all have, the iteration ends.

        Args:
            state: where to go on from; None: new runs.
            last: the rows of the round before, whose totals go on; where one has `diverged`, its run has ended. None: new.
        """
        if state is None:
            state, last = self.start()
        before = [dict(row) for row in last or [dict.fromkeys(TOTALS, 0)] * len(self.runs)]
        rows, began, compiled = [dict(row) for row in before], time.perf_counter(), self.simulator.compile_s
        for number in range(int(state.round[0]) + 1, self.settings.rounds + 1):
            if all(REASON in row for row in rows):
                return
            state, news = self._round(state, number, rows)
            spent = {
                "time/total_s": time.perf_counter() - began,
                "time/compile_s": self.simulator.compile_s - compiled,
            }
            rows = [_row(number, *of_one, spent) for of_one in zip(news, rows, before, strict=True)]
            yield state, rows

    def _round(self, state: RunState, number: int, rows: Sequence[Row]) -> tuple[RunState, list[Row]]:
        """One round of all runs, and the evaluation after it where one is due; of a run that has ended: why."""
        simulator = self.simulator
        compiled, start = simulator.compile_s, time.perf_counter()
        names = [None if REASON in row else str(run) for run, row in zip(self.runs, rows, strict=True)]
        state, found = simulator.round(state, names)
        seconds = time.perf_counter() - start - (simulator.compile_s - compiled)
        evaluated = simulator.evaluate(state) if is_evaluated(self.settings, number) else [{}] * len(self.runs)
        news: list[Row] = []
        for row, metrics, accuracy in zip(rows, found, evaluated, strict=True):
            ended = row.get(REASON) or divergence(number, metrics, self.problem.cohort_size)
            news.append({REASON: ended} if ended else timed(metrics, seconds) | accuracy)
        return state, news

    def states(self, state: RunState) -> list[RunState]:
        """Each run's own state, as it has it alone; an Experiment of its settings takes it, to predict for example."""
        return of_runs(state, len(self.runs))


def _row(number: int, news: Row, row: Row, before: Row, spent: Mapping[str, float]) -> Row:
    """A run's row of a round, from its metrics, its row of the round before, and the one that this start began with."""
    if REASON in news:
        return {"round": number, **news}
    costs = {key: row[key] + news.get(key, 0) for key in COSTS}
    return {"round": number, **news, **costs, **{key: before[key] + seconds for key, seconds in spent.items()}}


def build(config: Mapping[str, Any] | Settings, dataset: sources.Dataset | None = None) -> ManyExperiment:
    """The experiment of a config with several runs; reads the data, compiles nothing. See `fedjax_ssl.experiment.build.build`.

    Raises:
        ValueError: as there, and where the config is not one of several runs, or its number cannot be varied in one program.
        FileNotFoundError: for missing data.
    """
    asked = config if isinstance(config, Settings) else Settings.from_dict(config)
    runs = runs_of(asked)
    if dataset is None and asked.seeds > 1 and (asked.data.resplit or asked.data.name == "synthetic"):
        what = "data.resplit" if asked.data.resplit else "data.name=synthetic"
        raise ValueError(f"seeds: got {asked.seeds} with {what}, which the seed draws, accepted: 1, as runs share their images")
    plan = plan_of(runs[0].settings, dataset, _layout(runs)[0].conv)
    plans = [plan.of(run.settings) for run in runs]
    data = widened([own.split() for own in plans])
    counts = np.concatenate([counts_of(own) for own in data])
    is_traced = bool(asked.vary) and not asked.vary.startswith("data.")  # a split's number is not read by the programs
    problem = ManyProblem(
        method=functools.partial(_method, plan, counts, asked.vary),
        train=data[0].train,
        test=data[0].test,
        tables=[{name: getattr(own, name) for name in TABLES} for own in data],
        seeds=[run.settings.seed for run in runs],
        numbers=[run.number for run in runs if run.number is not None] if is_traced else None,
        spec=plan.spec._replace(client_rows=data[0].unlabeled.index.shape[1]),
        cohort_size=asked.cohort_size,
    )
    runs = tuple(run._replace(settings=own.settings) for run, own in zip(runs, plans, strict=True))
    if asked.execution.steps == "unrolled":
        check_unrolled(Problem(plan.method(counts), data[0], problem.spec, problem.cohort_size))
    experiment = _assemble(runs, problem, plan.num_params())
    if is_traced:
        _check_traced(experiment, asked.vary)
    return experiment


def _layout(runs: Sequence[Run]) -> tuple[Layout, Execution, Spread]:
    """How the runs and their clients are laid out: a run's clients are all on one of the devices, which share the runs."""
    given = runs[0].settings
    available = len(available_devices(given))
    spread = spread_of(len(runs), given.execution.devices or available)
    alone = dataclasses.replace(given, execution=dataclasses.replace(given.execution, devices=1))
    layout = resolve(alone)
    kernels_vmapped = layout.chunk_size != 1 or spread.vmapped
    conv = models.resolve_conv(given.execution.conv, jax.default_backend(), kernels_vmapped=kernels_vmapped)
    execution = layout.execution(alone)._replace(shrinks=False)
    return layout._replace(conv=conv, devices=spread.mesh.size if spread.mesh is not None else 1), execution, spread


def _assemble(runs: tuple[Run, ...], problem: ManyProblem, num_params: int) -> ManyExperiment:
    layout, execution, spread = _layout(runs)
    simulator = ManySimulator(problem, spread, execution, layout.forward_batch_size)
    return ManyExperiment(runs, problem, simulator, num_params, layout)


def _method(plan: Plan, counts: np.ndarray, key: str, number: Any) -> Method:
    """The plan's method, with `number`, a traced scalar, under `key`; None: as it is planned."""
    if number is None:
        return plan.method(counts)
    path = key.split(".")
    is_option = path[0] == "method" and hasattr(plan.options, path[1])
    options = replaced(plan.options, path[1:], number) if is_option else plan.options
    return plan._replace(settings=replaced(plan.settings, path, number), options=options).method(counts)


def _check_traced(experiment: ManyExperiment, key: str) -> None:
    """Raises ValueError where Python code decides something by the number, which is a traced one in the programs."""
    try:
        experiment.simulator.trace()
    except (ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError):
        name = experiment.settings.method["name"]
        raise ValueError(
            f"vary: got {key!r}, by which the program of method.name={name} is chosen, accepted: a number that one program can "
            "have many values of; run one after another instead"
        ) from None
