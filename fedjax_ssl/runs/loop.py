"""The rounds of a run from where it stands to its end, in one process or, in step, in several."""

from collections.abc import Iterator
from typing import NamedTuple

from fedjax_ssl.experiment.best import ROUND, ending
from fedjax_ssl.experiment.divergence import StoppedError
from fedjax_ssl.experiment.experiment import Experiment, Row
from fedjax_ssl.runs.signals import Stop
from fedjax_ssl.simulation.distributed import exchanged
from fedjax_ssl.simulation.round import RunState


class Begun(NamedTuple):
    """Where runs stand: rounds finished, and of each run its state and its last row. Before round 1 there are no states."""

    done: int
    states: list[RunState]
    last: list[Row]


def rounds(
    experiment: Experiment, begun: Begun | None, stop: Stop, end: int
) -> Iterator[tuple[int, list[Row], list[RunState]]]:
    """Runs the rounds up to `end`, or to a signal: yields (round, a row for each run, their states if they are to be saved).

    Where the last state is not saved yet, it comes once more, with no rows. It ends early where all runs are over. `begun`
    is that of process 0, which tells the others, or tells them None: there is nothing to do.
    """
    settings, simulator = experiment.settings, experiment.simulator
    found = exchanged(begun and {"done": begun.done, "last": begun.last})[0]
    stop.begin()  # until then a signal ends at once what waits for other processes
    if found is None:
        return
    done, last = found["done"], found["last"]
    if done:
        states = begun.states if begun else [simulator.template()]
        state = simulator.join(states)
        states.clear()  # copies on the host, which may be large
    elif stop.agreed():
        return
    else:
        state, first = experiment.start()
        last = [row | known for row, known in zip(first, last, strict=True)]
    steps, saved = experiment.steps(state, last), done
    while not (stop.agreed() or done >= end) or done % settings.execution.rounds_per_dispatch:
        try:
            state, rows = next(steps, (state, []))
        except StoppedError as error:
            if saved < done:
                yield done, [], simulator.split(error.state)
            raise
        if not rows:
            return
        done = rows[0]["round"]
        if is_due := done % settings.checkpoint_every == 0:
            saved = done
        is_kept = is_due or any(row.get(ROUND) == done or ending(row, settings) for row in rows)
        yield done, rows, simulator.split(state) if is_kept else []
    if saved < done:
        yield done, [], simulator.split(state)
