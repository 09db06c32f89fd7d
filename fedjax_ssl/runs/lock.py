"""A run's folder has one owner at a time: the process that holds its lock, which the system releases when the process ends.

The locked file names the owner. Where there are no locks, one warning says so, and whom the file named before. filelock has
the same `flock`, but names nobody, and its older versions leave their file behind.
"""

import contextlib
import errno
import logging
import os
import pathlib
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import BinaryIO

from fedjax_ssl.files import make_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_log = logging.getLogger(__name__)
_had: ContextVar[frozenset[pathlib.Path]] = ContextVar("the folders that are owned here", default=frozenset())


class OwnedError(ValueError):
    """A folder that another process has."""


@contextlib.contextmanager
def owned(folders: Sequence[pathlib.Path]) -> Iterator[None]:
    """Within it this process owns the folders, which are made; OwnedError names another owner, which is not waited for.

    Code inside of it, in the same thread, may ask for them again. A folder that was made here and got nothing is removed at the
    end. ValueError where a folder cannot be made or written to.
    """
    new = {path: folder for folder in folders if (path := folder.absolute()) not in _had.get()}
    token = _had.set(_had.get() | new.keys())
    try:
        with contextlib.ExitStack() as stack:
            found = {folder: stack.enter_context(_locked(folder)) for folder in new.values()}
            if unlocked := [f"{folder} ({before or 'nobody'})" for folder, before in found.items() if before is not None]:
                why = "no file locks here, so that nothing keeps a second command from writing to the same folder"
                _log.warning("%s; who was there before, and may still be: %s", why, ", ".join(unlocked))
            yield
    finally:
        _had.reset(token)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[str | None]:
    """Holds the lock of a folder, which is made. Yields None, or, where there are no locks, whom its file named before."""
    path, missing = folder / LOCK, list[pathlib.Path]()
    try:
        missing += [path for path in (folder, *folder.parents) if not path.exists()]  # a long name is an error already here
        file, is_locked = _lock(path)
    except BlockingIOError:
        raise OwnedError(f"--workdir: {folder} is being written to by {_owner(path)}; wait for it, or stop it") from None
    except OSError as error:
        accepted = "accepted: a folder that can be written to"
        raise ValueError(f"--workdir: got {folder} ({error.strerror}), {accepted}") from None
    try:
        before = None if is_locked else _named(file.read(200))
        with contextlib.suppress(OSError):  # of a full disk: the lock holds without a name
            file.truncate(0)
            file.seek(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield before
    finally:
        try:
            with contextlib.suppress(OSError):  # while it is locked: who waits for it finds that it is no longer the folder's
                path.unlink()
        finally:  # also on Ctrl-C
            file.close()
        with contextlib.suppress(OSError):  # it has files
            for made in missing:
                made.rmdir()


def _lock(path: pathlib.Path) -> tuple[BinaryIO, bool]:
    """A file that is locked until it is closed, and whether there are locks at all. BlockingIOError where another has it."""
    for left in reversed(range(100)):
        try:
            make_folder(path.parent)
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):  # a pipe would be waited for
                raise OSError(errno.EINVAL, f"the {LOCK} in it is no file")
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", 0)
        except (FileExistsError, FileNotFoundError):  # its last owner removed the folder just now, or it is none
            if not left:
                raise
            continue
        try:
            has_locks = _has_locked(file)
            with contextlib.suppress(FileNotFoundError):
                if not has_locks or os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file, has_locks
            file.close()  # its last owner removed it just now
        except BaseException as error:
            file.close()
            if not left or not isinstance(error, OSError) or error.errno != errno.ESTALE:  # an owner elsewhere removed it
                raise
    raise BlockingIOError


def _has_locked(file: BinaryIO) -> bool:
    """Locks a file; False: its file system has no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return fcntl is not None


def _owner(path: pathlib.Path) -> str:
    """Whom a locked file names."""
    found, deadline = "", time.monotonic() + 1
    while not found and time.monotonic() < deadline:  # it has the lock, and writes its name
        time.sleep(0.01)
        with contextlib.suppress(OSError):
            found = _named(path.read_bytes())
    return found or "another process"


def _named(content: bytes) -> str:
    return "".join(filter(str.isprintable, content[:200].decode(errors="replace")))
