"""A run's folder has one owner at a time: the process that holds its lock, which the system releases when the process ends.

A file beside the lock names the owner, and has a new date every few seconds. Where a file system has no locks, or keeps them
to one machine, that file alone tells whether the owner still lives. filelock's lease (4.3) was tried in its place: it tells
machines apart by host name alone, gives a folder away whose living owner was suspended for a while, and leaves a dead owner's
file for half a minute where names cannot be exchanged, as on NFS.
"""

import contextlib
import errno
import functools
import json
import logging
import os
import pathlib
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, BinaryIO

from fedjax_ssl.files import make_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK, OWNER = ".lock", ".owner.json"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
ACCEPTED = "accepted: a folder that can be written to"
BEAT, DEAD_AFTER, SETTLED_AFTER = 5.0, 30.0, 0.5
"""Seconds: between an owner's signs of life; without one until it counts as dead; until only one is left of several
processes that took its place."""
Owner = dict[str, Any]
Say = Callable[[str], object]
Sign = tuple[bytes, int] | None
_log = logging.getLogger(__name__)
_claims: dict[pathlib.Path, Owner] = {}  # what this process has written into folders' files
_had: ContextVar[frozenset[pathlib.Path]] = ContextVar("the folders that are owned here", default=frozenset())


class OwnedError(ValueError):
    """A folder that another process has."""


@contextlib.contextmanager
def owned(folders: Sequence[pathlib.Path], say: Say = _log.info) -> Iterator[None]:
    """Within it this process owns the folders, which are made; OwnedError names another owner, which is not waited for.

    Code inside of it, in the same thread, may ask for them again. A folder that was made here and got nothing is removed at the
    end. `say` gets a line before a wait for another owner's sign of life. ValueError where a folder cannot be made or written
    to.
    """
    mine, doubtful = list[tuple[pathlib.Path, Owner]](), list[tuple[pathlib.Path, Owner]]()
    new = {path: folder for folder in folders if (path := folder.absolute()) not in _had.get()}
    token = _had.set(_had.get() | new.keys())
    try:
        with contextlib.ExitStack() as stack:
            if new:
                stack.enter_context(_beating(mine))
            signs, began = {folder: _sign(folder / OWNER) for folder in new.values()}, time.monotonic()
            for folder in new.values():
                is_locked, me = stack.enter_context(_locked(folder)), _me()
                stack.callback(_leave, folder, me)  # also where Ctrl-C comes while it claims the folder
                is_alive = functools.partial(_is_alive, folder, (signs[folder], began), say, is_locked=is_locked)
                if _claim(folder, me, is_alive, is_locked=is_locked):
                    doubtful.append((folder, me))
                mine.append((folder, me))
            if doubtful:
                time.sleep(SETTLED_AFTER)
            for folder in (folder for folder, me in doubtful if _read(folder) != me):
                raise _refused(folder)
            yield
    finally:
        _had.reset(token)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[bool]:
    """Holds the lock of a folder, which is made; False: its file system has none."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]  # a long name is an error already here
        handle = _lock(folder)
    except BlockingIOError:
        raise _refused(folder) from None
    except OSError as error:
        raise ValueError(f"--workdir: got {folder} ({error.strerror}), {ACCEPTED}") from None
    try:
        if handle is None:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
        yield handle is not None
    finally:
        try:
            # While the lock is taken: who waits for it finds that its file is no longer the folder's.
            with contextlib.suppress(OSError):
                if not (folder / OWNER).exists():
                    (folder / LOCK).unlink()
        finally:  # also on Ctrl-C
            if handle is not None:
                os.close(handle)
        with contextlib.suppress(OSError):  # it has files
            for path in missing:
                path.rmdir()


def _lock(folder: pathlib.Path) -> int | None:
    """An open file that holds the lock until it is closed; None: there are no locks. BlockingIOError where another has it."""
    path = folder / LOCK
    for left in reversed(range(100)):
        try:
            make_folder(folder)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except (FileExistsError, FileNotFoundError):  # its last owner removed the folder just now, or it is none
            if not left:
                raise
            continue
        if fcntl is None:
            os.close(handle)
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(handle, path):
                return handle
        except BaseException as error:
            os.close(handle)
            if not isinstance(error, OSError):  # Ctrl-C
                raise
            if error.errno in NO_LOCKS:
                return None
            if left and error.errno == errno.ESTALE:  # its last owner, on another machine, removed the file just now
                continue
            raise
        os.close(handle)  # its last owner removed the file just now
    raise BlockingIOError


def _is_same(handle: int, path: pathlib.Path) -> bool:
    """Whether an open file is the one that has a path, in one look at it: it may be removed at any time."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _claim(folder: pathlib.Path, me: Owner, is_alive: Callable[[Owner], bool], *, is_locked: bool) -> bool:
    """Writes who owns a folder; OwnedError where another owner still lives.

    True: another process, which found no living owner either, may have removed this one's file, and made its own.
    """
    path, other = folder / OWNER, _read(folder)
    if other is not None and is_alive(other):
        raise _refused(folder)
    if other is not None or path.is_symlink():  # a link that leads nowhere
        _remove(path)
    is_mine = is_locked
    try:
        with path.open("x") as file:  # of two processes at once only one makes it, where nobody removes it
            is_mine = True
            file.write(json.dumps(me))
    except FileExistsError:
        raise _refused(folder) from None
    except BaseException as error:  # a full disk, Ctrl-C
        if is_mine:  # without locks it may be another process's
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) and is_locked:  # which holds without it
            return False
        raise
    _claims[folder.absolute()] = me
    return other is not None or not is_locked


