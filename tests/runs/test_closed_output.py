"""Output that nobody reads any more (`| head`): most commands end quietly, and a run goes on. So it does after a full disk."""

import contextlib
import errno
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings

import pytest

from fedjax_ssl import programs
from fedjax_ssl.files import read_json
from fedjax_ssl.runs import streams
from launch import STOPPED, command, prepare
from tests import disk
from tests.commands import CONFIG, ROOT, launch, rows, succeeded, wait_for_rounds

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods", "usual_signals")]


@pytest.fixture
def closed():
    """The end of a pipe that is written to, whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    with contextlib.suppress(OSError):
        os.close(writing)


@pytest.mark.parametrize(
    ("words", "output", "status", "said"),
    [
        (["launch.run", "--help"], "closed", 141, None),  # standard error too
        (["launch.main", "explain", "configs"], "closed", 141, ""),
        (["launch.run", "--help"], "full", 1, "error: standard output: No space left on device\n"),
    ],
)
def test_a_closed_pipe_ends_a_command_without_a_word_and_a_full_disk_with_one_line(closed, words, output, status, said):
    errors = closed if said is None else subprocess.PIPE
    with open("/dev/full", "w") as full:
        output = {"closed": closed, "full": full}[output]
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=output, stderr=errors, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize("reader", ["gone", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("signal_number", [pytest.param(None, marks=pytest.mark.slow), signal.SIGTERM])
def test_what_a_config_prints_and_nobody_reads_never_ends_a_run(tmp_path, monkeypatch, closed, reader, signal_number):
    """Also where it is written at once, and where it is still to be written as the run begins."""
    loop = "--config.rounds=100000" if signal_number else "--config.rounds=6"
    for unbuffered in ("",) if signal_number else ("", "1"):
        monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
        (tmp_path / "prints.py").write_text(f"import sys\nprint('begun')\nsys.stdout.write('more')\n{CONFIG}")
        workdir = tmp_path / f"run{unbuffered}"
        words = [sys.executable, "-m", "launch.run", f"--config={tmp_path / 'prints.py'}", f"--workdir={workdir}", loop]
        with open("/dev/full", "w") as full:
            process = subprocess.Popen(words, cwd=ROOT, stdout={"gone": closed, "full": full}[reader], stderr=subprocess.PIPE)
        if signal_number:
            wait_for_rounds(workdir, 1, [process])
            process.send_signal(signal_number)
        _, said = process.communicate(timeout=300)
        assert process.returncode == (143 if signal_number else 0), said
        assert b"error" not in said


@pytest.mark.parametrize(
    ("number", "status", "expected", "line"),
    [
        (errno.EPIPE, 0, 141, ""),
        (errno.ENOSPC, 0, 1, f"error: standard output: {os.strerror(errno.ENOSPC)}\n"),
        (errno.EDQUOT, 0, 1, f"error: standard output: {os.strerror(errno.EDQUOT)}\n"),
        (errno.ENOSPC, 2, 2, ""),  # what was wrong was said
        (errno.EPIPE, 130, 130, ""),
        (None, 0, 130, f"{STOPPED}\n"),  # Ctrl-C while a slow reader takes what is left
    ],
)
def test_output_that_cannot_be_written_changes_no_status_but_0(capfd, number, status, expected, line):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(number, os.strerror(number)) if number else KeyboardInterrupt

    with contextlib.redirect_stdout(Full()):
        assert command.ended(lambda _: status, []) == expected
    assert capfd.readouterr().err == line


def test_it_is_not_taken_for_wrong_input(closed, capsys):
    with open(closed, "w", buffering=1) as stdout, contextlib.redirect_stdout(stdout):  # written line by line
        assert command.ended(prepare.main, ["prepare", "--list"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.ci
@pytest.mark.parametrize("streams", ["2>&1 | head -1", ">&- 2>&- <&-", ">/dev/full 2>&1"])
def test_a_run_outlasts_its_streams(tmp_path, config, streams):
    line = f"({sys.executable} -m launch.run {config} --workdir={tmp_path}/run; echo $? > {tmp_path}/status) {streams}"
    subprocess.run(["sh", "-c", line], cwd=ROOT, check=False)
    assert (tmp_path / "status").read_text() == "0\n"
    assert len(rows(tmp_path / "run")) == 6
    assert read_json(tmp_path / "run" / "summary.json")["rounds"] == 6


def test_what_nobody_reads_is_dropped_and_the_rest_arrives(closed):
    reading, writing = os.pipe()
    with open(reading) as reader, open(closed, "w", buffering=1) as broken, open(writing, "w") as stderr:
        with contextlib.redirect_stdout(broken), contextlib.redirect_stderr(stderr):
            print("before", file=sys.stderr)
            with streams.lasting():
                print("lost", flush=True)
                print("read", file=sys.stderr)
            print("after", file=sys.stderr)
        stderr.close()
        assert reader.read() == "before\nread\nafter\n"


@pytest.mark.parametrize("is_disk", [True, False])
def test_a_stream_that_takes_nothing_now_stays_what_it_is(is_disk):
    """What a full disk does not take is dropped, what a full pipe has no room for yet waits, and nothing is left open."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, bytes(4096)):
            pass
    place = os.open("/dev/full", os.O_WRONLY) if is_disk else writing
    stream = open(place, "w", closefd=False)  # noqa: SIM115
    stream.write("waits")

    def look():
        return len(os.listdir("/proc/self/fd")), os.readlink(f"/proc/self/fd/{place}")

    before = look()
    with contextlib.redirect_stdout(stream), streams.lasting():
        pass
    assert look() == before
    os.read(reading, 2**20)
    stream.close()
    if not is_disk:
        assert os.read(reading, 2**20) == b"waits"
    for handle in {reading, writing, place}:
        os.close(handle)


