"""Where a run's metrics go, after `metrics.jsonl`: TensorBoard always, Weights & Biases and MLflow where `log_to` names them.

A tracker has `add(round, metrics)` and `close()`. All write below the run's folder unless the environment says otherwise
(WANDB_MODE, MLFLOW_TRACKING_URI), so that nothing leaves the machine unasked.
"""

import functools
import hashlib
import importlib.util
import logging
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedjax_ssl.experiment.best import ending
from fedjax_ssl.experiment.expansion import flattened, identity
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.options import one_line
from fedjax_ssl.runs.progress import TensorBoard

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What receives a run's metrics."""

    def add(self, round: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a round, which are finite."""

    def close(self) -> None:
        """Writes what is left."""


def trackers(settings: Settings, folder: pathlib.Path, start_round: int) -> list[Tracker]:
    """The trackers of a run's folder, of which `start_round` rounds are done; a resumed run goes on in the same place."""
    others = [_Forgiving(name, functools.partial(OTHERS[name], settings, folder)) for name in names(settings.log_to)]
    return [TensorBoard(folder, start_round), *others]


def tracked(row: Mapping[str, Any]) -> dict[str, float]:
    """What trackers get of a row of the log: its finite metrics."""
    return {key: float(value) for key, value in row.items() if key != "round" and math.isfinite(value)}


def names(log_to: str) -> list[str]:
    """The trackers that `log_to` names; ValueError for one that is not installed."""
    found = [name.strip() for name in log_to.split(",") if name.strip()]
    for name in found:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"log_to: got {name!r}, which is not installed: pip install 'fedjax-ssl[{name}]'")
    return found


class _Forgiving:
    """A tracker that may fail, as one on a network does: its first error is a warning, and the run goes on without it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._tracker: Tracker | None = self._tried(make)

    def add(self, round: int, metrics: Mapping[str, float]) -> None:
        if tracker := self._tracker:
            self._tried(lambda: tracker.add(round, metrics))

    def close(self) -> None:
        if tracker := self._tracker:
            self._tried(tracker.close)

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self._tracker = None
            _log.warning("log_to: %s failed and gets no more metrics (%s); metrics.jsonl has all", self._name, one_line(error))
            return None


class _WandB:
    """Weights & Biases: offline unless WANDB_MODE says otherwise; `wandb sync` sends it later."""

    def __init__(self, settings: Settings, folder: pathlib.Path) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedjax_ssl"),
            name=_title(settings, folder), id=_identity(settings, folder),
            dir=str(folder), resume="allow", mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            config=flattened(settings.to_dict()), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def add(self, round: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=round)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """MLflow: a database in the run's folder, unless MLFLOW_TRACKING_URI names another place."""

    def __init__(self, settings: Settings, folder: pathlib.Path) -> None:
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._client, name, tag = MlflowClient(where), "fedjax_ssl", {"fedjax_ssl.id": _identity(settings, folder)}
        self._settings, self._is_over = settings, False
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        query = f"tags.`fedjax_ssl.id` = '{_identity(settings, folder)}'"
        runs = self._client.search_runs([experiment], query)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        self._id = self._client.create_run(experiment, tags=tag, run_name=_title(settings, folder)).info.run_id
        for key, value in flattened(settings.to_dict()).items():
            self._client.log_param(self._id, key, value)

    def add(self, round: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._is_over = round >= self._settings.rounds or bool(ending({"round": round, **metrics}, self._settings))
        self._client.log_batch(self._id, [Metric(key, value, now, round) for key, value in metrics.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._is_over else "KILLED")


OTHERS: dict[str, Any] = {"wandb": _WandB, "mlflow": _MLflow}


def _title(settings: Settings, folder: pathlib.Path) -> str:
    return f"{settings.method.name} on {settings.data.name}, seed {settings.seed}: {folder.name}"


def _identity(settings: Settings, folder: pathlib.Path) -> str:
    """An id that a resumed run has again, also with more rounds, and another experiment in the same folder has not."""
    config = {key: value for key, value in identity(flattened(settings.to_dict())).items() if key != "rounds"}
    return hashlib.sha256(f"{folder.absolute()} {config}".encode()).hexdigest()[:16]
