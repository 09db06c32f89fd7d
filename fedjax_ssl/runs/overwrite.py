"""What an earlier run left in folders, removed as a whole or not at all."""

import logging
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence

from fedjax_ssl.files import sync

ASIDE, OLD = "overwritten", ".old"
"""ASIDE begins the name of the folder to which an earlier run's files are moved before they are deleted, and where they stay if
the process is killed. OLD ends their names there, so that they are not taken for a run's files."""
_log = logging.getLogger(__name__)


def remove(path: pathlib.Path) -> None:
    """Removes a file, a folder with all in it, or a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_all(folders: Sequence[pathlib.Path], names: Sequence[str]) -> None:
    """Removes what has one of the names in any of the folders: first all is renamed aside, or put back where that fails.

    ValueError where something cannot be removed: then all is where it was.
    """
    found = [path for folder in folders for path in _there(folder, names)]
    for path in found:
        _check(path)
    renamed = list[tuple[pathlib.Path, pathlib.Path]]()
    asides = {folder: folder / f"{ASIDE}.{secrets.token_hex(8)}" for folder in dict.fromkeys(path.parent for path in found)}
    try:
        for path in found:
            aside = asides[path.parent]
            aside.mkdir(exist_ok=True)
            path.rename(aside / f"{path.name}{OLD}")
            renamed.append((path, aside))
    except BaseException as error:
        for own, aside in reversed(renamed):
            (aside / f"{own.name}{OLD}").rename(own)
        for aside in asides.values():
            if aside.is_dir():
                aside.rmdir()
        if isinstance(error, OSError):
            raise _refused(path, error) from error
        raise
    for folder, aside in asides.items():
        sync(folder)
        try:
            shutil.rmtree(aside)
        except OSError as error:
            _log.warning(
                "%s holds what is left of an earlier run, and could not be removed: %s", aside, error.strerror or error
            )


def _there(folder: pathlib.Path, names: Sequence[str]) -> Iterator[pathlib.Path]:
    left = [path for path in folder.glob(f"{ASIDE}.*") if re.fullmatch(r"\.[0-9a-f]{16}", path.suffix)]
    yield from (path for path in (*(folder / name for name in names), *left) if os.path.lexists(path))


def _check(path: pathlib.Path) -> None:
    """Raises ValueError where a folder may not be changed from which something would be removed."""

    def raising(error: OSError) -> None:
        raise _refused(path, error) from error

    inside = os.walk(path, onerror=raising) if path.is_dir() and not path.is_symlink() else ()
    for folder in (str(path.parent), *(name for name, *_ in inside)):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _refused(path, PermissionError(f"no right to change {folder}"))


def _refused(path: pathlib.Path, error: OSError) -> ValueError:
    return ValueError(f"--overwrite: {path} cannot be removed ({error.strerror or error}); nothing was removed")