def assert_full(workdir, done):
    *before, said = done.stderr.splitlines()
    assert done.returncode == 1
    assert said.startswith(f"error: {workdir}")
    assert ": No space left on device (" in said
    assert said.endswith(" are free); what was saved before is whole, and the same command goes on from it")
    assert all(line.startswith("round ") for line in before)


@pytest.mark.ci
def test_a_full_disk_is_one_line_and_no_data_are_lost(tmp_path, config, finished):
    with disk.failing(tmp_path / "all", 10**9, only="write") as writes:
        launch(config, f"--workdir={tmp_path / 'all'}")
    for number in range(len(writes))[3 :: len(writes) // 2]:
        workdir = tmp_path / str(number)
        with disk.failing(workdir, number, errno.ENOSPC, only="write"):
            done = launch(config, f"--workdir={workdir}")
        assert_full(workdir, done)
        succeeded(config, f"--workdir={workdir}")
        assert rows(workdir) == rows(finished)
    folder = tmp_path / "killed"
    succeeded(config, f"--workdir={folder}", "--stop_after=3")
    with (folder / "metrics.jsonl").open("ab") as log:  # a row that no checkpoint has
        log.write((finished / "metrics.jsonl").read_bytes().splitlines(keepends=True)[3])
    with disk.failing(folder, 1, errno.ENOSPC, only="write"):  # the first is the owner's, which a run can do without
        assert_full(folder, launch(config, f"--workdir={folder}"))


@pytest.mark.ci
@pytest.mark.parametrize("size", [4, 16, 40, 64, 80])
def test_a_file_system_that_is_full_is_one_line_and_no_data_are_lost(tmp_path, config, finished, size):
    """A real one of so many KiB, which TensorStore writes to as well."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        assert_full(tmp_path / "run", launch(config, f"--workdir={tmp_path / 'run'}"))
        subprocess.run(["mount", "-o", "remount,size=4m", str(tmp_path)], check=True)
        succeeded(config, f"--workdir={tmp_path / 'run'}")
        assert rows(tmp_path / "run") == rows(finished)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_cache_that_fails_is_said_once(caplog, monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    programs._say_once("persistent compilation cache", "compiled programs are not cached")
    with caplog.at_level(logging.WARNING):
        for program in ("jit_rounds", "jit_evaluation"):
            warnings.warn(f"Error writing persistent compilation cache entry for '{program}': OSError: full", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    said = "compiled programs are not cached: Error writing persistent compilation cache entry for 'jit_rounds': OSError: full"
    assert caplog.messages == [said]
    assert shown == ["something else"]
