"""One owner of a folder: two commands at once, a killed one, and a warning where there are no locks."""

import contextlib
import contextvars
import errno
import gc
import io
import os
import pathlib
import socket
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedjax_ssl.files import read_json
from fedjax_ssl.runs import lock, run
from fedjax_ssl.runs.folder import open_workdir
from fedjax_ssl.runs.lock import LOCK, OwnedError, owned
from fedjax_ssl.runs.log import MetricsLog
from tests.commands import content, launch_process, refused, succeeded

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]


@pytest.fixture
def no_locks(monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lock.fcntl, "flock", flock)


def owner(process: int) -> str:
    return f"process {process} on {socket.gethostname()}"


def named(folder: pathlib.Path) -> str:
    return (folder / LOCK).read_text()


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


@pytest.mark.ci
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
    line = f"error: --workdir: {workdir} is being written to by {owner(first.pid)}; wait for it, or stop it\n"
    assert (second.returncode, shown, said) == (2, "", line)

    dated = (workdir / "config.json").stat().st_mtime_ns
    assert refused(*arguments, "--overwrite") == line
    assert (workdir / "config.json").stat().st_mtime_ns == dated
    assert first.poll() is None

    first.kill()
    first.communicate()
    done = len(MetricsLog(workdir).rows())
    assert named(workdir) == owner(first.pid)  # what it left is in nobody's way
    again = succeeded(*arguments, f"--stop_after={done + 2}")
    assert "going on after round" in again.stderr
    assert [row["round"] for row in MetricsLog(workdir).rows()] == list(range(1, done + 3))
    assert not (workdir / LOCK).exists()


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


def test_a_notebook_takes_the_folders_too_and_what_it_calls_may_ask_for_them_again(tmp_path):
    experiment = types.SimpleNamespace(runs=[types.SimpleNamespace(name="3")], settings=types.SimpleNamespace(rounds=2))
    folder = tmp_path / "3"
    with owned([folder]):
        open_workdir(folder, {})
        assert named(folder) == owner(os.getpid())
        for call in (lambda: open_workdir(folder, {}), lambda: run.run(experiment, tmp_path, run.Stop())):
            with pytest.raises(OwnedError, match=f"--workdir: {folder} is being written to by process {os.getpid()} on"):
                another_thread(call)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_without_locks_one_warning_names_who_was_there_before_and_a_command_goes_on(tmp_path, config, no_locks, caplog):
    folders = [tmp_path / name for name in "ab"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / LOCK).write_text("process 7 on there\n\x1b[2J")
    with owned(folders):
        assert [named(folder) for folder in folders] == [owner(os.getpid())] * 2
    (said,) = caplog.messages
    assert said.startswith("no file locks here, so that nothing keeps a second command from writing to the same folder")
    assert said.endswith(f"{folders[0]} (process 7 on there[2J), {folders[1]} (nobody)")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    done = succeeded(config, f"--workdir={tmp_path / 'run'}")
    assert done.stderr.count("no file locks here") == 1
    assert read_json(tmp_path / "run" / "summary.json")["rounds"] == 6
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_lock_holds_where_a_full_disk_has_no_room_for_its_owners_name(tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", lambda handle, *_: Full(handle, "r+b"))
    with owned([tmp_path]), pytest.raises(OwnedError, match="is being written to by another process; wait"):
        another_thread(take, tmp_path)
    assert not content(tmp_path)


@pytest.mark.parametrize(
    ("locks", "module", "function", "number"),
    [
        (True, "os", "fdopen", 1),  # as it has the file
        (True, "fcntl", "flock", 1),  # as it has the lock
        (True, None, "_lock", 1),  # as it knows that
        (True, "os", "getpid", 1),  # as it writes who the owner is
        (False, None, "_named", 1),  # as it reads who was there before
        (False, "os", "getpid", 1),
        (False, None, "_locked", 2),  # as it has the first of two folders
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
        with pytest.raises(KeyboardInterrupt) as raised, owned([tmp_path, tmp_path / "second"]):
            pass
    if function == "_lock":  # on its way to the next line: free once the exception is, which else may be kept, as in a notebook
        del raised
        gc.collect()
    another_thread(take, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_what_has_the_name_of_a_lock_and_is_no_file_is_one_line_and_does_not_hang(tmp_path, make):
    make(tmp_path / LOCK)
    with pytest.raises(ValueError, match=f"--workdir: got {tmp_path} \\(the .lock in it is no file\\), accepted: a folder"):
        take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(("module", "name"), [(lock.fcntl, "flock"), (os, "fstat")])
def test_a_lock_whose_file_its_last_owner_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch, module, name, stale):
    """`stale`: the last owner is on another machine of a network file system."""
    true, calls = getattr(module, name), []

    def late(*given):
        if not calls:
            (tmp_path / LOCK).unlink()
            if name == "flock":  # and another process makes one
                (tmp_path / LOCK).touch()
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
