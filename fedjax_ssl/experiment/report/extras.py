"""What may lie in a run's folder besides its log: `evaluation.json`, and clients' records in `clients/*.npz`."""

import re
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedjax_ssl.experiment.report.runs import CLIENTS, EVALUATION, Run
from fedjax_ssl.experiment.writers import read_json


class Evaluation(NamedTuple):
    """A model's test results as fractions; a part that is missing is empty (`ece`: NaN).

    Rows of `confusion` are true classes. `clients` are ids, `per_client` their accuracies, NaN where a client has no examples.
    """

    per_class: Float[np.ndarray, " C"]
    confusion: Float[np.ndarray, "C C"]
    clients: Int[np.ndarray, " K"]
    per_client: Float[np.ndarray, " K"]
    ece: float


class Records(NamedTuple):
    """Clients' records in long form: round and client id of each, and its values, one or one per class."""

    round: Int[np.ndarray, " n"]
    id: Int[np.ndarray, " n"]
    values: dict[str, Float[np.ndarray, " n *_"]]


def evaluation(run: Run) -> tuple[Evaluation | None, list[str]]:
    """A run's `evaluation.json`, or None, and a line for each part that is damaged and not used."""
    path = run.path / EVALUATION
    if not path.is_file():
        return None, []
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError
    except ValueError:
        return None, [f"{EVALUATION} is damaged: not used"]
    problems: list[str] = []

    def part(key: str, read: Callable[[Any], Any], empty: Any) -> Any:
        if content.get(key) is None:
            return empty
        try:
            return read(content[key])
        except (ValueError, TypeError, KeyError, AttributeError):
            problems.append(f"{EVALUATION}: {key} is damaged: not used")
            return empty

    none = np.zeros(0)
    clients, accuracies = part("per_client", _per_client, (none.astype(int), none))
    found = Evaluation(
        per_class=part("per_class", _fractions, none),
        confusion=part("confusion", _confusion, np.zeros((0, 0))),
        clients=clients,
        per_client=accuracies,
        ece=part("ece", lambda value: float(_fractions([value])[0]), float("nan")),
    )
    return found, problems


def _fractions(values: Any) -> Float[np.ndarray, " n"]:
    """Numbers in [0, 1], null: NaN; of a mapping from names its values."""
    array = np.array(
        [np.nan if value is None else float(value) for value in (values.values() if isinstance(values, dict) else values)]
    )
    if (array < 0).any() or (array > 1).any():
        raise ValueError
    return array


def _confusion(values: Any) -> Float[np.ndarray, "C C"]:
    array = np.array(values, float)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not (array >= 0).all():
        raise ValueError
    return array


def _per_client(values: Any) -> tuple[Int[np.ndarray, " K"], Float[np.ndarray, " K"]]:
    """Ids and accuracies, from a list in the order of ids, from id -> accuracy, or from `accuracy` with or without `id`."""
    if isinstance(values, dict) and "accuracy" in values:
        accuracies = _fractions(values["accuracy"])
        ids = np.array(values.get("id", range(len(accuracies))), int)
    elif isinstance(values, dict):
        ids, accuracies = np.array(list(values), int), _fractions(values)
    else:
        accuracies = _fractions(values)
        ids = np.arange(len(accuracies))
    if ids.shape != accuracies.shape:
        raise ValueError
    return ids, accuracies


def records(run: Run) -> tuple[Records | None, list[str]]:
    """A run's clients' records of all its files, or None, and a line for each file that is damaged and not used.

    A file has `id` [M], a scalar `round` (else the number in its name), and arrays [M] or [M, C]; or all of them for T rounds:
    `round` [T], `id` [T, M], and arrays [T, M] or [T, M, C].
    """
    folder, parts, problems = run.path / CLIENTS, [], []
    for path in sorted(folder.glob("*.npz")) if folder.is_dir() else []:
        try:
            parts.append(_records(path))
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile):
            problems.append(f"{CLIENTS}/{path.name} is damaged: not used")
    if not parts:
        return None, problems
    keys = sorted(set.intersection(*({(key, value.shape[1:]) for key, value in part.values.items()} for part in parts)))
    order = np.argsort(np.concatenate([part.round for part in parts]), kind="stable")
    joined = {key: np.concatenate([part.values[key] for part in parts])[order] for key, _ in keys}
    rounds, ids = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("round", "id"))
    return Records(rounds, ids, joined), problems


def _records(path: Any) -> Records:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    ids = arrays.pop("id").astype(int)
    numbers = re.findall(r"\d+", path.stem)
    rounds = np.asarray(arrays.pop("round") if "round" in arrays else int(numbers[-1])).astype(int)
    if ids.ndim != rounds.ndim + 1 or ids.shape[: rounds.ndim] != rounds.shape:
        raise ValueError
    each = np.broadcast_to(rounds[..., None], ids.shape)
    fitting = {
        key: value for key, value in arrays.items() if value.shape[: ids.ndim] == ids.shape and value.dtype.kind in "bfiu"
    }
    flat = {key: value.reshape(ids.size, *value.shape[ids.ndim :]).astype(float) for key, value in fitting.items()}
    return Records(each.ravel(), ids.ravel(), {key: value for key, value in flat.items() if value.ndim <= 2})
