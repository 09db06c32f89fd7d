"""A run's files: each reader is given the file as a killed process, a bad disk or a wrong hand leaves it.

What a disk may do to a log: every bit of it is flipped, every byte of its end cut off, rows are lost, swapped or doubled.
"""

import errno
import json
import math
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.files import DamagedError, read_json, write_json
from fedjax_ssl.runs.log import MetricsLog


def filled(folder, rounds=5) -> MetricsLog:
    log = MetricsLog(folder)
    for round in range(1, rounds + 1):
        log.append({"client/loss": 1 / round, "round": round})
    return log


def expected(*rounds):
    return [{"round": round, "client/loss": 1 / round} for round in rounds]


def flips(content: bytes):
    """(position, the content with one bit flipped) for every bit."""
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bit // 8, bytes(flipped)


def test_rows_come_back_with_round_first_and_the_checksum_last(tmp_path):
    log = filled(tmp_path / "new" / "workdir", 3)
    assert log.rows() == expected(1, 2, 3)
    lines = (tmp_path / "new" / "workdir" / "metrics.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [["round", "client/loss", "checksum"]] * 3


def test_numbers_of_every_library_exactly_and_nan_as_null(tmp_path):
    log = MetricsLog(tmp_path)
    third = np.float32(1) / 3
    numbers = {"jax": jnp.float32(third), "numpy": third, "bfloat16": jnp.bfloat16(1.5), "bytes": 2**40}
    log.append({"round": np.int64(1), **numbers, "nan": math.nan, "inf": jnp.float32(-np.inf)})
    (line,) = log.path.read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    exact = {"jax": float(third), "numpy": float(third), "bfloat16": 1.5, "bytes": 2**40}
    assert {key: value for key, value in row.items() if key != "checksum"} == {"round": 1, **exact, "nan": None, "inf": None}
    assert log.rows() == [{"round": 1, **exact, "nan": None, "inf": None}]


@pytest.mark.parametrize("row", [{"client/loss": 1.0}, {"round": None}, {"round": 1.5}, {"round": True}])
def test_row_without_round_is_refused(tmp_path, row):
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match=r"needs an integer under 'round'"):
        log.append(row)
    assert log.rows() == []


@pytest.mark.parametrize("refuses", ["nothing", "a folder", "all"])
def test_a_file_system_that_cannot_sync_is_no_reason_to_stop(tmp_path, monkeypatch, refuses):
    def fsync(handle):
        if refuses == "all" or (refuses == "a folder" and stat.S_ISDIR(os.fstat(handle).st_mode)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    assert filled(tmp_path / "new").rows() == expected(1, 2, 3, 4, 5)
    write_json(tmp_path / "summary.json", {"rounds": 5})
    assert read_json(tmp_path / "summary.json") == {"rounds": 5}


@pytest.mark.reliability
@pytest.mark.parametrize("zeros", [False, True])
def test_a_last_line_that_a_kill_or_a_power_cut_ended_anywhere_is_written_again(tmp_path, zeros):
    """A power cut may leave zeros in place of what was not yet on disk."""
    whole = filled(tmp_path, 3).path.read_bytes()
    before = whole.splitlines(keepends=True)
    first, last = len(before[0] + before[1]), len(before[2])
    for kept in range(last):
        log, left = MetricsLog(tmp_path), whole[: first + kept] + bytes(last - kept) * zeros
        log.path.write_bytes(left)
        assert log.rows() == expected(1, 2)
        assert log.path.read_bytes() == left  # who only reads changes nothing
        log.truncate(2)
        log.append({"round": 3, "client/loss": 1 / 3})
        assert log.path.read_bytes() == whole


@pytest.mark.reliability
def test_every_bit_of_a_log_that_flips_is_named_with_its_round_and_nothing_is_erased(tmp_path):
    log, flipped = filled(tmp_path, 4), 0
    whole = log.path.read_bytes()
    for position, damaged in flips(whole):
        log.path.write_bytes(damaged)
        round = whole[:position].count(b"\n") + 1
        said = rf"metrics\.jsonl: round {round} is damaged: .*; put the file back, or start"
        with pytest.raises(DamagedError, match=said):
            log.rows()
        for kept in (0, round) if flipped % 16 == 0 else ():
            with pytest.raises(DamagedError, match=said):
                log.truncate(kept)
        assert log.path.read_bytes() == damaged
        flipped += 1
    assert flipped == 8 * len(whole) > 2000
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("lines", "round", "why"),
    [
        ([1, 3, 4], 2, "round 3 is in its place"),
        ([2, 3, 4], 1, "round 2 is in its place"),
        ([1, 3, 2, 4], 2, "round 3 is in its place"),
        ([1, 2, 2, 3], 3, "round 2 is in its place"),
        ([1, b"", 3, 4], 2, "it is not JSON"),
        ([1, b"[" * 100_000, 3], 2, "it is not JSON"),
        ([1, b"null", 3], 2, "it is no JSON object"),
        ([1, b"{}", 3], 2, "it has no checksum"),
        ([1, b'{"round": 2, "client/loss": 0.5}', 3], 2, "it has no checksum"),
        ([1, b'{"round": 2, "client/loss": NaN, "checksum": "0123456789abcdef"}', 3], 2, "its content does not match"),
        ([1, 2, b"\0" * 40], 3, "it is not JSON"),
    ],
)
def test_a_lost_swapped_doubled_or_foreign_row_is_named(tmp_path, lines, round, why):
    log = filled(tmp_path, 4)
    there = log.path.read_bytes().splitlines()
    damaged = b"".join((there[line - 1] if isinstance(line, int) else line) + b"\n" for line in lines)
    log.path.write_bytes(damaged)
    with pytest.raises(DamagedError, match=rf"round {round} is damaged: {why}") as error:
        log.truncate(4)
    assert "\n" not in str(error.value)
    assert log.path.read_bytes() == damaged


