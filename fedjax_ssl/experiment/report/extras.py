"""What a run's folder may hold in addition to its log: `evaluation.json`, and clients' records in `clients/round_*.npz`."""

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedjax_ssl.experiment.clients import DAMAGE, ClientsLog
from fedjax_ssl.experiment.report.runs import EVALUATION, Run

ID = "client/id"
_DAMAGE = (*DAMAGE, TypeError, AttributeError)


class Evaluation(NamedTuple):
    """A model's results as fractions; a part that is missing is empty (`ece`: NaN), NaN a class or client without examples.

    Rows of `confusion` are true classes.
    """

    per_class: Float[np.ndarray, " C"]
    confusion: Float[np.ndarray, "C C"]
    per_client: Float[np.ndarray, " K"]
    ece: float


class Records(NamedTuple):
    """Clients' records in long form: round and client id of each, and its values, one or one per class."""

    round: Int[np.ndarray, " n"]
    id: Int[np.ndarray, " n"]
    values: dict[str, Float[np.ndarray, " n *_"]]


def evaluation(run: Run) -> tuple[Evaluation | None, list[str]]:
    """What `launch.evaluate --json` says of a run, or None, and a line for each part that is damaged and not used.

    It is read from `evaluation.json` in the run's folder, or in the folder above it, of several runs.
    """
    path = next((folder / EVALUATION for folder in (run.path, run.path.parent) if (folder / EVALUATION).is_file()), None)
    if path is None:
        return None, []
    try:
        content = json.loads(path.read_bytes())
        if "runs" in content:
            found = [value for key, value in content["runs"].items() if pathlib.Path(key).name == run.path.resolve().name]
            content = found[0] if found else None
            if content is None:
                return None, []
        content.get("ece")
    except _DAMAGE:
        return None, [f"{EVALUATION} is damaged: not used"]
    problems: list[str] = []

    def part(key: str, read: Callable[[Any], Any], empty: Any) -> Any:
        try:
            return empty if content.get(key) is None else read(content[key])
        except _DAMAGE:
            problems.append(f"{EVALUATION}: {key} is damaged: not used")
            return empty

    none = np.zeros(0)
    return Evaluation(
        per_class=part("class_accuracy", _fractions, none),
        confusion=part("confusion", _confusion, np.zeros((0, 0))),
        per_client=part("clients", lambda value: _fractions(value["accuracy"]), none),
        ece=part("ece", lambda value: float(_fractions([value])[0]), float("nan")),
    ), problems


def _fractions(values: Any) -> Float[np.ndarray, " n"]:
    """Numbers in [0, 1], null: NaN."""
    array = np.array([np.nan if value is None else float(value) for value in values])
    if (array < 0).any() or (array > 1).any():
        raise ValueError
    return array


def _confusion(values: Any) -> Float[np.ndarray, "C C"]:
    array = np.array(values, float)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not (array >= 0).all():
        raise ValueError
    return array


def records(run: Run) -> tuple[Records | None, list[str]]:
    """A run's clients' records (`diagnostics.clients_every`), or None, and a line for each file that is damaged and not used.

    A file has `client/id` [M] and arrays [M] or [M, C] under the names of metrics.
    """
    parts, problems = [], []
    for number, path in ClientsLog(run.path).files():
        try:
            parts.append(_records(number, path))
        except _DAMAGE:
            problems.append(f"{path.parent.name}/{path.name} is damaged: not used")
    if not parts:
        return None, problems
    keys = sorted(set.intersection(*({(key, value.shape[1:]) for key, value in part.values.items()} for part in parts)))
    joined = {key: np.concatenate([part.values[key] for part in parts]) for key, _ in keys}
    rounds, ids = (np.concatenate([getattr(part, name) for part in parts]) for name in ("round", "id"))
    return Records(rounds, ids, joined), problems


def _records(number: int, path: pathlib.Path) -> Records:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    ids = arrays.pop(ID).astype(int)
    if ids.ndim != 1:
        raise ValueError
    fitting = {key: value.astype(float) for key, value in arrays.items() if value.shape[:1] == ids.shape and value.ndim <= 2}
    return Records(np.full(ids.shape, number), ids, fitting)
