"""One owner of a folder: two commands at once, a killed one, and file systems whose locks are missing or end at a machine."""

import contextlib
import contextvars
import errno
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedjax_ssl.files import read_json
from fedjax_ssl.runs import lock, run
from fedjax_ssl.runs.lock import LOCK, OWNER, OwnedError, owned
from fedjax_ssl.runs.log import MetricsLog
from tests import disk
from tests.commands import content, launch, launch_process, refused, succeeded

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]


@pytest.fixture
def no_locks(monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lock.fcntl, "flock", flock)


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("BEAT", 0.02), ("DEAD_AFTER", 0.4)):
        monkeypatch.setattr(lock, name, seconds)


def named(folder: pathlib.Path) -> dict:
    return json.loads((folder / OWNER).read_bytes())


@contextlib.contextmanager
def another_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.communicate(b"\n")


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


def claimed(folder: pathlib.Path, pid: int, **of_owner) -> bytes:
    """The owner's file as another process of this machine leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    of_process = {"host": "here", "pid": pid, "machine": lock._machine(), "began": lock._began(pid), "token": "another"}
    (folder / OWNER).write_text(json.dumps(of_process | of_owner))
    return (folder / OWNER).read_bytes()


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
    host = named(workdir)["host"]
    line = f"error: --workdir: {workdir} is being written to by process {first.pid} on {host}; wait for it, or stop it\n"
    assert (second.returncode, shown, said) == (2, "", line)

    dated = (workdir / "config.json").stat().st_mtime_ns
    assert refused(*arguments, "--overwrite") == line
    assert (workdir / "config.json").stat().st_mtime_ns == dated
    assert first.poll() is None

    first.kill()
    first.communicate()
    done = len(MetricsLog(workdir).rows())
    assert named(workdir)["pid"] == first.pid  # what it left is in nobody's way
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


def test_without_locks_a_living_owner_is_named_and_a_dead_ones_place_is_taken(tmp_path, config, no_locks):
    workdir = tmp_path / "run"
    with another_process() as process:
        claimed(workdir, process.pid)
        before = content(workdir)
        for more in ((), ("--overwrite",)):
            assert f"by process {process.pid} on here" in refused(config, f"--workdir={workdir}", *more)
        assert content(workdir) == before
    succeeded(config, f"--workdir={workdir}")
    assert read_json(workdir / "summary.json")["rounds"] == 6
    assert not (workdir / OWNER).exists()


@pytest.mark.parametrize("locks", [True, False])
def test_an_owner_on_another_machine_lives_while_its_file_gets_new_dates(tmp_path, config, request, monkeypatch, quick, locks):
    """Also where a lock is had: some file systems keep locks to one machine. The wait is said before it."""
    if not locks:
        request.getfixturevalue("no_locks")
    claimed(tmp_path, 7, host="there", machine="another")
    with monkeypatch.context() as patched:
        patched.setattr(lock, "DEAD_AFTER", 60.0)
        patched.setattr(lock.time, "sleep", lambda _: os.utime(tmp_path / OWNER))  # a sign of life during each wait
        said = launch(config, f"--workdir={tmp_path}").stderr.splitlines()
    assert said[0] == f"waiting up to 60 s for a sign of life of process 7 on there, which had {tmp_path}"
    assert said[1].startswith(f"error: --workdir: {tmp_path} is being written to by process 7 on there")
    assert named(tmp_path)["host"] == "there"
    with owned([tmp_path]):
        assert named(tmp_path)["pid"] == os.getpid()


def test_for_dead_owners_of_many_folders_one_wait_is_enough(tmp_path, quick):
    folders, said = [tmp_path / str(number) for number in range(8)], []
    for folder in folders:
        claimed(folder, 7, host="there", machine="another")
    with owned(folders, said.append):
        assert [named(folder)["pid"] for folder in folders] == [os.getpid()] * 8
    assert len(said) == 1


def test_a_notebook_takes_the_folders_too_and_what_it_calls_may_ask_for_them_again(tmp_path):
    experiment = types.SimpleNamespace(runs=[types.SimpleNamespace(name="3")], settings=types.SimpleNamespace(rounds=2))
    folder = tmp_path / "3"
    with owned([folder]):
        run.open_workdir(folder, {})
        assert named(folder)["pid"] == os.getpid()
        for call in (lambda: run.open_workdir(folder, {}), lambda: run.run(experiment, tmp_path, run.Stop())):
            with pytest.raises(OwnedError, match=f"--workdir: {folder} is being written to by process {os.getpid()} on"):
                another_thread(call)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_an_owners_file_that_a_full_disk_cut_is_removed(tmp_path):
    with disk.failing(tmp_path, 0, errno.ENOSPC, only="write"), owned([tmp_path]), pytest.raises(OwnedError):
        another_thread(take, tmp_path)
    assert not content(tmp_path)


def test_without_locks_nobody_owns_a_folder_of_a_full_disk(tmp_path, no_locks):
    with disk.failing(tmp_path, 0, errno.ENOSPC, only="write"), pytest.raises(OSError, match="No space left"):
        take(tmp_path)
    assert not content(tmp_path)


@pytest.mark.parametrize(
    ("locks", "module", "function", "number"),
    [
        (True, "fcntl", "flock", 1),  # as it has the lock
        (True, "json", "dumps", 1),  # as it writes who the owner is
        (True, None, "_claim", 1),  # as it has the folder
        (False, "json", "dumps", 1),
        (False, "time", "sleep", 1),  # as it waits for others
        (False, None, "_read", 2),  # as it looks whether it is still the owner
        (False, None, "_claim", 1),
    ],
)
def test_ctrl_c_while_a_process_takes_a_folder_leaves_it_free(tmp_path, request, monkeypatch, locks, module, function, number):
    if not locks:
        request.getfixturevalue("no_locks")
    place = getattr(lock, module) if module else lock
    whole, calls = getattr(place, function), []

    def interrupted(*given, **named):
        found = whole(*given, **named)
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patched:
        patched.setattr(place, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            take(tmp_path)
    another_thread(take, tmp_path)
    assert not content(tmp_path)


def test_ctrl_c_leaves_the_file_of_a_process_that_took_the_folder_meanwhile(tmp_path, no_locks, monkeypatch):
    whole = pathlib.Path.open

    def taken_by_another(path, mode="r", **more):
        if mode != "x":
            return whole(path, mode, **more)
        path.write_text("another's")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "open", taken_by_another)
        with pytest.raises(KeyboardInterrupt):
            take(tmp_path)
    assert (tmp_path / OWNER).read_text() == "another's"


def test_a_link_to_nowhere_in_the_place_of_an_owners_file_is_removed(tmp_path):
    (tmp_path / OWNER).symlink_to("nowhere")
    with owned([tmp_path]):
        assert named(tmp_path)["pid"] == os.getpid()


def test_an_owner_gives_signs_of_life_for_each_of_its_folders(tmp_path, quick):
    both = [tmp_path / "0", tmp_path / "1"]
    with owned(both):
        first = [(folder / OWNER).stat().st_mtime_ns for folder in both]
        deadline = time.monotonic() + 60
        while any((folder / OWNER).stat().st_mtime_ns == before for folder, before in zip(both, first, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("left", ["", "null", '{"pid": 7}'])
def test_an_owners_file_that_nobody_can_read_stands_for_one_that_may_live(tmp_path, no_locks, quick, left):
    (tmp_path / OWNER).write_text(left)
    began = time.monotonic()
    with owned([tmp_path]):
        assert time.monotonic() - began > lock.DEAD_AFTER
        with pytest.raises(OwnedError, match=f"by process {os.getpid()} on"):
            another_thread(take, tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_has_the_name_of_an_owners_file_and_is_none_does_not_hang(tmp_path, quick, make):
    make(tmp_path / OWNER)
    if make is os.mkdir:
        with pytest.raises(ValueError, match=f"--workdir: got {tmp_path / OWNER} .*accepted: a file that can be removed"):
            another_thread(take, tmp_path)
        return
    another_thread(take, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_locks_one_of_many_takes_a_dead_owners_place_whose_id_a_later_process_has(tmp_path, no_locks, monkeypatch):
    monkeypatch.setattr(lock, "SETTLED_AFTER", 2.0)  # also where one of the threads has to wait for a core
    claimed(tmp_path, os.getpid(), began="1")
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


def test_the_lock_holds_also_where_the_owners_file_is_gone(tmp_path):
    with owned([tmp_path]):
        (tmp_path / OWNER).unlink()
        with pytest.raises(OwnedError, match="is being written to by another process"):
            another_thread(take, tmp_path)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(("module", "name"), [(lock.fcntl, "flock"), (os, "fstat")])
def test_a_lock_whose_file_its_last_owner_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch, module, name, stale):
    """`stale`: the last owner is on another machine of a network file system."""
    true, calls = getattr(module, name), []

    def late(*given):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(true(*given))
        if stale and len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return calls[-1]

    monkeypatch.setattr(module, name, late)
    with owned([tmp_path]):
        assert (tmp_path / LOCK).exists()
        assert len(calls) == 2


def test_a_lock_whose_file_is_never_the_same_is_one_line(tmp_path, monkeypatch):
    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(lock.fcntl, "flock", stale)
    with pytest.raises(ValueError, match=f"--workdir: got {tmp_path} \\(Stale file handle\\), accepted: a folder"):
        take(tmp_path)


@pytest.mark.parametrize("locks", [True, False])
def test_of_two_that_find_no_owner_at_once_where_locks_hold_nothing_one_has_the_folder(tmp_path, monkeypatch, request, locks):
    """The second one looks before the first one has the folder, and takes it after."""
    if locks:  # of a file system that keeps them to one machine
        monkeypatch.setattr(lock.fcntl, "flock", lambda *_: None)
    else:
        request.getfixturevalue("no_locks")
    true, first, thread = lock._me, contextlib.ExitStack(), contextvars.Context()

    def me():
        monkeypatch.setattr(lock, "_me", true)
        thread.run(first.enter_context, owned([tmp_path]))
        return true()

    monkeypatch.setattr(lock, "_me", me)
    with pytest.raises(OwnedError, match=f"by process {os.getpid()} on"):
        take(tmp_path)
    lock.check_owned(tmp_path)
    thread.run(first.close)


@pytest.mark.parametrize("is_heir", [True, False])
def test_without_locks_the_first_one_whose_file_an_heir_removed_gives_way(tmp_path, monkeypatch, no_locks, is_heir):
    """Both found a dead owner's file, or the first one none, as an owner's process had ended just then."""
    if is_heir:
        claimed(tmp_path, os.getpid(), began="1")
    with another_process() as second:
        monkeypatch.setattr(lock.time, "sleep", lambda _: claimed(tmp_path, second.pid))
        with pytest.raises(OwnedError, match=f"by process {second.pid} on here"):
            take(tmp_path)
        assert named(tmp_path)["pid"] == second.pid
