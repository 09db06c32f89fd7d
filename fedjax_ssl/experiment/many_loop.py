"""Several runs, a folder each, run together: what `loop.run` does for one."""

from __future__ import annotations

import logging
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import jax

from fedjax_ssl.experiment.checkpoint import Checkpoints
from fedjax_ssl.experiment.experiment import DivergedError
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.loop import ENDED, SUMMARY, RefusedError, Stop, last_row, summary
from fedjax_ssl.experiment.many import REASON, ManyExperiment
from fedjax_ssl.experiment.tuning import LAYOUT, note, read
from fedjax_ssl.experiment.writers import MetricsLog, Progress, TensorBoard, read_json, write_json
from fedjax_ssl.simulation.round import RunState

Row = dict[str, Any]
_log = logging.getLogger(__name__)
SHARED = "runs_share_devices"
"""The key of a noted layout that says how many devices the runs share."""
TOGETHER = ("vmap", "scan", "chunked", "sharded")
"""The strategies that runs can have together."""


class _Folder(NamedTuple):
    """One run's files."""

    path: pathlib.Path
    log: MetricsLog
    checkpoints: Checkpoints

    @property
    def ended(self) -> str:
        """Why the run has ended; empty: it has not."""
        path = self.path / ENDED
        return read_json(path)[REASON] if path.exists() else ""


def run(experiment: ManyExperiment, workdir: pathlib.Path, stop: Stop, *, stop_after: int | None = None) -> None:
    """Runs the rounds that are left of all runs, each of which gets in `workdir/<name>` what a single run leaves.

    Runs that have finished are left out. The others go on from the newest round of which all have a checkpoint. One that
    diverged leaves `diverged.json` in place of a summary, and has no checkpoints after that round.

    Args:
        experiment: what to run.
        workdir: a folder with a folder for each run that `loop.open_workdir` has accepted.
        stop: as for `loop.run`.
        stop_after: likewise.

    Raises:
        DivergedError: some of the runs diverged, now or before; the others have gone on to the end.
        RefusedError: as `loop.run`, or a run has no checkpoint where another one has.
    """
    paths = [workdir / run.name for run in experiment.runs]
    left = [i for i, path in enumerate(paths) if not (path / SUMMARY).exists()]
    if any(not (paths[i] / ENDED).exists() for i in left):
        some = in_noted_layout(experiment.only(left), [paths[i] for i in left])
        with ExitStack() as stack:
            folders = [_Folder(p, MetricsLog(p), stack.enter_context(Checkpoints(p))) for p in (paths[i] for i in left)]
            _go_on(some, folders, stop, min(some.settings.rounds, stop_after or some.settings.rounds))
    ended = [i for i in left if (paths[i] / ENDED).exists()]
    if ended:
        reasons = "; ".join(f"{experiment.runs[i]}: {read_json(paths[i] / ENDED)[REASON]}" for i in ended)
        raise DivergedError(f"{len(ended)} of {len(paths)} runs diverged: {reasons}")


def _go_on(experiment: ManyExperiment, folders: Sequence[_Folder], stop: Stop, end: int) -> None:
    """Runs all up to round `end`, or to a signal."""
    settings = experiment.settings
    try:
        done, state, last = _restore(experiment, folders)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    layout = experiment.layout
    _note(experiment, layout, folders)
    if state is None and stop.signal is None:
        state, last = experiment.start()
        last = [{**row, REASON: folder.ended} if folder.ended else row for row, folder in zip(last, folders, strict=True)]
    with ExitStack() as stack:
        boards = [stack.enter_context(closing(TensorBoard(folder.path, start_round=done))) for folder in folders]
        progress = stack.enter_context(closing(Progress(settings.rounds, done)))
        rounds = experiment.rounds(state, last)
        while done < end and stop.signal is None:
            state, rows = next(rounds, (state, None))
            if rows is None:  # all have diverged
                break
            done = rows[0]["round"]
            if (now := layout.shrunk(experiment.simulator.execution)) != layout:
                layout = now
                _note(experiment, layout, folders)
            for folder, board, row in zip(folders, boards, rows, strict=True):
                _write(folder, board, row)
            progress.update(done, together(rows))
            if done == end or done % settings.checkpoint_every == 0:
                _save(experiment, folders, done, state)
    if stop.signal is not None:
        _save(experiment, folders, done, state)
    for run, folder in zip(experiment.runs, folders, strict=True):
        rows = folder.log.rows()
        if len(rows) == settings.rounds and not folder.ended:
            folder.checkpoints.wait()  # a summary says that nothing is left to do
            of_all = layout._replace(devices=experiment.num_devices)
            write_json(folder.path / SUMMARY, summary(run.settings, rows, of_all, experiment.num_params))


