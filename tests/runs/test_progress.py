"""What a run shows and draws: TensorBoard's files as a resumed or redone run leaves them, and the bar."""

import contextlib
import fcntl
import io
import logging
import math
import os
import re
import struct
import sys
import termios
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog

from fedjax_ssl.runs import progress, trackers
from fedjax_ssl.runs.progress import AboveTheBar, Progress, TensorBoard


def events(folder) -> Iterator[Event]:
    """The records of all event files, in TensorBoard's order: by file name, then by position (length, crc, data, crc)."""
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            yield Event.FromString(content[12 : 12 + length])
            content = content[12 + length + 4 :]


def drawn(folder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard draws: a session that starts at step s hides what came before it with a step >= s."""
    points: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            points = {tag: [point for point in line if point[0] < event.step] for tag, line in points.items()}
        for value in event.summary.value:
            points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points


def test_tensorboard_draws_redone_rounds_once(tmp_path, caplog):
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        with contextlib.closing(TensorBoard(tmp_path, 0)) as first:
            for round in (1, 2, 3, 4):
                first.add(round, {"eval/accuracy": 0.125 * round} | ({"client/loss": 1.0} if round == 1 else {}))
        with contextlib.closing(TensorBoard(tmp_path, 2)) as second:
            for round in (3, 4, 5):
                second.add(round, {"eval/accuracy": 0.5})
    assert drawn(tmp_path)["eval/accuracy"] == [(1, 0.125), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5)]
    assert drawn(tmp_path)["client/loss"] == [(1, 1.0)]
    assert caplog.records == []


def test_trackers_get_the_finite_metrics_of_a_row():
    row = {"round": 3, "client/loss": np.float32(0.5), "eval/loss": math.nan, "server/loss": math.inf}
    assert trackers.tracked(row) == {"client/loss": 0.5}


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_log_file_gets_one_plain_line_per_evaluation(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    progress = Progress(40, 10, stream)
    for round in range(11, 21):
        clock.now += {11: 60, 20: 10}.get(round, 1)  # the first round compiles; the nine after it take 18 seconds
        metrics = {"client/loss": 1.0, "perf/client_images_per_s": 12400.4}
        if round in (11, 20):
            metrics |= {"eval/accuracy": jnp.float32(0.931), "eval/loss": 0.3101}
        progress.update(round, metrics)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "round 11/40  accuracy 0.931  loss 0.31  12,400 images/s",
        "round 20/40  accuracy 0.931  loss 0.31  12,400 images/s  0:00:40 left",
    ]


def test_default_stream_is_the_present_standard_error(capsys):
    with contextlib.closing(Progress(1, 0)) as progress:
        progress.update(1, {"eval/accuracy": 1.0})
    assert capsys.readouterr() == ("", "round 1/1  accuracy 1.000\n")


def received(leader: int) -> str:
    """Everything that reaches a terminal until it is closed."""
    chunks = []
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while chunk := os.read(leader, 4096):
            chunks.append(chunk)
    os.close(leader)
    return b"".join(chunks).decode()


def test_terminal_gets_a_bar(monkeypatch):
    clock = Clock(monkeypatch)
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 110, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(received, leader)
        with os.fdopen(follower, "w") as terminal:
            progress = Progress(40, 10, terminal)
            for round in range(11, 41):
                clock.now += 3
                metrics = {"perf/client_images_per_s": 12400.0}
                if round % 10 == 0:
                    metrics |= {"eval/accuracy": 0.5 + round / 100, "eval/loss": 0.25}
                progress.update(round, metrics)
                if round == 25:
                    monkeypatch.setattr(sys, "stderr", terminal)
                    AboveTheBar().handle(logging.LogRecord("name", logging.WARNING, "", 1, "client %d", (3,), None))
            progress.close()
        text = reading.result()
    frames = [frame.strip() for frame in re.split(r"[\r\n]+", text) if frame.strip()]
    assert frames[0].startswith("round 10/40")
    last = frames[-1]
    assert re.fullmatch(r"round 40/40 \S{30} accuracy 0\.900  loss 0\.25  12,400 images/s  0:00:00 left", last), last
    after_note = frames[frames.index("client 3") + 1]
    assert after_note.startswith("round 25/40")
    assert "accuracy 0.700" in after_note, "the last evaluation stays in sight"
    assert "0:00:45 left" in after_note
    assert text.endswith("\n")
