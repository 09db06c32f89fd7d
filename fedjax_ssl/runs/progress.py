"""Where a run's metrics are shown: TensorBoard and the terminal."""

import datetime
import logging
import math
import os
import pathlib
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import tqdm
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import masked_crc32c

from fedjax_ssl.files import naming


class TensorBoard:
    """Scalars per round as TensorBoard event files in `<workdir>/tensorboard`; OSError where they cannot be written."""

    def __init__(self, workdir: str | os.PathLike[str], start_round: int):
        """Begins a new event file; TensorBoard hides what earlier ones have of rounds after `start_round`."""
        # Not tensorboardX's SummaryWriter: a thread of its own writes, ends at a full disk, and the run waits for it forever.
        folder, now = pathlib.Path(workdir, "tensorboard"), time.time_ns()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
        self._write(file_version="brain.Event:2")
        self._write(step=start_round + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def add(self, round: int, metrics: Mapping[str, float]) -> None:
        """Adds the scalars of `round`."""
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=round, summary=summary_pb2.Summary(value=values))

    def _write(self, **content: Any) -> None:
        """Adds a record: the length of an event and the event, each with its checksum."""
        event = event_pb2.Event(wall_time=time.time(), **content).SerializeToString()
        size = struct.pack("<Q", len(event))
        with naming(self._path), self._path.open("ab") as file:
            file.write(b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (size, event)))

    def close(self) -> None:
        """All is written."""


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
