"""Runs as their folders hold them, read with suspicion and never written to."""

import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Float

from fedjax_ssl import moved
from fedjax_ssl.experiment.best import ENDED_EARLY
from fedjax_ssl.experiment.expansion import flattened
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import DamagedError, plain, read_json
from fedjax_ssl.runs.folder import CONFIG, DIVERGED, FOLDERS, RUN, SUMMARY, diverged
from fedjax_ssl.runs.log import complete_lines, read_row

METRICS = "metrics.jsonl"


class Run(NamedTuple):
    """One run. `columns` metric -> values, NaN where a row has none; `problems` are lines of text.

    `config` has dotted keys, without those that the run does not read, as far as its `run.json` says so. `command` are the
    words of `launch.run` that made it, none where it was made in Python; `data` is the digest of its split data, and `dataset`
    that of its dataset, the same for all seeds, empty where it is not known; `files` are those of other files that it read, by
    their keys; `reason` says why it has diverged, and is empty where it has not.
    """

    path: pathlib.Path
    name: str
    tree: dict[str, Any]
    config: dict[str, Any]
    columns: dict[str, Float[np.ndarray, " T"]]
    summary: dict[str, Any]
    command: list[str]
    data: str
    dataset: str
    files: dict[str, str]
    reason: str
    problems: tuple[str, ...]

    def column(self, key: str) -> Float[np.ndarray, " T"]:
        """The values of a metric, NaN where rows have none."""
        return self.columns.get(key, np.full_like(self.columns["round"], np.nan))

    def up_to(self, rounds: int) -> Self:
        """The run as it was after so many rounds."""
        there = self.columns["round"] <= rounds
        return self._replace(columns={key: values[there] for key, values in self.columns.items()})

    @property
    def rounds_done(self) -> int:
        """The last round in the log; 0: none."""
        return int(self.columns["round"][-1]) if len(self.columns["round"]) else 0

    @property
    def is_finished(self) -> bool:
        """Whether it has its last round, or has ended early, and has not diverged."""
        return (self.rounds_done == self.config["rounds"] or ENDED_EARLY in self.summary) and not self.reason

    @property
    def state(self) -> str:
        """In words: finished, diverged, or how far it is."""
        if self.reason:
            return f"diverged in round {self.rounds_done + 1}"
        return "finished" if self.is_finished else f"unfinished: round {self.rounds_done} of {self.config['rounds']}"

    @property
    def error(self) -> str:
        """Why the run has no result; empty: it has one."""
        if self.reason or (self.is_finished and self.summary):
            return self.reason
        lacking = [*([] if self.is_finished else [self.state]), *self.problems]
        return "; ".join(lacking) or f"{SUMMARY} is missing"


def errors(runs: Sequence[Run]) -> list[str]:
    """Why each of the runs that differ in their seeds alone has no result; one on other data than the first has none, too.

    No mean is over two datasets.
    """
    first = next((run for run in runs if run.dataset), None)
    others = [first is not None and run.dataset not in ("", first.dataset) for run in runs]
    other = f"its data are others than those of seed {first.config['seed']}" if first else ""
    return [run.error or other * is_other for run, is_other in zip(runs, others, strict=True)]


class Found(NamedTuple):
    """The runs that could be read, in the order of their names, and a line for each that could not."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...]


def find(folders: Iterable[str | os.PathLike[str]]) -> Found:
    """All runs in or below the folders, each once; ValueError where a folder or a run is missing.

    A run is a folder with `config.json` and a log, a `run.json` or a `diverged.json`.
    """
    runs, unreadable, seen = [], [], set()
    for folder in folders:
        top = pathlib.Path(folder)
        if not top.is_dir():
            raise ValueError(f"DIR: got {folder}, accepted: a folder with runs")
        for path in _run_folders(top):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                runs.append(read(path, _name(path, top)))
            except ValueError as error:
                unreadable.append(f"{_name(path, top)}: {error}")
    if not runs:
        why = f"; {unreadable[0]}" if unreadable else ""
        shown = ", ".join(map(str, folders))
        raise ValueError(f"DIR: got {shown} without a run, accepted: a folder with runs ({CONFIG} and {METRICS}){why}")
    return Found(tuple(runs), tuple(unreadable))


def _run_folders(top: pathlib.Path) -> Iterator[pathlib.Path]:
    for folder, names, files in os.walk(top):
        names[:] = sorted(name for name in names if not (CONFIG in files and name in FOLDERS))
        if METRICS in files or (CONFIG in files and {RUN, DIVERGED} & set(files)):
            yield pathlib.Path(folder)


def _name(path: pathlib.Path, top: pathlib.Path) -> str:
    """A run's name: its path below the folder that holds the given one."""
    inside = path.relative_to(top).as_posix()
    return "/".join(filter(None, [top.resolve().name, "" if inside == "." else inside]))


