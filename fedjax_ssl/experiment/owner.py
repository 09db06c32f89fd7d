"""A run's folder has one owner at a time: the process that holds its lock, which the system releases when the process ends."""

import contextlib
import errno
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK, OWNER = ".lock", ".owner.json"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
ACCEPTED = "accepted: a folder that can be written to"
BEAT, DEAD_AFTER = 10.0, 60.0
"""Where a file system has no locks: seconds between an owner's signs of life, and without one until it counts as dead."""


class OwnedError(ValueError):
    """A folder that another process has."""


@contextlib.contextmanager
def owned(folders: Sequence[pathlib.Path]) -> Iterator[None]:
    """Within it this process owns the folders, which are made; OwnedError names another owner, at once and without waiting.

    At the end a folder that was made here and got nothing is removed.
    """
    with contextlib.ExitStack() as stack:
        for folder in folders:
            stack.enter_context(_made(folder))
            stack.enter_context(_locked(folder))
        yield


@contextlib.contextmanager
def _made(folder: pathlib.Path) -> Iterator[None]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--workdir: got {folder} ({error.strerror}), {ACCEPTED}") from None
    try:
        yield
    finally:
        if missing:
            with contextlib.suppress(OSError):  # it has files
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                for path in missing:
                    path.rmdir()


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    try:
        handle = _lock(folder / LOCK)
    except BlockingIOError:
        raise _refused(folder) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise ValueError(f"--workdir: got {folder} ({error.strerror}), {ACCEPTED}") from None
        with _with_signs_of_life(folder):
            yield
        return
    try:
        with contextlib.suppress(OSError):  # the lock holds without it
            (folder / OWNER).write_text(json.dumps(_me()))
        yield
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        os.close(handle)


def _lock(path: pathlib.Path) -> int:
    """The open file that holds the lock until it is closed; BlockingIOError where another process holds it."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "no locks")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last owner removed it just now


@contextlib.contextmanager
def _with_signs_of_life(folder: pathlib.Path) -> Iterator[None]:
    """Owns a folder on a file system without locks: a file with the owner, which it writes anew every few seconds."""
    me, path = _me(), folder / OWNER
    other = _read(folder)
    if other and _is_alive(other, path):
        raise _refused(folder)
    path.unlink(missing_ok=True)
    try:
        with path.open("x") as file:  # of two processes at once only one makes it
            json.dump(me, file)
    except FileExistsError:
        raise _refused(folder) from None
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, name="owner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if _read(folder) == me:
            path.unlink(missing_ok=True)


def _me() -> dict[str, str | int]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}


def _read(folder: pathlib.Path) -> dict[str, str | int]:
    """The owner that a folder names; empty: none."""
    try:
        found = json.loads((folder / OWNER).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(owner: dict[str, str | int], path: pathlib.Path) -> bool:
    """Whether an owner still shows signs of life; on this host, whether its process exists."""
    if owner.get("host") == socket.gethostname() and isinstance(pid := owner.get("pid"), int) and os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    with contextlib.suppress(OSError):
        return abs(time.time() - path.stat().st_mtime) < DEAD_AFTER
    return False


def _refused(folder: pathlib.Path) -> OwnedError:
    owner = _read(folder)
    shown = f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"
    return OwnedError(f"--workdir: {folder} is being written to by {shown}; wait for it, or stop it")
