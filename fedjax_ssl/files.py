"""Files that are written whole and read with suspicion: JSON with a checksum, and any file that is replaced atomically.

What is written is on disk before the function that writes it returns: a power cut after it loses nothing of it. Of the paths
that a user gives only regular files are opened: opening a named pipe would block, and a device may never end.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

CHECKSUM = "checksum"
"""The key of a checksum, the last one in each row of a log and in each JSON file."""
REMEDY = "put the file back, or start anew with --overwrite"
FAILURES = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENXIO, errno.ENODEV, errno.ESTALE,
)  # fmt: skip
"""Errors for which no input is to blame: a disk that fails or is full, too many open files, a file system that is gone."""
CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF)
"""Error numbers of operating systems and file systems that cannot sync folders, or cannot sync at all."""
_KINDS = (
    (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)  # fmt: skip


class DamagedError(ValueError):
    """A file, or a round in a log, that is not what was written; `why` says what it is."""

    def __init__(self, what: object, why: object):
        super().__init__(f"{what} is damaged: {why}; {REMEDY}")
        self.why = str(why)


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Writes `value`, which may have arrays, as indented JSON, atomically; NaN and infinity become null."""
    with replacing(path) as file:
        file.write(_rendered(plain(value)))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_json` wrote; DamagedError where the file has anything else."""
    content = content_of(pathlib.Path(path))
    try:
        return verified(content, _rendered)
    except ValueError as error:
        raise DamagedError(path, error) from None


def content_of(path: pathlib.Path) -> bytes:
    """The bytes of a file; DamagedError where something else has its name."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise DamagedError(path, "it is a folder" if path.is_dir() else "it is no file")
    return path.read_bytes()


def _rendered(value: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(signed(value), indent=2, allow_nan=False)}\n".encode()


def signed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its checksum."""
    content = json.dumps(value, allow_nan=False).encode()
    return {**value, CHECKSUM: hashlib.blake2b(content, digest_size=8).hexdigest()}


def verified(content: bytes, written: Callable[[dict[str, Any]], bytes]) -> dict[str, Any]:
    """Reads a JSON object and returns it without its checksum.

    ValueError says what is wrong, such as that `written` makes other bytes of it than `content`.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if value.pop(CHECKSUM, None) is None:
        raise ValueError("it has no checksum")
    with contextlib.suppress(ValueError, RecursionError):  # NaN, which is never written
        if written(value) == content:
            return value
    raise ValueError("its content does not match its checksum")


def plain(value: object) -> Any:
    """The value in JSON's types: arrays as lists, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which replaces the one at `path` atomically, and is on disk at the end."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with naming(path), temporary.open("xb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Within it an error of the system that names no file names this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def remove_unfinished(folder: pathlib.Path) -> None:
    """Removes what `replacing` leaves of a file where its process is killed; nobody else may be writing to the folder."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{16}\.tmp", path.name):
            path.unlink()


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder and those above it, on disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def sync(opened: int | pathlib.Path) -> None:
    """Puts a file's content, or a folder's entries, on disk, where its file system can; `opened` is open, or a path."""
    try:
        if isinstance(opened, int):
            os.fsync(opened)
            return
        handle = os.open(opened, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def failing(error: BaseException | None) -> int:
    """The errno in FAILURES of an error, or of an error that led to it; 0 if there is none, so that the input is to blame."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FAILURES:
            return error.errno
        error = error.__cause__ or error.__context__
    return 0


def failure(error: OSError, folder: pathlib.Path) -> str:
    """What went wrong with a file below a run's folder, in one line; where the disk is full, with what is free there."""
    place, free = pathlib.Path(error.filename or folder).absolute(), ""
    if error.errno == errno.ENOSPC:
        there = next(path for path in (place, *place.parents) if path.exists())
        free = f" ({shutil.disk_usage(there).free / 2**20:,.1f} MiB are free)"
    return f"{place}: {error.strerror or error}{free}; what was saved before is whole, and the same command goes on from it"


def regular(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a regular file, which may be opened, also behind a link.

    ValueError for a folder, named pipe, socket or device, and FileNotFoundError where there is nothing.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = next((word for has_kind, word in _KINDS if has_kind(mode)), "special file")
        raise ValueError(f"{path} is a {kind}: give a regular file")
    return pathlib.Path(path)


def check_below(folder: str | os.PathLike[str]) -> None:
    """Raises ValueError where something below a folder, which a library will open, is neither a folder nor a regular file."""
    for path in pathlib.Path(folder).rglob("*"):
        if not path.is_dir():
            regular(path)
