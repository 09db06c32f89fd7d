"""One owner of a folder: two commands at once, a killed one, and file systems whose locks are missing or end at a machine."""

import contextlib
import contextvars
import errno
import fcntl
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import SoftFileLease

from fedjax_ssl.experiment import owner, run
from fedjax_ssl.experiment.files import MetricsLog, read_json
from fedjax_ssl.experiment.owner import LOCK, OWNER, OwnedError, owned
from tests.experiment.commands import content, launch, launch_process, refused, succeeded

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]
OWNS_WITHOUT_LOCKS = """
import errno, fcntl, pathlib, sys
from fedjax_ssl.experiment import owner

def flock(*_):
    raise OSError(errno.ENOSYS, "there are none")

fcntl.flock, owner.BEAT, owner.DEAD_AFTER = flock, 0.02, 0.5
with owner.owned([pathlib.Path(sys.argv[1])]):
    print(flush=True)
    input()
"""
ELSEWHERE = "filelock/2\npid=7\nhost=there\nmode=lease\ntoken=another\nduration={seconds}\n"


@pytest.fixture
def no_locks(monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("BEAT", 0.02), ("DEAD_AFTER", 0.5)):
        monkeypatch.setattr(owner, name, seconds)


def pid(folder: pathlib.Path) -> int | None:
    return SoftFileLease(folder / OWNER).pid


def another_thread(asks, *given, **named):
    """What it would get: not what this one has already."""
    return contextvars.Context().run(asks, *given, **named)


def take(folder: pathlib.Path) -> None:
    with owned([folder]):
        pass


def at_once(number: int, does) -> None:
    """Threads that do the same, until all have ended."""
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(lambda _: does(), range(number)))


@contextlib.contextmanager
def full_disk():
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "write", write)
        yield


def test_of_two_equal_commands_at_once_the_second_ends_with_2_and_after_a_kill_the_next_goes_on(tmp_path, config):
    workdir = tmp_path / "run"
    arguments = [config, f"--workdir={workdir}", "--config.rounds=100000", "--config.checkpoint_every=2"]
    both = [launch_process(*arguments) for _ in range(2)]

    def saved():
        return [path for path in workdir.glob("checkpoints/*/manifest.json") if path.parent.name.isdecimal()]

    deadline = time.monotonic() + 300
    while not [one for one in both if one.poll() is not None] or not saved():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (second,) = (one for one in both if one.poll() is not None)
    (first,) = (one for one in both if one is not second)
    shown, said = second.communicate()
    host = socket.gethostname()
    line = f"error: --workdir: {workdir} is being written to by process {first.pid} on {host}; wait for it, or stop it\n"
    assert (second.returncode, shown, said) == (2, "", line)

    dated = (workdir / "config.json").stat().st_mtime_ns
    assert refused(*arguments, "--overwrite") == line
    assert (workdir / "config.json").stat().st_mtime_ns == dated
    assert first.poll() is None

    first.kill()
    first.communicate()
    done = len(MetricsLog(workdir).rows())
    assert pid(workdir) == first.pid  # what it left is in nobody's way
    again = succeeded(*arguments, f"--stop_after={done + 2}")
    assert "going on after round" in again.stderr
    assert [row["round"] for row in MetricsLog(workdir).rows()] == list(range(1, done + 3))
    assert not {LOCK, OWNER} & {path.name for path in workdir.iterdir()}


