"""What a run writes: each reader is given the file as a killed, resumed or redone run leaves it."""

import contextlib
import fcntl
import io
import json
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
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from fedjax_ssl.experiment import files, writers
from fedjax_ssl.experiment.files import MetricsLog, read_json, write_json
from fedjax_ssl.experiment.writers import AboveTheBar, Progress, TensorBoard


def filled(folder, rounds=5) -> MetricsLog:
    log = MetricsLog(folder)
    for round in range(1, rounds + 1):
        log.append({"client/loss": 1 / round, "round": round})
    return log


def expected(*rounds):
    return [{"round": round, "client/loss": 1 / round} for round in rounds]


def test_rows_come_back_with_round_first(tmp_path):
    log = filled(tmp_path / "new" / "workdir", 3)
    assert log.rows() == expected(1, 2, 3)
    lines = (tmp_path / "new" / "workdir" / "metrics.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [["round", "client/loss"]] * 3


def test_numbers_of_every_library_exactly_and_nan_as_null(tmp_path):
    log = MetricsLog(tmp_path)
    third = np.float32(1) / 3
    numbers = {"jax": jnp.float32(third), "numpy": third, "bfloat16": jnp.bfloat16(1.5), "bytes": 2**40}
    log.append({"round": np.int64(1), **numbers, "nan": math.nan, "inf": jnp.float32(-np.inf)})
    (line,) = log.path.read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    exact = {"jax": float(third), "numpy": float(third), "bfloat16": 1.5, "bytes": 2**40}
    assert row == {"round": 1, **exact, "nan": None, "inf": None}


@pytest.mark.parametrize("row", [{"client/loss": 1.0}, {"round": None}, {"round": 1.5}])
def test_row_without_round_is_refused(tmp_path, row):
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match=r"needs an integer under 'round'"):
        log.append(row)
    assert log.rows() == []


def test_append_is_synced_to_disk(tmp_path, monkeypatch):
    log, sizes = MetricsLog(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    log.append({"round": 1})
    assert sizes == [log.path.stat().st_size] == [len('{"round": 1}\n')]


@pytest.mark.parametrize("kept", range(len('{"round": 3, "client/loss": 0.3333333333333333}\n')))
def test_torn_last_line_is_cut_off_and_the_log_goes_on(tmp_path, kept):
    log = filled(tmp_path, 3)
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + lines[1] + lines[2][:kept])
    whole = kept == len(lines[2]) - 1  # only the newline is missing
    log = MetricsLog(tmp_path)
    assert log.path.read_bytes() == b"".join(lines if whole else lines[:2])
    log.append({"round": 4, "client/loss": 0.25})
    assert log.rows() == (expected(1, 2, 3, 4) if whole else expected(1, 2, 4))


@pytest.mark.parametrize("tail", [b"\0\0\0\0", b"\0\0\0\n", b"[1]\n", b'{"loss": 1}\n', b"\xff\xfe"])
def test_last_line_that_is_no_row_is_cut_off(tmp_path, tail):
    log = filled(tmp_path, 2)
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + tail)
    assert log.rows() == expected(1, 2)
    assert log.path.read_bytes() == whole


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path):
    log = filled(tmp_path, 3)
    damaged = log.path.read_bytes().replace(b'{"round": 2', b'{"round" 2')
    log.path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*; remove the line, or start anew"):
        log.rows()
    assert log.path.read_bytes() == damaged


@pytest.mark.parametrize("round", [0, 3, 5, 9])
def test_truncate_drops_later_rounds(tmp_path, round):
    MetricsLog(tmp_path).truncate(round)
    assert MetricsLog(tmp_path).rows() == []
    log = filled(tmp_path)
    log.truncate(round)
    assert log.rows() == expected(*range(1, min(round, 5) + 1))


def test_a_crash_while_rewriting_leaves_the_old_file(tmp_path, monkeypatch):
    log = filled(tmp_path)
    write_json(tmp_path / "summary.json", {"rounds": 5})

    def crash(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        log.truncate(2)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "summary.json", {"rounds": 6})
    monkeypatch.undo()
    assert log.rows() == expected(1, 2, 3, 4, 5)
    assert read_json(tmp_path / "summary.json") == {"rounds": 5}
    assert not list(tmp_path.glob(".*"))


def test_json_round_trip(tmp_path):
    value = {"a": [1, (2.5, None)], "b": np.arange(3), "c": jnp.float32(math.nan), "d": {"e": "fl2", 3: True}}
    write_json(tmp_path / "config.json", value)
    there = {"a": [1, [2.5, None]], "b": [0, 1, 2], "c": None, "d": {"e": "fl2", "3": True}}
    assert read_json(tmp_path / "config.json") == there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_read_json_of_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON file: .*line 1"):
        read_json(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent.json")


def test_several_writers_of_one_file_do_not_meet_and_readers_never_see_half_of_it(tmp_path):
    path = tmp_path / "layout.json"

    def write(own):
        for _ in range(50):
            write_json(path, {"values": [own] * 1000})
            values = read_json(path)["values"]
            assert (len(values), len(set(values))) == (1000, 1)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert [found.name for found in tmp_path.iterdir()] == ["layout.json"]


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
                first.add(round, {"eval/accuracy": np.float32(0.125 * round), "client/loss": math.nan if round == 2 else 1.0})
        with contextlib.closing(TensorBoard(tmp_path, 2)) as second:
            for round in (3, 4, 5):
                second.add(round, {"eval/accuracy": jnp.float32(0.5)})
    assert drawn(tmp_path)["eval/accuracy"] == [(1, 0.125), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5)]
    assert drawn(tmp_path)["client/loss"] == [(1, 1.0)]
    assert caplog.records == []


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(writers.time, "monotonic", lambda: self.now)


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
