"""Where a run's results are written: metrics.jsonl and other JSON files, TensorBoard and the terminal."""

import contextlib
import datetime
import json
import logging
import math
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TextIO

import tqdm
from tensorboardX import SummaryWriter


class MetricsLog:
    """`<workdir>/metrics.jsonl`: one JSON object per finished round, on disk before `append` returns; NaN becomes null."""

    def __init__(self, workdir: str | os.PathLike[str]):
        self.path = pathlib.Path(workdir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows()  # repairs what a killed process left

    def append(self, row: Mapping[str, object]) -> None:
        """Adds a row: flat keys to numbers (Python, NumPy or jax scalars); ValueError if `round` is no int."""
        row = plain(row)
        if not isinstance(row.get("round"), int):
            raise ValueError(f"a row of {self.path.name} needs an integer under 'round'; got the keys {sorted(row)}")
        with self.path.open("ab") as file:
            file.write(_line({"round": row["round"], **row}))
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All rows, oldest first; a last line that a killed process cut is removed, and any other raises ValueError."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = content.splitlines()
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("round"), int):
                    raise ValueError("not an object with an integer 'round'")
                rows.append(row)
            except ValueError as error:
                if number < len(lines):
                    raise ValueError(f"{self.path}, line {number}: {error}; remove the line, or start anew") from None
        if len(rows) < len(lines) or (content and not content.endswith(b"\n")):
            self._rewrite(rows)
        return rows

    def truncate(self, round: int) -> None:
        """Removes the rows after `round`, which a run that resumes there writes again."""
        self._rewrite([row for row in self.rows() if row["round"] <= round])

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        with replacing(self.path) as file:
            file.writelines(map(_line, rows))


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Writes `value`, which may have arrays, as indented JSON, atomically; NaN and infinity become null."""
    content = json.dumps(plain(value), indent=2, allow_nan=False)
    with replacing(path) as file:
        file.write(f"{content}\n".encode())


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file; ValueError if it is not JSON."""
    try:
        return json.loads(pathlib.Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from None


class TensorBoard(SummaryWriter):
    """Scalars per round as TensorBoard event files in `<workdir>/tensorboard`."""

    def __init__(self, workdir: str | os.PathLike[str], start_round: int):
        """Opens a new event file; TensorBoard hides what earlier ones have of rounds after `start_round`."""
        folder, suffix = os.path.join(workdir, "tensorboard"), f".{time.time_ns()}"  # without it the name changes once a second
        super().__init__(folder, purge_step=start_round + 1, flush_secs=10, filename_suffix=suffix)

    def add(self, round: int, metrics: Mapping[str, float]) -> None:
        """Adds the scalars of `round` that are finite."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self.add_scalar(name, float(value), round)


class AboveTheBar(logging.Handler):
    """Prints log records on standard error, above the bar of a `Progress` where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a record; where that fails, the run goes on."""
        try:
            tqdm.tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


FORMATS = {
    "eval/accuracy": "accuracy {:.3f}",
    "eval/accuracy_spread": "± {:.3f}",
    "eval/loss": "loss {:.3g}",
    "perf/client_images_per_s": "{:,.0f} images/s",
}
"""What a progress bar shows of a row, and how."""


class Progress:
    """A progress bar on a terminal; in a log file one line per evaluation. `start_round` rounds are finished before."""

    def __init__(self, total_rounds: int, start_round: int = 0, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._total = total_rounds
        self._latest: dict[str, float] = {}
        self._first: tuple[int, float] | None = None
        layout, disable = "round {n_fmt}/{total_fmt} {bar:30} {desc}", not self._stream.isatty()
        self._bar = tqdm.tqdm(
            total=total_rounds, initial=start_round, file=self._stream, bar_format=layout, dynamic_ncols=True, disable=disable
        )

    def update(self, round: int, metrics: Mapping[str, float]) -> None:
        """Shows that `round` rounds are finished, with the metrics of the last one."""
        self._latest.update(metrics)
        shown = [form.format(float(self._latest[name])) for name, form in FORMATS.items() if name in self._latest]
        left = ""
        if self._first is not None and round > self._first[0]:
            seconds = (time.monotonic() - self._first[1]) / (round - self._first[0]) * (self._total - round)
            left = f"{datetime.timedelta(seconds=math.ceil(seconds))} left"
        text = "  ".join([*shown, left])
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(round - self._bar.n)
        if self._bar.disable and "eval/accuracy" in metrics:
            print(f"round {round}/{self._total}  {text}".rstrip(), file=self._stream, flush=True)
        # The first round compiles: the time left is estimated from the others.
        self._first = self._first or (round, time.monotonic())

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()


def plain(value: object) -> Any:
    """The value in JSON's types: arrays as lists, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: Mapping[str, object]) -> bytes:
    return json.dumps(plain(row), allow_nan=False).encode() + b"\n"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which replaces the one at `path` atomically, and is on disk at the end."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