def read(path: pathlib.Path, name: str) -> Run:
    """The run in a folder; ValueError where its config cannot be read.

    Keys that the config lacks have their defaults, but for those of `method` and `model`.
    """
    if not (path / CONFIG).is_file():
        raise ValueError(f"{CONFIG} is missing")
    tree = read_object(path / CONFIG)
    own = flattened(tree)
    moved.check(own)
    config = {key: value for key, value in _defaults().items() if not key.startswith(("method.", "model."))} | own
    rows, problems = read_rows(path / METRICS)
    if rows and rows[-1]["round"] > own["rounds"]:
        problems.append(f"{METRICS} has round {rows[-1]['round']}, and {CONFIG} has rounds={own['rounds']}")
    summary = _optional(path / SUMMARY, problems, lambda found: checked_summary(found, rows))
    noted = _optional(path / RUN, problems)
    try:
        reason = diverged(path)
    except (ValueError, KeyError):
        reason = f"{DIVERGED} is damaged"
    config = {key: value for key, value in config.items() if key not in noted.get("unread", ())}
    command, data, dataset = noted.get("command", []), noted.get("data", ""), noted.get("dataset", "")
    files = noted.get("files", {})
    return Run(path, name, tree, config, columns(rows), summary, command, data, dataset, files, reason, tuple(problems))


def _optional(path: pathlib.Path, problems: list[str], checked: Callable[[Any], Any] = lambda found: found) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none, or one that cannot be used, which `problems` then say."""
    try:
        return checked(read_object(path)) if path.is_file() else {}
    except ValueError as error:
        problems.append(f"{error}: not used")
        return {}


@functools.cache
def _defaults() -> dict[str, Any]:
    return flattened(plain(Settings().to_dict()))


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError where it has none."""
    try:
        return read_json(path)
    except DamagedError as error:
        raise ValueError(f"{path.name} is damaged: {error.why}") from None


def read_rows(path: pathlib.Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a log whose rounds rise, and a line for each that is damaged and left out, or missing."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    if not path.is_file():
        return rows, [f"{METRICS} is missing"]
    for number, line in enumerate(complete_lines(path), start=1):
        try:
            row = read_row(line)
            if rows and row["round"] <= rows[-1]["round"]:
                raise ValueError(f"round {row['round']} after round {rows[-1]['round']}")
        except ValueError as error:
            problems.append(f"{METRICS}, line {number}: {error}: not used")
            continue
        rows.append(row)
    present = {row["round"] for row in rows}
    missing = [number for number in range(1, rows[-1]["round"] + 1) if number not in present] if rows else []
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        problems.append(f"{METRICS} lacks round {', '.join(map(str, missing[:3]))}{more}: seconds are unknown from there on")
    return rows, problems


def checked_summary(summary: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A summary that agrees with the log; ValueError where it does not."""
    last = rows[-1] if rows else {}
    for key, other in (("rounds", "round"), ("eval/accuracy", "eval/accuracy")):
        if (there := summary.get(key)) != (here := last.get(other)):
            raise ValueError(f"{SUMMARY}: {key} is {there}, and the last row's {other} is {here}")
    return summary


def columns(rows: list[dict[str, Any]]) -> dict[str, Float[np.ndarray, " T"]]:
    """Metric -> float64 values of all rows, NaN where a row has none."""
    keys = ["round", *sorted({key for row in rows for key in row} - {"round"})]
    return {key: np.array([math.nan if row.get(key) is None else row[key] for row in rows], float) for key in keys}
