"""A user's paths: only regular files are opened, as a named pipe is waited for, and a device may never end."""

import os
import pathlib
import stat

_KINDS = (
    (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "named pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)  # fmt: skip


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
