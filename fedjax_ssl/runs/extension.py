"""Whether a run may go on for more rounds than it began with: whether anything in it depends on their number."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.simulation.distributed import is_key
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.round import RunState, run_round
from fedjax_ssl.simulation.source import DeviceSource, Problem, RunInputs


def dependence(experiment: Experiment, other: Experiment) -> str:
    """What depends on the number of rounds, in which alone two experiments differ; empty: nothing does.

    Their programs are traced and compared, so that this also holds for methods that are not the package's.
    """
    if same_programs(experiment.problem, other.problem):
        return ""
    settings = experiment.settings
    reasons = [*_schedules(experiment), *_phases(settings, experiment.problem, other.problem)]
    return ", ".join(reasons) or f"method.name={settings.method.name}, which reads the number of rounds"


def same_programs(first: Problem, second: Problem) -> bool:
    """Whether initialization and rounds of two problems are the same computations."""
    for one, other in zip(_traced(first), _traced(second), strict=True):
        arrays, of_other = list(_constants(one)), list(_constants(other))
        if str(one.jaxpr) != str(other.jaxpr) or len(arrays) != len(of_other):
            return False
        if not all(np.array_equal(x, y) for x, y in zip(arrays, of_other, strict=True) if not is_key(x)):
            return False
    return True


def _constants(program: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """The arrays that a program holds, and those that its loops, branches and jitted functions hold."""
    if isinstance(program, ClosedJaxpr):
        yield from program.consts
        program = program.jaxpr
    for value in (value for equation in program.eqns for value in equation.params.values()):
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from _constants(inner)


def _traced(problem: Problem) -> Sequence[ClosedJaxpr]:
    """Initialization and a round of one run, without results that nothing uses."""
    source, execution = DeviceSource(problem), Execution()
    number = None if problem.numbers is None else problem.numbers[0]  # traced, it is weakly typed, as in a simulator

    def round_(state: RunState, inputs: RunInputs, pools: tuple) -> tuple:
        ready = source.open(state, inputs, pools)
        new, metrics = run_round(ready, execution)
        return source.close(state, new, ready.cohort), metrics

    inputs = RunInputs(problem.tables[0], number)
    first, (state, _) = jax.make_jaxpr(source.initialize, return_shape=True)(inputs, jax.random.key(0), source.pools)
    return [_used(first), _used(jax.make_jaxpr(round_)(state, inputs, source.pools))]


def _used(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program without operations whose results are not used, such as those that hand the number of rounds on."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


def _schedules(experiment: Experiment) -> list[str]:
    """The learning-rate schedules in use that end with the last round."""
    settings = experiment.settings
    at_server = settings.data.labels_at == "server"
    groups = {"client": experiment.method.requires.clients, "server.training": at_server}
    found = {group: settings.trainings[group].optimizer.schedule for group, used in groups.items() if used}
    return [f"{group}.optimizer.schedule={schedule}" for group, schedule in found.items() if schedule != "constant"]


def _phases(settings: Settings, first: Problem, second: Problem) -> list[str]:
    """The method's options that mean another number of rounds in the two."""
    options = settings.method
    try:
        before, after = (options.for_rounds(problem.rounds).model_dump() for problem in (first, second))
    except ValueError:  # what one of the two numbers does not allow
        return []
    return [f"method.{key}={getattr(options, key)}" for key in before if before[key] != after[key]]
