"""Runs in folders: rounds, checkpoints, logs, resume and a clean stop, for one run or for several together."""

import itertools
import logging
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple

from fedjax_ssl.experiment.best import ENDED_EARLY, ROUND, ending
from fedjax_ssl.experiment.divergence import REASON, DivergedError
from fedjax_ssl.experiment.experiment import TOTALS, Experiment, Row
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import REMEDY, read_json, write_json
from fedjax_ssl.options import plural
from fedjax_ssl.runs import changes, loop, provenance
from fedjax_ssl.runs.checkpoint import BEST, Checkpoints
from fedjax_ssl.runs.clients import ClientsLog
from fedjax_ssl.runs.folder import CONFIG, DIVERGED, RUN, SUMMARY, diverged, ended_early, folders, is_finished, over, write_run
from fedjax_ssl.runs.lock import owned
from fedjax_ssl.runs.log import MetricsLog
from fedjax_ssl.runs.progress import Progress
from fedjax_ssl.runs.signals import Stop
from fedjax_ssl.runs.summary import seen, summary
from fedjax_ssl.runs.trackers import tracked, trackers
from fedjax_ssl.simulation.contract import is_breach
from fedjax_ssl.simulation.distributed import exchanged, is_first
from fedjax_ssl.simulation.results import CLIENTS_KEY
from fedjax_ssl.simulation.round import RunState

WRITTEN_ANEW = "%s is damaged, and is written anew from the log"
_log = logging.getLogger(__name__)


class RefusedError(ValueError):
    """A workdir from which the run cannot go on."""


def noted(workdir: pathlib.Path, names: Sequence[str], rounds: int) -> tuple[Layout | None, dict[str, int]]:
    """The layout and the table widths of a workdir's first run that has begun and has not finished `rounds` rounds.

    With them it goes on bit for bit. (None, {}) if there is no such run.
    """
    for name in names:
        folder = workdir / name
        if (folder / RUN).exists() and not is_finished(folder, rounds):
            return provenance.layout(folder / RUN), read_json(folder / RUN).get("widths", {})
    return None, {}


class _Folder(NamedTuple):
    """One run's files."""

    path: pathlib.Path
    log: MetricsLog
    checkpoints: Checkpoints
    best: Checkpoints | None  # None unless `keep_best`

    def keep_best(self) -> None:
        """Waits for the best state to be on disk, and deletes older ones that are not the best of any checkpoint's rounds."""
        if self.best is not None:
            self.best.wait()
            self.best.delete_before(min(self.checkpoints.rounds(), default=0))


def run(
    experiment: Experiment, workdir: pathlib.Path, stop: Stop, *, stop_after: int | None = None, command: Sequence[str] = ()
) -> None:
    """Runs the remaining rounds of the runs that have not finished, from the newest round of which all have a checkpoint.

    Once `stop` has a signal, or `stop_after` rounds are finished, the state is saved and it returns. `command` is what was
    typed, for `run.json`. Of several processes the first one alone has the folders; the others run the same rounds.

    DivergedError, at the end, where runs diverged, now or before: they have `diverged.json` in place of a summary.
    StoppedError, once the state is saved, where a client ends the run. RefusedError for damaged files, another run's log, or
    other data; OwnedError where another process has a folder, OSError where one cannot be written to.
    """
    end = min(experiment.settings.rounds, stop_after or experiment.settings.rounds)
    if not is_first():
        for _ in loop.rounds(experiment, None, stop, end):
            pass
        return
    with owned(folders(experiment, workdir)):
        _run(experiment, workdir, stop, end, command)


