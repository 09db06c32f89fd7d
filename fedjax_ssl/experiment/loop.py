"""The run of an experiment in a folder: rounds, evaluation, checkpoints, logs, resume and a clean stop."""

from __future__ import annotations

import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from fedjax_ssl.experiment.build import Experiment
from fedjax_ssl.experiment.checkpoint import Checkpoints
from fedjax_ssl.experiment.writers import MetricsLog, Progress, TensorBoard, read_json, write_json
from fedjax_ssl.simulation.round import RunState

CONFIG, SUMMARY = "config.json", "summary.json"
OURS = (CONFIG, SUMMARY, "metrics.jsonl", "checkpoints", "tensorboard")
CUMULATIVE = ("comm/bytes_up", "comm/bytes_down")


class RefusedError(ValueError):
    """A workdir from which the run cannot go on."""


class DivergedError(RuntimeError):
    """The global model holds NaN or infinity."""


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

    Args:
        workdir: the folder; made where it is missing.
        config: the resolved config, nested dicts.
        overwrite: remove what an earlier run left (its files alone).

    Raises:
        ValueError: the folder holds another config; the message has the differing keys.
    """
    workdir.mkdir(parents=True, exist_ok=True)
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
        differing = [key for key in sorted({**there, **here}) if there.get(key) != here.get(key)]
        if differing:
            shown = ", ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in differing)
            raise ValueError(
                f"{workdir} holds another experiment: {shown}; give another --workdir, or --overwrite to start anew"
            )
    write_json(path, config)


def run(experiment: Experiment, workdir: pathlib.Path, stop: Stop, *, stop_after: int | None = None) -> None:
    """Runs the rounds that are left, writing into `workdir` what the package's README lists.

    Args:
        experiment: what to run.
        workdir: a folder that `open_workdir` has accepted.
        stop: looked at after every round; once it has a signal, the state is saved and the run ends.
        stop_after: end cleanly once this many rounds are finished; None: run to the end.

    Raises:
        DivergedError: the global model is not finite; the checkpoints and logs of the rounds before remain.
        RefusedError: every checkpoint is corrupt, or the log does not reach up to the checkpoint.
    """
    last = min(experiment.settings.rounds, stop_after or experiment.settings.rounds)
    if (workdir / SUMMARY).exists():
        return
    with Checkpoints(workdir) as checkpoints:
        try:
            done, state = checkpoints.restore(experiment.simulator.template(experiment.settings.seed)) or (0, None)
            log = MetricsLog(workdir)
            log.truncate(done)
            totals = _totals(log, done)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        board = TensorBoard(workdir, start_round=done)
        progress = Progress(experiment.settings.rounds, done)
        state = experiment.start() if state is None else state
        try:
            for number in range(done + 1, last + 1):
                state, row = _round(experiment, state, number, totals)
                log.append(row)
                board.add(number, {k: v for k, v in row.items() if k != "round"})
                progress.update(number, row)
                ends = number == last or stop.signal is not None
                if ends or number % experiment.settings.checkpoint_every == 0:
                    checkpoints.save(number, state)
                if stop.signal is not None:
                    break
        finally:
            board.close()
            progress.close()
    rows = log.rows()
    if len(rows) == experiment.settings.rounds:
        write_json(workdir / SUMMARY, summary(experiment, rows))


def _round(experiment: Experiment, state: RunState, number: int, totals: dict[str, float]) -> tuple[RunState, dict[str, Any]]:
    """One round and its row of metrics; `totals` is brought up to date."""
    simulator = experiment.simulator
    compiled, start = simulator.compile_s, time.perf_counter()
    state, metrics = simulator.round(state)
    seconds = time.perf_counter() - start - (simulator.compile_s - compiled)
    if metrics.pop("server/non_finite"):
        raise DivergedError(
            f"round {number}: the global model holds NaN or infinity; lower client.optimizer.learning_rate or "
            "server.optimizer.learning_rate, or set their clip_norm"
        )
    if experiment.evaluates(number):
        metrics |= simulator.evaluate(state)
    images = metrics.pop("perf/client_images", 0)
    if images:
        metrics["perf/client_images_per_s"] = images / seconds
    for key in CUMULATIVE:
        totals[key] += metrics.get(key, 0)
    totals["time/total_s"] += time.perf_counter() - start
    return state, {"round": number, **metrics, **totals, "time/round_s": seconds}


def _totals(log: MetricsLog, done: int) -> dict[str, float]:
    """The running totals after `done` rounds, from the log's last row."""
    rows = log.rows()
    if len(rows) != done:
        raise ValueError(
            f"{log.path} has {len(rows)} rounds up to the checkpoint's {done}; put the file back, or start "
            "anew with --overwrite"
        )
    names = (*CUMULATIVE, "time/total_s")
    return {name: rows[-1][name] if rows else 0 for name in names}


def summary(experiment: Experiment, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `summary.json` holds, from the rows of a finished run.

    `eval/accuracy` is the last round's, never the best on test; `perf/client_images_per_s` is all images over all rounds'
    seconds; `time/compile_s` is this start's.
    """
    settings, last = experiment.settings, rows[-1]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-5:]
    timed = [row for row in rows if "perf/client_images_per_s" in row]
    images = sum(row["perf/client_images_per_s"] * row["time/round_s"] for row in timed)
    devices = jax.devices()
    return {
        "method": settings.method["name"],
        "dataset": settings.data.name,
        "seed": settings.seed,
        "rounds": settings.rounds,
        "eval/accuracy": last["eval/accuracy"],
        "eval/accuracy_last5": sum(accuracies) / len(accuracies),
        **{name: last[name] for name in (*CUMULATIVE, "time/total_s")},
        "time/compile_s": experiment.simulator.compile_s,
        "perf/client_images_per_s": images / sum(row["time/round_s"] for row in timed) if timed else 0.0,
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "jax_version": jax.__version__,
        "git_commit": _git_commit(),
        "num_params": experiment.num_params,
    }


def _git_commit() -> str | None:
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
