"""The run of an experiment in a folder: rounds, evaluation, checkpoints, logs, resume and a clean stop."""

from __future__ import annotations

import pathlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import jax

from fedjax_ssl.experiment.checkpoint import Checkpoints
from fedjax_ssl.experiment.experiment import TOTALS, Experiment
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.tuning import LAYOUT, note
from fedjax_ssl.experiment.writers import MetricsLog, Progress, TensorBoard, read_json, write_json

CONFIG, SUMMARY = "config.json", "summary.json"
ENDED = "diverged.json"
"""What a run among several leaves in place of a summary where it diverged: the reason, so that it is not run again."""
OURS = (CONFIG, SUMMARY, ENDED, LAYOUT, "metrics.jsonl", "checkpoints", "tensorboard")


class RefusedError(ValueError):
    """A workdir from which the run cannot go on."""


class Stop:
    """Whether a signal asked the run to stop.

    Attributes:
        signal: the first SIGINT or SIGTERM received, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    @classmethod
    @contextmanager
    def on_signals(cls) -> Iterator[Stop]:
        """Within it, the first signal is noted and waits for the end of the round; a second Ctrl-C stops at once."""
        stop = cls()

        def handle(number: int, _: Any) -> None:
            if stop.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            stop.signal = stop.signal or number

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def open_workdir(workdir: pathlib.Path, config: Mapping[str, Any], *, overwrite: bool) -> None:
    """Makes the folder an experiment's own, or refuses one that holds another experiment.

    A key that the folder's config has not, as its version did not know it, has its default there; not so of method or model.

    Args:
        workdir: the folder; made where it is missing.
        config: the resolved config, nested dicts.
        overwrite: remove what an earlier run left (its files alone).

    Raises:
        ValueError: the folder holds another config, the message has the differing keys; or it cannot be made.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--workdir: got {workdir} ({error.strerror}), accepted: a folder that can be written to") from None
    if overwrite:
        for name in OURS:
            path = workdir / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    path = workdir / CONFIG
    if path.exists():
        there, here = _flatten(read_json(path)), _flatten(config)
        added = here.keys() - there.keys()  # of what its version did not know yet, a run has the default
        there |= {key: value for key, value in _flatten(Settings().to_dict()).items() if key in added}
        differing = [key for key in sorted({**there, **here}) if there.get(key) != here.get(key)]
        if differing:
            shown = ", ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in differing)
            raise ValueError(
                f"{workdir} holds another experiment: {shown}; give another --workdir, or --overwrite to start anew"
            )
    write_json(path, config)


def is_done(workdir: pathlib.Path) -> bool:
    """Whether the run in a folder has finished."""
    return (workdir / SUMMARY).exists()


def run(experiment: Experiment, workdir: pathlib.Path, stop: Stop, *, stop_after: int | None = None) -> None:
    """Runs the rounds that are left, writing into `workdir` what the package's README lists.

    Args:
        experiment: what to run.
        workdir: a folder that `open_workdir` has accepted.
        stop: looked at before and after every round; once it has a signal, the state is saved and the run ends.
        stop_after: end cleanly once this many rounds are finished, and those of the same dispatch; None: run to the end.

    Raises:
        DivergedError: as `Experiment.rounds`; the checkpoints and logs of the rounds before remain.
        RefusedError: every checkpoint is corrupt, or the log does not reach up to the checkpoint.
    """
    if is_done(workdir):
        return
    settings = experiment.settings
    end = min(settings.rounds, stop_after or settings.rounds)
    layout = experiment.layout
    with Checkpoints(workdir) as checkpoints:
        try:
            done, state = checkpoints.restore(experiment.simulator.template(settings.seed)) or (0, None)
            log = MetricsLog(workdir)
            log.truncate(done)
            last = last_row(log, done)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        if state is None and stop.signal is None:
            note(layout, workdir)
            state, last = experiment.start()
        board, progress = TensorBoard(workdir, start_round=done), Progress(settings.rounds, done)
        with closing(board), closing(progress):
            rounds = experiment.rounds(state, last)
            together = settings.execution.rounds_per_dispatch  # within a dispatch there is no state to stop at
            while (done < end and stop.signal is None) or done % together:
                state, row = next(rounds)
                done = row["round"]
                if (now := layout.shrunk(experiment.simulator.execution)) != layout:
                    layout = now
                    note(layout, workdir)
                log.append(row)
                board.add(done, {k: v for k, v in row.items() if k != "round"})
                progress.update(done, row)
                if (done >= end and done % together == 0) or done % settings.checkpoint_every == 0:
                    checkpoints.save(done, state)
        if state is not None and stop.signal is not None:
            checkpoints.save(done, state)
    rows = log.rows()
    if len(rows) == settings.rounds:
        write_json(workdir / SUMMARY, summary(settings, rows, layout, experiment.num_params))


def last_row(log: MetricsLog, done: int) -> dict[str, Any] | None:
    """The log's row of round `done`, None where that is 0."""
    rows = log.rows()
    if len(rows) != done:
        raise ValueError(
            f"{log.path} has {len(rows)} rounds up to the checkpoint's {done}; put the file back, or start "
            "anew with --overwrite"
        )
    return rows[-1] if rows else None


def summary(settings: Settings, rows: list[dict[str, Any]], layout: Layout, num_params: int) -> dict[str, Any]:
    """What `summary.json` holds, from a finished run's settings and rows, and its experiment's layout and parameters.

    `eval/accuracy` is the last round's, never the best on test; `perf/client_images_per_s` is all images over all rounds'
    seconds.
    """
    last = rows[-1]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-5:]
    timed = [row for row in rows if "perf/client_images_per_s" in row]
    images = sum(row["perf/client_images_per_s"] * row["time/round_s"] for row in timed)
    return {
        "method": settings.method["name"],
        "dataset": settings.data.name,
        "seed": settings.seed,
        "rounds": settings.rounds,
        "eval/accuracy": last["eval/accuracy"],
        "eval/accuracy_last5": sum(accuracies) / len(accuracies),
        **{name: last[name] for name in TOTALS},
        "perf/client_images_per_s": images / sum(row["time/round_s"] for row in timed) if timed else 0.0,
        **layout._asdict(),
        "device": f"{layout.devices} x {jax.devices()[0].device_kind}",
        "jax_version": jax.__version__,
        "git_commit": git_commit(),
        "num_params": num_params,
    }


def git_commit() -> str | None:
    """The commit of the code that ran, with `+` where files have changed since; None outside of a repository."""
    here = pathlib.Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; tuples as the lists that JSON makes of them."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