def _run(experiment: Experiment, workdir: pathlib.Path, stop: Stop, end: int, command: Sequence[str]) -> None:
    paths, rounds = folders(experiment, workdir), experiment.settings.rounds
    with _refusing():
        for own, path in zip(experiment.runs, paths, strict=True):
            _mend_summary(own.settings, path, experiment)
    left = [i for i, path in enumerate(paths) if not is_finished(path, rounds)]
    if left:  # runs that have ended early keep their places in the program, so that the others have the same bits
        left = sorted({*left, *(i for i, path in enumerate(paths) if ended_early(path))})
    with _refusing():
        for i, path in enumerate(paths):
            provenance.check_began(path / RUN, experiment.runs[i].settings)
            if i not in left:
                _check_finished(path, experiment.runs[i].settings)
            diverged(path)
        provenance.check_data([path / RUN for path in paths], experiment)
        provenance.check_widths([paths[i] / RUN for i in left], experiment)
        for i, path in enumerate(paths):
            if i not in left:
                write_json(path / CONFIG, experiment.runs[i].settings.to_dict())
    ended = [i for i, path in enumerate(paths) if i not in left or (path / DIVERGED).exists()]
    program = changes.program(experiment) if ended else {}
    of_ended = {paths[i]: changes.changed(paths[i] / RUN, experiment.runs[i].settings, program) for i in ended}
    if not all(over(paths[i]) for i in left):
        some = experiment.only(left)
        with ExitStack() as stack:
            opened = []
            for path in (paths[i] for i in left):
                newest = stack.enter_context(Checkpoints(path))
                best = stack.enter_context(Checkpoints(path, name=BEST)) if experiment.settings.keep_best else None
                opened.append(_Folder(path, log_of(path), newest, best))
            _go_on(some, opened, stop, end, command)
    else:
        exchanged(None)  # other processes wait for what `loop.rounds` tells them
    changes.warn(of_ended, changes.ENDED)
    if all(is_finished(path, rounds) for path in paths):
        early = {str(run): why for run, path in zip(experiment.runs, paths, strict=True) if (why := ended_early(path))}
        for name, why in early.items():
            _log.info("%sended early: %s", f"{name}: " * (len(paths) > 1), why)
        what = "all runs are" if early else "the round is" if rounds == 1 else f"all {rounds} rounds are"
        _log.info("%s done, results in %s", what, workdir)
    reasons = {i: diverged(paths[i]) for i in left if (paths[i] / DIVERGED).exists()}
    if reasons:
        of_runs = "; ".join(f"{experiment.runs[i]}: {reason}" for i, reason in reasons.items())
        shown = f"{len(reasons)} of {len(paths)} runs diverged: {of_runs}" if len(paths) > 1 else reasons[0]
        raise DivergedError(shown)


def _go_on(experiment: Experiment, opened: Sequence[_Folder], stop: Stop, end: int, command: Sequence[str]) -> None:
    """Runs all up to round `end`, or to a signal."""
    settings, layout, run_files = experiment.settings, experiment.layout, [folder.path / RUN for folder in opened]
    with _refusing():
        provenance.warn_of_changes(run_files, layout)
        begun = _restore(experiment, opened)
    try:
        program = changes.program(experiment)
    except ValueError as error:
        if not is_breach(error):
            raise
        raise RefusedError(str(error)) from error
    said = [changes.changed(path, own.settings, program) for path, own in zip(run_files, experiment.runs, strict=True)]
    changes.warn(dict(zip((folder.path for folder in opened), said, strict=True)), changes.GOES_ON)
    write_run(run_files, experiment, layout, command, program)
    for own, folder in zip(experiment.runs, opened, strict=True):
        write_json(folder.path / CONFIG, own.settings.to_dict())
        folder.log.begins = provenance.begins(folder.path / RUN)
    if done := begun.done:
        _log.info("going on after round %d", done)
    rounds = loop.rounds(experiment, begun, stop, end)
    with ExitStack() as stack:
        boards = [trackers(own.settings, folder.path, done) for own, folder in zip(experiment.runs, opened, strict=True)]
        for tracker in itertools.chain.from_iterable(boards):
            stack.enter_context(closing(tracker))
        progress = stack.enter_context(closing(Progress(settings.rounds, done)))
        for done, rows, states in rounds:
            if (now := layout.after(experiment.simulator.execution)) != layout:
                layout = now
                write_run(run_files, experiment, layout, command, program)
            for folder, board, row in zip(opened, boards, rows, strict=bool(rows)):
                of_clients = row.pop(CLIENTS_KEY, None)
                if not {REASON, ENDED_EARLY} & row.keys():
                    if of_clients:
                        ClientsLog(folder.path).append(done, of_clients)
                    folder.log.append(row)
                    for tracker in board:
                        tracker.add(done, tracked(row))
                elif REASON in row and not over(folder.path):
                    write_json(folder.path / DIVERGED, row)
            if rows:
                progress.update(done, seen(rows))
            if states:
                _save(opened, done, states, rows, settings)
            for own, folder, row in zip(experiment.runs, opened, rows, strict=bool(rows)):
                if ending(row, own.settings):
                    _finish(folder, own.settings, layout, experiment.num_params)
    if done < settings.rounds and not all(over(folder.path) for folder in opened):
        changed = " without --stop_after, or with a larger number," if done >= end else ""
        _log.info("stopped after round %d of %d, the same command%s goes on", done, settings.rounds, changed)
    for own, folder in zip(experiment.runs, opened, strict=True):
        last = folder.log.rows()[-1:] if settings.patience else ()  # killed before its summary was written
        if not over(folder.path) and (done >= settings.rounds or any(ending(row, own.settings) for row in last)):
            _finish(folder, own.settings, layout, experiment.num_params)


