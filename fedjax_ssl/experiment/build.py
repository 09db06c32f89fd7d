"""From a config to an experiment: settings, then data, split, task and method."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.errors import ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError

from fedjax_ssl import methods, models
from fedjax_ssl.arrays import Number, PyTree, digest
from fedjax_ssl.data import presets, sources, split
from fedjax_ssl.data.federated import FederatedData, tables_of, widened
from fedjax_ssl.experiment import evaluation, sizes
from fedjax_ssl.experiment.arguments import naming, profiles_of, system_of
from fedjax_ssl.experiment.epsilon import privacy_line
from fedjax_ssl.experiment.expansion import Run, runs_of
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layers import check_found, factors_of
from fedjax_ssl.experiment.layout import Layout, resolve
from fedjax_ssl.experiment.plan import Plan, plan_of
from fedjax_ssl.experiment.scenario import check_stop
from fedjax_ssl.experiment.settings import ModelSettings, Settings
from fedjax_ssl.experiment.unread import facts, unread_by
from fedjax_ssl.experiment.warnings import log_warnings
from fedjax_ssl.method import VIEWS, Method
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.source import Problem
from fedjax_ssl.wrappers import robust

_log = logging.getLogger(__name__)


def build(
    config: Mapping[str, Any] | Settings,
    dataset: sources.Dataset | None = None,
    *,
    method: Callable[..., Method] | None = None,
    model: Any = None,
    layout: Layout | None = None,
    widths: Mapping[str, int] | None = None,
    reads: bool = True,
    start: tuple[Experiment, RunState] | None = None,
) -> Experiment:
    """An experiment from a config: nested mappings with the keys of `Settings`, such as a ConfigDict, or Settings.

    Other arguments take the place of what the config says: `dataset` is data in memory, from `data.sources.from_arrays` or
    `from_features`; `method` is a method's factory, whose options have their defaults; `model` is a network, see
    `models.register_model`. `start` is an experiment and its state, as `load` returns them, whose network's weights
    the run starts from. `layout` and `widths` (of the index tables) are those in the `run.json` of a run that goes on. If
    `reads` is false, random images stand in for a dataset whose size is known, so that a run's costs can be counted.
    The data are read, and nothing is compiled. Raises ValueError or, for missing data, FileNotFoundError, with one line.
    """
    if dataset is not None and not isinstance(dataset, sources.Dataset):
        raise ValueError(f"dataset: got {type(dataset).__name__}, accepted: what sources.from_arrays or from_features returns")
    drawn = drawn_runs(_settings_of(config, method, model), dataset, reads=reads)
    experiment = assembled(drawn, layout, widths, start)
    requires = experiment.method.requires
    for plan, assignment in zip(drawn.plans, drawn.assignments, strict=True):
        split.log_notes(assignment, len(plan.dataset.train_labels), of_clients=requires.clients or requires.next_cohort)
    given, data, shape = drawn.config.data, experiment.settings.data, experiment.problem.spec.image_shape
    views = {view: getattr(data, view) for view in VIEWS}
    if "default" in (given.weak, given.strong) and len(shape) == 3:
        used = [view for view in VIEWS if f"data.{view}" not in experiment.unread]
        _log.info("%s", presets.described(**views, side=min(shape[:2]), used=used))
    if experiment.settings.privacy.noise and requires.clients:
        _log.info("%s", privacy_line(experiment.settings))
    log_warnings(experiment)
    return experiment


def _settings_of(config: Any, method: Any, model: Any) -> Settings:
    """The settings of a config, with a method's factory and a network in place of its own, where they are given."""
    if isinstance(config, Settings) and method is model is None and config.is_registered:
        return config
    tree = config.to_dict() if hasattr(config, "to_dict") else config  # Settings, or a ConfigDict, which is no Mapping
    if not isinstance(tree, Mapping):
        raise ValueError(f"config: got {config!r}, accepted: nested dicts, such as digits.get_config('fl2') returns")
    tree = dict(tree)
    if method is not None:
        if not callable(method):
            raise ValueError(f"method: got {method!r}, accepted: a factory, such as METHODS['fedavg']")
        tree["method"] = {"name": methods.name_of(method)}
    if model is not None:
        own = dict(group) if isinstance(group := tree.get("model"), Mapping) else {}
        shared = {key: own[key] for key in ModelSettings.model_fields if key in own}
        tree["model"] = shared | {"name": models.name_of(model)}
    return Settings.from_dict(tree)


class Drawn(NamedTuple):
    """The runs of a config, each with its plan and its split, all of which are checked."""

    config: Settings
    runs: tuple[Run, ...]
    plans: list[Plan]
    assignments: list[split.Assignment]