def _note(experiment: ManyExperiment, layout: Layout, folders: Sequence[_Folder]) -> None:
    for folder in folders:  # a run could go on alone, on as many devices as it has
        note(layout, folder.path, **{SHARED: experiment.num_devices})


def in_noted_layout(experiment: ManyExperiment, paths: Sequence[pathlib.Path]) -> ManyExperiment:
    """The runs in the layout that their folders note, as `tuning.for_run` has a single one, so that they go on bit for bit.

    Where that cannot be, a warning says why, and they go on as their settings say: results differ in rounding then.
    """
    noted = [path / LAYOUT for path in paths if (path / LAYOUT).exists()]
    if not noted:
        return experiment
    layouts = [read(path) for path in noted]
    first, contents = layouts[0], [path.read_text() for path in noted]
    if first is None or None in layouts:
        why = f"{noted[layouts.index(None)]}: cannot be read"
    elif len(set(contents)) > 1:
        other = next(path for path, content in zip(noted, contents, strict=True) if content != contents[0])
        why = f"{noted[0]} and {other}: got two layouts for runs that go on together"
    elif first.strategy not in TOGETHER:
        why = f"{noted[0]}: got {first.strategy}, which several runs cannot have"
    else:
        more = read_json(noted[0])
        platform, there = more.get("platform"), len(jax.devices())
        devices = max(more.get(SHARED, experiment.most_devices), first.devices)
        if platform == jax.default_backend() and devices <= there:
            return experiment.in_layout(first, devices)
        got = f"{first.strategy} on {devices} of {platform}"
        why = f"{noted[0]}: got {got}, there are {there} of {jax.default_backend()} here"
    _log.warning("%s: going on in another layout, with other rounding", why)
    return experiment


def _write(folder: _Folder, board: TensorBoard, row: Row) -> None:
    if REASON not in row:
        folder.log.append(row)
        board.add(row["round"], {key: value for key, value in row.items() if key != "round"})
    elif not folder.ended:
        write_json(folder.path / ENDED, row)


def _save(experiment: ManyExperiment, folders: Sequence[_Folder], done: int, state: RunState | None) -> None:
    if state is None:  # stopped before it began
        return
    for folder, own in zip(folders, experiment.states(state), strict=True):
        if not folder.ended:
            folder.checkpoints.save(done, own)


def _restore(experiment: ManyExperiment, folders: Sequence[_Folder]) -> tuple[int, RunState | None, list[Row]]:
    """(round, state, rows of that round) of the newest checkpoints that all have which have not ended; or (0, None, [])."""
    live = [folder for folder in folders if not folder.ended]
    done, states = _newest_of_all(experiment, live)
    for folder in live:
        folder.checkpoints.forget_after(done)
        folder.log.truncate(done)
    if not states:
        return 0, None, []
    # A run that has ended takes a place in the program: that of another, whose results nobody sees.
    own = iter(states)
    of_all = [states[0] if folder.ended else next(own) for folder in folders]
    last = [{"round": done, REASON: f.ended} if f.ended else last_row(f.log, done) or {} for f in folders]
    return done, experiment.simulator.join(of_all), last


def _newest_of_all(experiment: ManyExperiment, live: Sequence[_Folder]) -> tuple[int, list[RunState]]:
    """The newest round of which all have a checkpoint, and the states there; (0, []): there is none yet."""
    template, upto = experiment.simulator.template(), None
    while True:
        found = [folder.checkpoints.restore(template, upto) for folder in live]
        kept = [one for one in found if one is not None]
        if len(kept) < len(found):
            new = next(folder for folder, one in zip(live, found, strict=True) if one is None)
            are_first = max(len(folder.checkpoints.rounds()) for folder in live) <= 1 and all(
                number <= experiment.settings.checkpoint_every for number, _ in kept
            )
            if kept and not (are_first and upto is None and new.log.rows()):
                raise ValueError(
                    f"{new.path} has no checkpoint to go on from where other runs of {new.path.parent} have: let those finish "
                    "without it, or start anew with --overwrite"
                )
            if kept:
                _log.warning("%s: no checkpoint yet, as if killed while the first were written: all begin anew", new.path)
            return 0, []
        if len({number for number, _ in kept}) == 1:
            return kept[0][0], [state for _, state in kept]
        upto = min(number for number, _ in kept)


def together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a person sees of the rows of all runs: mean accuracy and loss, the accuracies' standard deviation, all images."""
    columns = {
        key: [row[key] for row in rows if key in row] for key in ("eval/accuracy", "eval/loss", "perf/client_images_per_s")
    }
    seen = {key: statistics.fmean(values) for key, values in columns.items() if values}
    if len(columns["eval/accuracy"]) > 1:
        seen["eval/accuracy_spread"] = statistics.stdev(columns["eval/accuracy"])
    if values := columns["perf/client_images_per_s"]:
        seen["perf/client_images_per_s"] = sum(values)
    return seen
