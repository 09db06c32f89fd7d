"""A disk that forgets and fails: what a power cut may leave of a folder, and an I/O error in place of any write to it.

Python's own calls are seen as they are made. What other code writes, such as TensorStore, is found by comparing the folder
before and after each of them; it counts as written and not as synced.
"""

import builtins
import contextlib
import errno
import io
import os
import pathlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

Entries = dict[str, int]
CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
FSYNC, RENAMES = os.fsync, (os.rename, os.replace)


class Disk:
    """A folder's files as they are, and what of them is on disk, by inode.

    On disk are a file's content, and a folder's entries, as they were when that was last synced. After it each change of an
    entry may be on disk or not, apart from the others; a rename is one change. A file's later content may be there, or not, or
    end in zeros.
    """

    def __init__(self, root: pathlib.Path):
        self.root, self._open = root, dict[int, int]()
        self._now: dict[int, Any] = {}
        self._synced: dict[int, Any] = {}
        self._changes: dict[int, list[Entries]] = {}  # of a folder, since it was synced: names -> inode, 0: removed
        self.scan()
        self._synced, self._changes = dict(self._now), {}

    def scan(self) -> None:
        """Notes what has changed since the last call."""
        pending = [self.root]
        while pending:
            path = pending.pop()
            with contextlib.suppress(FileNotFoundError):
                inode = self._inode(path)
                if not path.is_dir():
                    self._now[inode] = path.read_bytes()
                    continue
                children = sorted(path.iterdir())
                entries = {child.name: self._inode(child) for child in children}
                before, self._now[inode] = self._now.get(inode, {}), entries
                changed = {name: entries.get(name, 0) for name in before | entries if before.get(name) != entries.get(name, 0)}
                self._changes.setdefault(inode, []).extend({name: value} for name, value in changed.items())
                pending += children

    def _inode(self, path: pathlib.Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._open:
            self._open[inode] = os.open(path, os.O_RDONLY)  # so that no other file gets its number
        return inode

    def renamed(self, folder: pathlib.Path) -> None:
        """Notes that what has changed in a folder is one change."""
        inode = self._inode(folder)
        before = len(self._changes.setdefault(inode, []))
        self.scan()
        changes = self._changes[inode]
        changes[before:] = [{name: value for change in changes[before:] for name, value in change.items()}]

    def synced(self, handle: int) -> None:
        """Notes that a file or a folder is on disk."""
        self.scan()
        inode = os.fstat(handle).st_ino
        if inode in self._now:
            self._synced[inode] = self._now[inode]
            self._changes.pop(inode, None)

    def after_a_power_cut(self, folder: pathlib.Path, chance: random.Random | None = None) -> None:
        """Writes to `folder` what is left: all that is synced, and of the rest what chance will have; None: nothing."""
        self._write(self._inode(self.root), folder, chance)

    def _write(self, inode: int, path: pathlib.Path, chance: random.Random | None) -> None:
        if isinstance(now := self._now[inode], bytes):
            path.write_bytes(self._left(now, self._synced.get(inode, b""), chance))
            return
        entries = dict(self._synced.get(inode, {}))
        for change in self._changes.get(inode, []) if chance else []:
            if chance.random() < 0.5:
                entries |= change
        path.mkdir()
        for name, child in entries.items():
            if child:
                self._write(child, path / name, chance)

    @staticmethod
    def _left(now: bytes, synced: bytes, chance: random.Random | None) -> bytes:
        if chance is None or now == synced:
            return synced
        cut = chance.randint(len(synced) if now.startswith(synced) else 0, len(now))
        return chance.choice([synced, now, now[:cut], now[:cut] + bytes(len(now) - cut)])

    def close(self) -> None:
        for handle in self._open.values():
            os.close(handle)


def within(root: pathlib.Path, where: Any, dir_fd: int | None = None) -> bool:
    """Whether a path, or an open file, is below a folder."""
    opened = where if isinstance(where, int) else dir_fd
    base = os.readlink(f"/proc/self/fd/{opened}") if opened is not None else os.curdir
    return pathlib.Path(base, "" if isinstance(where, int) else where).absolute().is_relative_to(root)


@contextlib.contextmanager
def calls(root: pathlib.Path, made: Callable[..., Any]) -> Iterator[None]:
    """Within it, `made(original, *arguments)` stands for each of CALLS below `root`, one at a time, for `open` and `write`."""
    lock, opening = threading.RLock(), io.open

    def replaced(original: Callable) -> Callable:
        def call(where, *rest, **named):
            if not within(root, where, named.get("dir_fd")):
                return original(where, *rest, **named)
            with lock:
                return made(original, where, *rest, **named)

        return call

    def opened(where, mode="r", *rest, **named):
        if isinstance(where, int) or not set(mode) & set("wax+") or not within(root, where):
            return opening(where, mode, *rest, **named)
        with lock:
            file = made(opening, where, mode, *rest, **named)
        write = file.write

        def writing(content):
            with lock:
                return made(write, content)

        file.write = writing
        return file

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, replaced(getattr(os, name))))
        for module in (io, builtins):
            stack.enter_context(mock.patch.object(module, "open", opened))
        yield


@contextlib.contextmanager
def forgetting(root: pathlib.Path, moment: Callable[[Disk], None]) -> Iterator[Disk]:
    """The disk of a folder; within it `moment` is called before each of CALLS below the folder and at the end."""
    disk = Disk(root)

    def made(original, *arguments, **named):
        disk.scan()
        moment(disk)
        found = original(*arguments, **named)
        if original is FSYNC:
            disk.synced(*arguments)
        elif original in RENAMES:
            disk.renamed(pathlib.Path(arguments[1]).absolute().parent)
        return found

    try:
        with calls(root, made):
            yield disk
        disk.scan()
        moment(disk)
    finally:
        disk.close()


@contextlib.contextmanager
def failing(root: pathlib.Path, number: int, code: int = errno.EIO, only: str = "") -> Iterator[list[str]]:
    """Within it the `number`-th call below a folder, from 0, fails, after half of what it writes; yields the calls made.

    `only`: the one name of calls that count. A run's threads do not always call in the same order.
    """
    made_so_far: list[str] = []

    def made(original, *arguments, **named):
        if only not in ("", original.__name__):
            return original(*arguments, **named)
        made_so_far.append(original.__name__)
        if len(made_so_far) != number + 1:
            return original(*arguments, **named)
        if original.__name__ == "write":
            original(arguments[0][: len(arguments[0]) // 2])
        raise OSError(code, os.strerror(code))

    with calls(root, made):
        yield made_so_far