def drawn_runs(config: Settings, dataset: sources.Dataset | None = None, *, reads: bool = True) -> Drawn:
    """Reads the data of a config, unless `dataset` has them, and draws the splits; the first part of `build`."""
    runs = runs_of(config)
    plan = plan_of(runs[0].settings, dataset, reads=reads)
    plan = plan._replace(has_batch_norm=bool(plan.weights().stats))
    plans = [plan.of(run.settings) for run in runs]
    check_stop(config, plan.method())
    if dataset is None and config.seeds > 1 and (config.data.resplit or config.data.name == "synthetic"):
        what = "data.resplit" if config.data.resplit else "data.name=synthetic"
        raise ValueError(f"seeds: got {config.seeds} with {what}, which the seed draws, accepted: 1, as runs share images")
    runs = tuple(own.resolved(run, config.vary) for run, own in zip(runs, plans, strict=True))
    numbers, unit = [run.number for run in runs if run.settings.seed == config.seed], "of the run's rounds"
    if config.vary == "server.assumed_faulty":
        numbers, unit = (
            [int(robust.number_assumed(share or 0.0, config.cohort_size)) for share in numbers],
            "clients of a round",
        )
    if len(set(numbers)) < len(numbers):
        given, same = (", ".join(map(str, each)) for each in (config.values, numbers))
        accepted = f"other values, as {given} are {same} {unit}"
        raise ValueError(f"values: got {config.values} with vary={config.vary}, accepted: {accepted}")
    with naming("data"):
        assignments = [split.draw(own.dataset, own.settings.data, own.settings.seed) for own in plans]
    return Drawn(config, runs, plans, assignments)


def assembled(
    drawn: Drawn,
    layout: Layout | None = None,
    widths: Mapping[str, int] | None = None,
    start: tuple[Experiment, RunState] | None = None,
) -> Experiment:
    """The experiment of runs whose splits are drawn; the last part of `build`, with its errors."""
    config, runs, plans, assignments = drawn
    by_class = config.server.static_norm.order == "class" and config.server.static_norm.data == "all"
    pairs = zip(plans, assignments, strict=True)
    data = [split.tables(own.dataset, assignment, pooled_by_class=by_class) for own, assignment in pairs]
    data = widened(data, widths) if len(data) > 1 or widths else data
    counts = np.concatenate([np.stack([own.labeled.count, own.unlabeled.count], axis=1) for own in data])
    settings = plans[0].settings
    options = settings.method.for_clients(counts, settings.client.batch_size)
    plan = plans[0]._replace(settings=settings.model_copy(update={"method": options})).started(start)
    for own in data:
        sizes.check_trainings(plan.settings, own)
    method = plan.method()
    layout = layout or resolve(plan.settings, method.requires, len(runs))
    plan = plan._replace(conv=layout.conv)
    task = plan.task()
    problem = _problem(drawn, data, lambda number: plan.varied(config.vary, number).method(task))
    params = plan.weights().params
    num_params = sum(math.prod(leaf.shape) for leaf in [*jax.tree.leaves(params), *plan.fixed.values()])
    sizes.check_states(plan.settings, problem.first_method, problem.spec, num_params, len(runs))
    unread = unread_by(plan.settings, facts(plan.settings, method, has_batch_norm=plan.has_batch_norm))
    if config.vary in unread:
        raise ValueError(f"vary: got {config.vary!r}, which this run does not read, accepted: with {unread[config.vary]}")
    for group, training in plan.settings.trainings.items():
        if (key := f"{group}.optimizer.layers") not in unread:
            check_found(key, factors_of(key, training.optimizer.layers), params)
    experiment = Experiment(
        *(runs, problem, layout, num_params, plan.views, plan.stored_shape, plan.dataset.classes, plan.dataset),
        changed=lambda changes, number: plan.varied(config.vary, number).with_values(changes).method(task),
        tiny_method=lambda number: plan.varied(config.vary, number).with_tiny_network().method(),
        unread=unread,
        fixed=plan.fixed,
        start_digest=digest(plan.start).hexdigest() if plan.start else "",
    )
    if problem.numbers is not None:
        _check_traceable(experiment, config)
    return experiment


def _problem(drawn: Drawn, data: Sequence[FederatedData], method: Callable[[Number | None], Method]) -> Problem:
    """What is simulated: runs on their split data, with the method of each run's number."""
    config, runs, plans, _ = drawn
    is_traced = bool(config.vary) and not config.vary.startswith("data.")  # programs do not read a split's numbers
    requires = method(None).requires
    system = system_of(config) if requires.clients else None
    spec = plans[0].spec._replace(client_rows=data[0].unlabeled.index.shape[1])
    if not (requires.clients or requires.next_cohort):  # then the program does not depend on how many clients there are
        spec = spec._replace(num_clients=1, cohort_size=1, client_rows=1, labeled_cohort=0)
    tables: list[dict[str, PyTree]] = [dict(tables_of(own)) for own in data]
    if system is not None:
        for own, run in zip(tables, runs, strict=True):
            own["profiles"] = profiles_of(run.settings)
    return Problem(
        method=method,
        train=data[0].train,
        test=data[0].test,
        tables=tuple(tables),
        seeds=tuple(run.settings.seed for run in runs),
        numbers=tuple(run.number for run in runs if run.number is not None) if is_traced else None,
        spec=spec,
        rounds=config.rounds if requires.rounds else None,
        on_host=config.execution.data != "device",
        on_disk=config.execution.data == "disk",
        system=system,
        stop=requires.clients and config.client.on_nonfinite == "stop",
        scores=partial(evaluation.scores, names=config.scores) if config.scores else None,
    )


def _check_traceable(experiment: Experiment, config: Settings) -> None:
    """Raises ValueError where Python code reads the number that varies."""
    try:
        experiment.simulator.trace()
    except (ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError):
        got = f"got {config.vary!r}, by which the program of method.name={config.method.name} is chosen"
        accepted = "a number that one program can have many values of; run one after another instead"
        raise ValueError(f"vary: {got}, accepted: {accepted}") from None
