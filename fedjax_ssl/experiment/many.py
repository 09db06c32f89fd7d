"""Several runs of one config as one program: its seeds, or the values of a number.

A run here equals the run alone with its settings, within float32 rounding. Index tables get the width that the largest client
of any run needs; only methods that put labeled and unlabeled examples of a client into one table (FedSem, FedTriNet, FedSiam
with labels at the clients) draw other shuffles then than on tables of their own width.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.errors import ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError

from fedjax_ssl.data import sources
from fedjax_ssl.data.federated import TABLES, FederatedData, widened
from fedjax_ssl.experiment.build import Plan, check_unrolled, counts_of, plan_of
from fedjax_ssl.experiment.experiment import COSTS, TOTALS, divergence, is_evaluated, timed
from fedjax_ssl.experiment.layout import Layout, available_devices, fewest, resolve
from fedjax_ssl.experiment.runs import Run, replaced, runs_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.method import Method
from fedjax_ssl.methods import SERVER_ALONE
from fedjax_ssl.simulation.many import ManyProblem, ManySimulator, of_runs, spread_of
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.simulator import Problem

Row = dict[str, Any]
REASON = "diverged"
"""The key of a row that says why its run has ended; such a row has no other key but `round`."""


class Methods(NamedTuple):
    """The methods of several runs.

    Attributes:
        plan: of the first of them.
        counts: what `Training` has of the clients of all runs.
        vary: the key of the number that differs from run to run, or empty.
    """

    plan: Plan
    counts: np.ndarray
    vary: str

    def of(self, number: Any) -> Method:
        """The plan's method, with `number`, a traced scalar, under the key; None: as it is planned."""
        plan = self.plan
        if number is None:
            return plan.method(self.counts)
        path = self.vary.split(".")
        is_option = path[0] == "method" and hasattr(plan.options, path[1])
        options = replaced(plan.options, path[1:], number) if is_option else plan.options
        return plan._replace(settings=replaced(plan.settings, path, number), options=options).method(self.counts)


@dataclasses.dataclass(frozen=True)
class ManyExperiment:
    """R runs that are ready to run together.

    Attributes:
        runs: what each of them is.
        methods: how a run's method is made.
        problem: their methods, data and keys.
        simulator: their programs.
        num_params: parameters of the network.
        layout: as of an Experiment, of each run; its devices are the run's own.
    """

    runs: tuple[Run, ...]
    methods: Methods
    problem: ManyProblem
    simulator: ManySimulator
    num_params: int
    layout: Layout

    @property
    def settings(self) -> Settings:
        """The first run's, for what all have in common."""
        return self.runs[0].settings

    def only(self, which: Sequence[int]) -> ManyExperiment:
        """The experiment of some of the runs, on the same tables, in the layout that is usual for so many."""
        if len(which) == len(self.runs):
            return self
        tables, seeds, numbers = self.problem.tables, self.problem.seeds, self.problem.numbers
        problem = self.problem._replace(
            tables=[tables[i] for i in which],
            seeds=[seeds[i] for i in which],
            numbers=None if numbers is None else [numbers[i] for i in which],
        )
        runs = tuple(self.runs[i] for i in which)
        return _assemble(runs, self.methods, problem, self.num_params, _layout(runs), self.most_devices)

    @property
    def num_devices(self) -> int:
        """The devices that share the runs."""
        return self.simulator.spread.num_devices

    @property
    def most_devices(self) -> int:
        """The devices that could share them, were there more runs."""
        return _devices(self.settings)

    def in_layout(self, layout: Layout, num_devices: int) -> ManyExperiment:
        """The experiment in another layout, on at most so many devices; its settings stay as they are.

        Raises:
            ValueError: there are too many steps to write out, or a run has more devices.
        """
        if (layout, num_devices) == (self.layout, self.num_devices):
            return self
        return _assemble(self.runs, self.methods, self.problem, self.num_params, layout, num_devices)

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
    layout = _layout(runs)
    plan = plan_of(runs[0].settings, dataset, layout.conv)
    plans = [plan.of(run.settings) for run in runs]
    data = widened([own.split() for own in plans])
    counts = np.concatenate([counts_of(own) for own in data])
    is_traced = bool(asked.vary) and not asked.vary.startswith("data.")  # a split's number is not read by the programs
    methods = Methods(plan, counts, asked.vary)
    problem = ManyProblem(
        method=methods.of,
        train=data[0].train,
        test=data[0].test,
        tables=[{name: getattr(own, name) for name in TABLES} for own in data],
        seeds=[run.settings.seed for run in runs],
        numbers=[run.number for run in runs if run.number is not None] if is_traced else None,
        spec=plan.spec._replace(client_rows=data[0].unlabeled.index.shape[1]),
        cohort_size=asked.cohort_size,
    )
    runs = tuple(run._replace(settings=own.settings) for run, own in zip(runs, plans, strict=True))
    experiment = _assemble(runs, methods, problem, plan.num_params(), layout, _devices(asked))
    if is_traced:
        _check_traced(experiment, asked.vary)
    return experiment


def _devices(settings: Settings) -> int:
    """The most that may share the runs; raises ValueError where more are asked for than there are."""
    available = available_devices(settings)
    return settings.execution.devices or len(available)


def _layout(runs: Sequence[Run]) -> Layout:
    """How each run is laid out: on one device, or on several that share its clients where there are enough of them."""
    given = runs[0].settings
    of_each = max(1, _devices(given) // len(runs))
    shares_clients = given.execution.strategy == "auto" and given.method["name"] not in SERVER_ALONE
    own = fewest(given.cohort_size, of_each) if shares_clients else 1
    return resolve(dataclasses.replace(given, execution=dataclasses.replace(given.execution, devices=own)))


def _assemble(
    runs: tuple[Run, ...], methods: Methods, problem: ManyProblem, num_params: int, layout: Layout, num_devices: int
) -> ManyExperiment:
    """The experiment in a layout of each run, on at most so many devices."""
    settings, spread = runs[0].settings, spread_of(len(runs), num_devices, layout.devices)
    # Pseudo-labels are made of as many examples at a time as is given, see `build.assembled`.
    pinned = layout._replace(forward_batch_size=settings.execution.batch_size).pinned(methods.plan.settings)
    plan = methods.plan._replace(conv=layout.conv, settings=pinned)
    problem = problem._replace(method=methods._replace(plan=plan).of)
    if layout.steps == "unrolled":
        data = FederatedData(problem.train, problem.test, **problem.tables[0])
        check_unrolled(Problem(problem.method(None), data, problem.spec, problem.cohort_size))
    execution = layout.execution(settings)._replace(mesh=None, share=layout.devices)
    simulator = ManySimulator(problem, spread, execution, layout.forward_batch_size)
    return ManyExperiment(runs, methods, problem, simulator, num_params, layout)


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