def _finish(folder: _Folder, settings: Settings, layout: Layout, num_params: int) -> None:
    """Writes the summary of a run whose last row is in its log."""
    with _refusing():
        rows = _whole_log(folder.path, settings)
    folder.checkpoints.wait()  # a run with a summary is not run again
    folder.keep_best()
    write_json(folder.path / SUMMARY, summary(settings, rows, layout, num_params))


def log_of(folder: pathlib.Path) -> MetricsLog:
    """The log of the run in a folder, whose digest tells that it is this run's."""
    return MetricsLog(folder, provenance.begins(folder / RUN))


def _mend_summary(settings: Settings, folder: pathlib.Path, experiment: Experiment) -> None:
    """Writes a damaged summary anew from a log of all rounds, where there is no checkpoint from which the run could do so."""
    with Checkpoints(folder, read_only=True) as checkpoints:
        if _has_damaged_summary(folder) and not checkpoints.rounds():
            rows = _whole_log(folder, settings)
            write_json(folder / SUMMARY, summary(settings, rows, experiment.layout, experiment.num_params))
            _log.warning(WRITTEN_ANEW, folder / SUMMARY)


def _has_damaged_summary(folder: pathlib.Path) -> bool:
    return (folder / SUMMARY).exists() and not is_finished(folder, 1)


def _check_finished(folder: pathlib.Path, settings: Settings) -> None:
    """Raises ValueError where a finished run's files are damaged, or summary, log and checkpoints are of several runs."""
    last, end = _whole_log(folder, settings)[-1], read_json(folder / SUMMARY)
    read_json(folder / RUN)
    with Checkpoints(folder, read_only=True) as checkpoints:
        check_same_run(log_of(folder), *checkpoints.newest_log())
    ours = {key: last.get(key) for key in TOTALS} | {"seed": settings.seed, "method": settings.method.name}
    if any(end.get(key) != value for key, value in ours.items()):
        raise ValueError(f"{folder / SUMMARY} is not the summary of the log beside it: {REMEDY}")