def test_a_run_that_another_one_of_several_has_is_refused_and_nothing_is_made(tmp_path, config):
    with owned([tmp_path / "1"]):
        before = content(tmp_path)
        said = another_thread(refused, config, f"--workdir={tmp_path}", "--config.seeds=3", "--config.data.name=digits")
        assert f"--workdir: {tmp_path / '1'} is being written to by process {os.getpid()} on" in said
        assert content(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_gets_files_stays_and_one_that_cannot_be_made_is_one_line(tmp_path):
    with owned([tmp_path / "a" / "b", tmp_path / "a" / "c"]):
        (tmp_path / "a" / "b" / "file").write_text("x")
        said = pytest.raises(ValueError, match=r"--workdir: got .*file/d \(Not a directory\), accepted: a folder")
        with said, owned([tmp_path / "a" / "b" / "file" / "d"]):
            pass
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["a", "a/b", "a/b/file"]


def test_many_that_want_a_folder_at_once_never_have_it_together_and_nothing_else_is_said(tmp_path):
    """They come and go, so that each makes the folder and its lock, or finds them being removed."""
    inside, most, turns = [], [], []

    def come_and_go():
        for _ in range(150):
            with contextlib.suppress(OwnedError), owned([tmp_path / "run"]):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                turns.append(1)

    at_once(4, come_and_go)
    assert max(most) == 1
    assert len(turns) > 10
    assert not content(tmp_path)


def test_without_locks_a_living_owner_is_named_and_a_dead_ones_place_is_taken(tmp_path, config, no_locks, quick):
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", OWNS_WITHOUT_LOCKS, workdir], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    before = content(workdir)
    for more in ((), ("--overwrite",)):
        said = launch(config, f"--workdir={workdir}", *more).stderr
        assert f"error: --workdir: {workdir} is being written to by process {process.pid} on" in said
    assert content(workdir) == before
    process.kill()
    process.communicate()
    assert (workdir / OWNER).exists()
    succeeded(config, f"--workdir={workdir}")
    assert read_json(workdir / "summary.json")["rounds"] == 6
    assert not (workdir / OWNER).exists()


@pytest.mark.parametrize("locks", [True, False])
def test_an_owner_on_another_machine_lives_while_its_file_gets_new_dates(tmp_path, config, request, quick, locks):
    """Also where a lock is had: some file systems keep locks to one machine. The wait is said before it."""
    if not locks:
        request.getfixturevalue("no_locks")
    (tmp_path / OWNER).write_text(ELSEWHERE.format(seconds=owner.DEAD_AFTER))
    ended = threading.Event()

    def beats():
        while not ended.wait(0.05):
            os.utime(tmp_path / OWNER)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(beats)
        said = launch(config, f"--workdir={tmp_path}").stderr.splitlines()
        ended.set()
    assert said[0] == f"waiting up to 0 s for a sign of life of process 7 on there, which had {tmp_path}"
    assert said[1].startswith(f"error: --workdir: {tmp_path} is being written to by process 7 on there")
    began = time.monotonic()
    with owned([tmp_path]):
        assert time.monotonic() - began > owner.DEAD_AFTER
        assert pid(tmp_path) == os.getpid()


def test_a_notebook_takes_the_folders_too_and_what_it_calls_may_ask_for_them_again(tmp_path):
    experiment = types.SimpleNamespace(runs=[types.SimpleNamespace(name="3")], settings=types.SimpleNamespace(rounds=2))
    folder = tmp_path / "3"
    with owned([folder]):
        run.open_workdir(folder, {}, overwrite=False)
        assert pid(folder) == os.getpid()
        for call in (lambda: run.open_workdir(folder, {}, overwrite=True), lambda: run.run(experiment, tmp_path, run.Stop())):
            with pytest.raises(OwnedError, match=f"--workdir: {folder} is being written to by process {os.getpid()} on"):
                another_thread(call)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("locks", [True, False])
def test_of_a_full_disk_a_process_that_has_the_lock_is_the_owner_and_without_locks_nobody(tmp_path, request, locks):
    if not locks:
        request.getfixturevalue("no_locks")
        with full_disk(), pytest.raises(OSError, match="No space left"):
            take(tmp_path)
    else:
        with full_disk(), owned([tmp_path]), pytest.raises(OwnedError, match="is being written to by another process"):
            another_thread(take, tmp_path)
    assert not content(tmp_path)


@pytest.mark.parametrize("function", ["_lock", "_take", "make_folder"])
def test_ctrl_c_while_a_process_takes_a_folder_leaves_it_free(tmp_path, monkeypatch, function):
    whole = getattr(owner, function)

    def interrupted(*given):
        whole(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(tmp_path)
    another_thread(take, tmp_path)
    assert not content(tmp_path)


def test_an_owner_gives_signs_of_life_for_each_of_its_folders(tmp_path, quick):
    both = [tmp_path / "0", tmp_path / "1"]
    with owned(both):
        first = [(folder / OWNER).stat().st_mtime_ns for folder in both]
        deadline = time.monotonic() + 60
        while any((folder / OWNER).stat().st_mtime_ns == before for folder, before in zip(both, first, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def cut_short(path):
    path.write_text("filelock/2\npid=7\nho")


@pytest.mark.parametrize("make", [pathlib.Path.touch, cut_short, os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("locks", [True, False])
def test_what_a_power_cut_or_somebody_left_in_place_of_an_owners_file_is_in_nobodys_way(tmp_path, request, quick, make, locks):
    if not locks:
        request.getfixturevalue("no_locks")
    make(tmp_path / OWNER)
    if make is os.mkdir and not locks:
        with pytest.raises(IsADirectoryError):
            take(tmp_path)
        return
    with owned([tmp_path]):
        assert pid(tmp_path) == (None if make is os.mkdir else os.getpid())
        with pytest.raises(OwnedError, match="by another process" if make is os.mkdir else f"by process {os.getpid()} on"):
            another_thread(take, tmp_path)


def test_the_lock_holds_also_where_the_owners_file_is_gone(tmp_path):
    with owned([tmp_path]):
        (tmp_path / OWNER).unlink()
        with pytest.raises(OwnedError, match="is being written to by another process"):
            another_thread(take, tmp_path)


@pytest.mark.parametrize("stale", [False, True])
def test_a_lock_whose_file_its_last_owner_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch, stale):
    """`stale`: the last owner is on another machine of a network file system."""
    true, calls = fcntl.flock, []

    def late(*given):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(true(*given))
        if stale and len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return calls[-1]

    monkeypatch.setattr(fcntl, "flock", late)
    with owned([tmp_path]):
        assert (tmp_path / LOCK).exists()
        assert len(calls) == 2


def test_a_lock_whose_file_is_never_the_same_is_one_line(tmp_path, monkeypatch):
    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(fcntl, "flock", stale)
    with pytest.raises(ValueError, match=f"--workdir: got {tmp_path} \\(Stale file handle\\), accepted: a folder"):
        take(tmp_path)


@pytest.mark.parametrize("left", [None, ELSEWHERE])
@pytest.mark.parametrize("locks", [True, False])
def test_of_many_that_find_no_living_owner_at_once_where_locks_hold_nothing_one_has_the_folder(
    tmp_path, monkeypatch, request, quick, locks, left
):
    if locks:  # of a file system that keeps them to one machine
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    else:
        request.getfixturevalue("no_locks")
    if left:
        (tmp_path / OWNER).write_text(left.format(seconds=owner.DEAD_AFTER))
    start, all_asked, had = threading.Barrier(8), threading.Barrier(8), []

    def take():
        start.wait()
        with contextlib.suppress(OwnedError), owned([tmp_path]):
            had.append(1)
            all_asked.wait(60)
            return
        all_asked.wait(60)

    at_once(8, take)
    assert had == [1]