def _remove(path: pathlib.Path) -> None:
    """Removes a file, where there is one; ValueError where that cannot be done."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # it is a folder
        raise ValueError(f"--workdir: got {path} ({error.strerror}), accepted: a file that can be removed, or none") from None


def check_owned(folder: pathlib.Path) -> None:
    """Raises OwnedError where another process has taken a folder over, as this one was suspended for too long."""
    if (me := _claims.get(folder.absolute())) is None:
        return
    if (other := _read(folder)) is None:
        raise OwnedError(f"--workdir: {folder} was taken over meanwhile, by a process that has ended; the same command goes on")
    if other and other != me:  # empty: it cannot be read now
        raise _refused(folder)


def _leave(folder: pathlib.Path, me: Owner) -> None:
    if _claims.get(folder.absolute()) == me:
        del _claims[folder.absolute()]
    with contextlib.suppress(OSError):  # a later process finds that this one has ended
        if _read(folder) == me:
            (folder / OWNER).unlink()


@contextlib.contextmanager
def _beating(mine: Sequence[tuple[pathlib.Path, Owner]]) -> Iterator[None]:
    """Gives the files of what this process owns a new date every few seconds."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            for folder, me in list(mine):
                with contextlib.suppress(OSError):
                    if _read(folder) == me:
                        os.utime(folder / OWNER)

    thread = threading.Thread(target=beat, name="owner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _me() -> Owner:
    pid = os.getpid()
    return {
        "host": socket.gethostname(), "pid": pid, "machine": _machine(), "began": _began(pid), "token": secrets.token_hex(8)
    }  # fmt: skip


def _machine() -> str:
    """Where a process id means the same process: this start of this machine, or of this container."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _began(pid: object) -> str:
    """When a process of this machine began, which tells it from a later one with its id; empty: nobody knows."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _read(folder: pathlib.Path) -> Owner | None:
    """The owner that a folder names; None: no one; empty: its file cannot be read."""
    try:
        with _opened(folder / OWNER) as file:
            found = json.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _opened(path: pathlib.Path) -> BinaryIO:
    """An owner's file, open to be read; OSError where it is none, such as a pipe, which would be waited for."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return path.open("rb")


def _is_alive(folder: pathlib.Path, seen: tuple[Sign, float], say: Say, owner: Owner, *, is_locked: bool) -> bool:
    """Whether an owner lives: on this machine its process does, on another one it gives a sign of life within a while.

    `seen` are its last sign, and when that was seen: one wait is enough for many folders.
    """
    if owner.get("machine") == _machine():
        if owner.get("began"):
            return _began(owner.get("pid")) == owner["began"]
        if is_locked:  # which it would hold
            return False
    (before, since), path = seen, folder / OWNER
    deadline = since + DEAD_AFTER
    if time.monotonic() < deadline:
        say(f"waiting up to {DEAD_AFTER:.0f} s for a sign of life of {_shown(owner)}, which had {folder}")
    while (now := _sign(path)) == before and time.monotonic() < deadline:
        time.sleep(min(1.0, DEAD_AFTER / 10))
    return now not in (before, None)


def _sign(path: pathlib.Path) -> Sign:
    """Content and date of an owner's file, from an open file, as a network file system may keep a name's date for a minute."""
    try:
        with _opened(path) as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _shown(owner: Owner) -> str:
    return f"process {owner['pid']} on {owner['host']}" if {"pid", "host"} <= owner.keys() else "another process"


def _refused(folder: pathlib.Path) -> OwnedError:
    deadline = time.monotonic() + 1
    while not (owner := _read(folder) or {}) and time.monotonic() < deadline:  # it has the lock, and writes its name
        time.sleep(0.02)
    return OwnedError(f"--workdir: {folder} is being written to by {_shown(owner)}; wait for it, or stop it")