@contextmanager
def _refusing() -> Iterator[None]:
    """Within it what is wrong with a folder's files is a RefusedError."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:  # a disk that is full, or fails, is no fault of theirs
        raise RefusedError(str(error)) from error


def _whole_log(folder: pathlib.Path, settings: Settings) -> list[Row]:
    """The rows of a run that has finished; ValueError where its log is damaged, or lacks any of them."""
    rows = MetricsLog(folder).rows()
    if len(rows) < settings.rounds and not any(ending(row, settings) for row in rows[-1:]):
        got = f"{len(rows)} of {plural(settings.rounds, 'finished round')}"
        raise ValueError(f"{folder / 'metrics.jsonl'} has {got}: {REMEDY}")
    return rows


def _save(opened: Sequence[_Folder], done: int, states: Sequence[RunState], rows: Sequence[Row], settings: Settings) -> None:
    """Saves the states of round `done`: of all runs where that is due, else of those whose best or last round it is."""
    is_due = not rows or done % settings.checkpoint_every == 0
    for folder in opened:  # none takes the place of a checkpoint that the others still need
        folder.checkpoints.wait()
    for folder, own, row in zip(opened, states, rows or [{}] * len(opened), strict=True):
        if over(folder.path):
            continue
        if folder.best is not None and row.get(ROUND) == done:
            folder.best.save(done, own, log=folder.log.digest())
        if is_due or ending(row, settings):
            folder.keep_best()
            folder.checkpoints.save(done, own, log=folder.log.digest())


def _restore(experiment: Experiment, opened: Sequence[_Folder]) -> loop.Begun:
    """The newest round of which all runs that have not diverged have a checkpoint, or round 0."""
    live = [folder for folder in opened if not over(folder.path)]
    done, states = _newest_of_all(experiment, live)
    for folder in live:
        _check_log(folder, done, experiment.settings)
        if _has_damaged_summary(folder.path):
            _log.warning(WRITTEN_ANEW, folder.path / SUMMARY)
    for folder in live:
        if len(opened) > 1:
            folder.checkpoints.delete_after(done)
        if folder.best is not None:
            folder.best.delete_after(done)
        folder.log.truncate(done)
        ClientsLog(folder.path).truncate(done)
    if not states:
        return loop.Begun(0, [], [over(folder.path) for folder in opened])
    # In the place of a run that is over the program runs the first of the others once more.
    own = iter(states)
    of_all = [states[0] if over(folder.path) else next(own) for folder in opened]
    last = [{"round": done, **over(folder.path)} if over(folder.path) else folder.log.rows()[-1] for folder in opened]
    return loop.Begun(done, of_all, last)


def _newest_of_all(experiment: Experiment, live: Sequence[_Folder]) -> tuple[int, list[RunState]]:
    """The newest round of which all have a checkpoint, and its states; (0, []): there is none yet."""
    template, upto = experiment.simulator.template(), None
    while True:
        found = [folder.checkpoints.restore(template, upto) for folder in live]
        restored = [pair for pair in found if pair is not None]
        rounds = {number for number, _ in restored}
        if len(restored) < len(found):
            if not restored:
                return 0, []
            new = next(folder for folder, pair in zip(live, found, strict=True) if pair is None)
            have_one = all(len(folder.checkpoints.rounds()) <= 1 for folder in live)
            are_first = have_one and upto is None and max(rounds) <= experiment.settings.checkpoint_every
            if not (are_first and new.log.rows()):
                others = f"where other runs of {new.path.parent} have: let those finish without it"
                raise ValueError(f"{new.path} has no checkpoint to go on from {others}, or start anew with --overwrite")
            _log.warning("%s: no checkpoint yet, perhaps killed while the first were written: all begin anew", new.path)
            return 0, []
        if len(rounds) == 1:
            return rounds.pop(), [state for _, state in restored]
        upto = min(rounds)


def _check_log(folder: _Folder, done: int, settings: Settings) -> None:
    """Raises ValueError where a run's log is not the one of its checkpoint of round `done`; 0: it has no checkpoint."""
    rows = len(folder.log.rows())
    if not done:
        # A process may be killed before its first checkpoint is on disk, which another thread writes.
        were_there = (folder.path / SUMMARY).exists()
        if were_there or rows > 2 * settings.checkpoint_every + settings.execution.rounds_per_dispatch:
            raise ValueError(f"{folder.path} has {plural(rows, 'round')} in its log and no checkpoint: {REMEDY}")
        if rows:
            _log.warning("%s has no checkpoint: it begins anew", folder.path)
    elif rows < done:
        raise ValueError(f"{folder.log.path} has {plural(rows, 'round')} up to the checkpoint's {done}: {REMEDY}")
    else:
        check_same_run(folder.log, done, folder.checkpoints.log)


def check_same_run(log: MetricsLog, round: int, digest: str) -> None:
    """Raises ValueError if `digest`, the log's digest in a checkpoint, does not match the log up to `round`.

    An empty digest is not checked.
    """
    if digest not in ("", log.digest(round)):
        or_both = "or both are of another config or other data than config.json and run.json beside them"
        raise ValueError(f"{log.path} is not the log of the run whose checkpoints lie beside it, {or_both}: {REMEDY}")
