"""Where a run's metrics are shown: TensorBoard and the terminal."""

import datetime
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import tqdm
from tensorboardX import SummaryWriter


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