@pytest.mark.parametrize("round", [0, 3, 5, 9])
def test_truncate_drops_later_rounds(tmp_path, round):
    MetricsLog(tmp_path).truncate(round)
    assert MetricsLog(tmp_path).rows() == []
    log = filled(tmp_path)
    log.truncate(round)
    assert log.rows() == expected(*range(1, min(round, 5) + 1))


def test_a_digest_follows_the_log_and_tells_it_from_another(tmp_path):
    log, other = MetricsLog(tmp_path / "a"), filled(tmp_path / "b", 3)
    assert log.digest() == log.digest(0) == other.digest(0)
    digests = []
    for round in (1, 2, 3):
        log.append({"round": round, "client/loss": 1 / round})
        digests.append(log.digest())
    assert digests == [MetricsLog(tmp_path / "a").digest(round) for round in (1, 2, 3)] == [other.digest(n) for n in (1, 2, 3)]
    assert len(set(digests)) == 3
    log.truncate(1)
    assert log.digest() == digests[0]
    log.append({"round": 2, "client/loss": 0.25})
    assert log.digest() == log.digest(2) != digests[1]


@pytest.mark.reliability
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt("Ctrl-C")])
def test_a_bad_disk_or_a_crash_is_not_hidden_and_leaves_the_old_file(tmp_path, monkeypatch, error):
    log = filled(tmp_path)
    write_json(tmp_path / "summary.json", {"rounds": 5})

    def fsync(handle):
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    writes = (
        lambda: log.truncate(2),
        lambda: write_json(tmp_path / "summary.json", {"rounds": 6}),
        lambda: MetricsLog(tmp_path / "new").append({"round": 1}),
    )
    for write in writes:
        with pytest.raises(type(error), match=error.args[-1]):
            write()
    monkeypatch.undo()
    assert log.rows() == expected(1, 2, 3, 4, 5)
    assert read_json(tmp_path / "summary.json") == {"rounds": 5}
    assert not list(tmp_path.glob(".*"))


def test_json_round_trip(tmp_path):
    value = {"a": [1, (2.5, None)], "b": np.arange(3), "c": jnp.float32(math.nan), "d": {"e": "fl2 ü", 3: True}}
    write_json(tmp_path / "config.json", value)
    there = {"a": [1, [2.5, None]], "b": [0, 1, 2], "c": None, "d": {"e": "fl2 ü", "3": True}}
    assert read_json(tmp_path / "config.json") == there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent.json")


@pytest.mark.reliability
def test_every_bit_of_a_json_file_that_flips_is_damage(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"method": "fl2", "eval/accuracy": 0.5, "lists": [1, None, True], "group": {"a": 1e-7}})
    for _, damaged in flips(path.read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"summary\.json is damaged: it"):
            read_json(path)


@pytest.mark.reliability
@pytest.mark.parametrize("content", ["", "null", "[]", "{}", "{", "1", '"text"', '{"rounds": 3}', "[" * 100_000, "\ufeff{}"])
def test_json_of_another_kind_is_damage(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        DamagedError, match=r"config\.json is damaged: it .*; put the file back, or start anew with --overwrite$"
    ):
        read_json(tmp_path / "config.json")


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
