"""A run's folder has one owner at a time: the process that holds its lock, which the system releases when the process ends.

A lease beside the lock names the owner, and has a new date every few seconds. Where a file system has no locks, or keeps them
to one machine, the lease alone tells whether the owner still lives. Both are filelock's.
"""

import contextlib
import errno
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from filelock import FileLock, SoftFileLease, Timeout

from fedjax_ssl.experiment.files import make_folder

LOCK, OWNER = ".lock", ".owner"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
BEAT, DEAD_AFTER = 5.0, 30.0
"""Seconds: between an owner's signs of life, and without one until it counts as dead."""
Say = Callable[[str], object]
_log = logging.getLogger(__name__)
_leases: dict[pathlib.Path, SoftFileLease] = {}
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
    new = [folder for folder in folders if folder.absolute() not in _had.get()]
    token = _had.set(_had.get() | {folder.absolute() for folder in new})
    try:
        with contextlib.ExitStack() as stack:
            for folder in new:
                is_locked = stack.enter_context(_locked(folder))
                stack.enter_context(_leased(folder, say, is_locked=is_locked))
            yield
    finally:
        _had.reset(token)


def check_owned(folder: pathlib.Path) -> None:
    """Raises OwnedError where another process has taken a folder over, as this one was suspended for too long."""
    if (lease := _leases.get(folder.absolute())) is None:
        return
    if not (folder / OWNER).exists():
        raise OwnedError(f"--workdir: {folder} was taken over meanwhile, by a process that has ended; the same command goes on")
    if lease.owner and lease.owner.token != lease.token:  # None: it cannot be read now
        raise _refused(folder)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[bool]:
    """Holds the lock of a folder, which is made; False: its file system has none."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / LOCK, thread_local=False, fallback_to_soft=False)
    try:
        try:
            is_locked = _lock(folder, lock)
        except OSError as error:
            raise ValueError(f"--workdir: got {folder} ({error.strerror}), accepted: a folder that can be written to") from None
        yield is_locked
    finally:  # also where Ctrl-C comes while it takes the lock
        with contextlib.suppress(OSError):
            # While the lock is taken: who waits for it finds that its file is no longer the folder's.
            if lock.is_locked and not (folder / OWNER).exists():
                (folder / LOCK).unlink()
        with contextlib.suppress(OSError):
            lock.release()
        with contextlib.suppress(OSError):  # it has files
            for path in missing:
                path.rmdir()


def _lock(folder: pathlib.Path, lock: FileLock) -> bool:
    """Takes a lock; False: there are none. OwnedError where another process has it."""
    for left in reversed(range(100)):
        try:
            make_folder(folder)
            lock.acquire(timeout=0.1)
            return True
        except Timeout:
            raise _refused(folder) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                with contextlib.suppress(OSError):
                    (folder / LOCK).unlink()
                return False
            # Its last owner removed the folder, or the lock on another machine, just now.
            if not left or error.errno not in (errno.EEXIST, errno.ENOENT, errno.ESTALE):
                raise
    raise AssertionError


@contextlib.contextmanager
def _leased(folder: pathlib.Path, say: Say, *, is_locked: bool) -> Iterator[None]:
    """Says who owns a folder, and that it lives; OwnedError where another owner does."""
    lease = SoftFileLease(folder / OWNER, lease_duration=DEAD_AFTER, heartbeat_interval=BEAT, thread_local=False)
    try:
        try:
            _take(folder, lease, say)
            _leases[folder.absolute()] = lease
        except OSError:  # such as a full disk
            if not is_locked:
                raise
        yield
    finally:
        _leases.pop(folder.absolute(), None)
        with contextlib.suppress(OSError):
            lease.release()


def _take(folder: pathlib.Path, lease: SoftFileLease, say: Say) -> None:
    """Takes a lease, also that of a process that has ended: at once on this machine, else without a sign of life of it."""
    try:
        lease.acquire(timeout=0)
        return
    except Timeout:
        say(f"waiting up to {DEAD_AFTER:.0f} s for a sign of life of {_shown(lease)}, which had {folder}")
    before = _sign(folder)
    try:
        lease.acquire(DEAD_AFTER * 1.1, min(1.0, DEAD_AFTER / 10), cancel_check=lambda: _sign(folder) not in (before, None))
    except Timeout:
        if _sign(folder) != before:
            raise _refused(folder) from None
        lease.force_break()  # an empty file, as a power cut leaves it
        lease.acquire(timeout=0)


def _sign(folder: pathlib.Path) -> int | None:
    """The date of an owner's last sign of life; None: there is no owner, or it cannot be seen now."""
    try:
        return (folder / OWNER).lstat().st_mtime_ns
    except OSError:
        return None


def _refused(folder: pathlib.Path) -> OwnedError:
    lease = SoftFileLease(folder / OWNER)
    return OwnedError(f"--workdir: {folder} is being written to by {_shown(lease)}; wait for it, or stop it")


def _shown(lease: SoftFileLease) -> str:
    """Who has a lease."""
    if (owner := lease.owner) is None:
        return "another process"
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
