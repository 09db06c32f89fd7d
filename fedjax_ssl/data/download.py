"""The original files of datasets: fetched once, resumed where a connection was cut, and checked each time they are read.

They lie in `FOLDER/originals/DATASET/`; `folder` gives FOLDER. A file gets its name only once it is whole and has the
published checksum; until then it is `.NAME.part`. `requests` fetches it in parts: pooch (1.9) and TFDS's download manager begin
a file anew where a connection was cut, and SVHN's largest has 1.3 GB.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from fedjax_ssl.data.catalog import DATASETS, ORIGINALS, File
from fedjax_ssl.data.transfer import CutError, RefusedError, transfer
from fedjax_ssl.files import regular

DATA = "FEDJAX_SSL_DATA"
MIRROR = "FEDJAX_SSL_MIRROR"
CHECKSUMS = "FEDJAX_SSL_CHECKSUMS"
WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt, where the last one brought next to nothing."""
_PROGRESS = 1 << 20  # bytes of an attempt that was worth another one


class Original(NamedTuple):
    """A file, where it is fetched from, and where it is stored."""

    file: File
    url: str
    path: Path


def folder(data_dir: str | None = None) -> Path:
    """Where data are stored: `data_dir`, else FEDJAX_SSL_DATA, else `~/.cache/fedjax_ssl/data` (or under XDG_CACHE_HOME)."""
    if chosen := data_dir or os.environ.get(DATA):
        return Path(chosen).expanduser()
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fedjax_ssl", "data")
    if not path.is_absolute():
        raise FileNotFoundError(f"data_dir: got nothing, and there is no home folder: give a folder, or set {DATA} to one")
    return path


def places(name: str, data_dir: str | None = None) -> list[Original]:
    """The files of a dataset of `ORIGINALS`, with their sources and paths.

    FEDJAX_SSL_MIRROR is the address of another copy of `originals`; FEDJAX_SSL_CHECKSUMS is a JSON file with sizes and
    checksums of files that were packed anew.
    """
    group = name.partition("/")[0]
    base = os.environ.get(MIRROR, "").rstrip("/")
    root, files = folder(data_dir) / "originals" / group, _replaced(group, ORIGINALS[name])
    return [Original(file, f"{base}/{group}/{file.name}" if base else file.url, root / file.name) for file in files]


def obtain(name: str, data_dir: str | None = None, *, download: bool = True) -> dict[str, Path]:
    """The paths of a dataset's original files, by name, each whole and with its checksum; fetches what is missing.

    A line on standard error first says what is fetched, how much, and under which terms. Raises FileNotFoundError with one line
    where a file is missing and cannot be fetched or `download` is false, and OSError where it cannot be written.
    """
    found = places(name, data_dir)
    missing = [place for place in found if not is_whole(place)]
    if missing and not download:
        raise FileNotFoundError(_absent(name, missing, data_dir))
    if missing:
        try:
            missing[0].path.parent.mkdir(parents=True, exist_ok=True)
            _say(_announced(name, missing))
            _make_room(missing)
            for place in missing:
                fetch(place)
        except RefusedError as error:
            raise FileNotFoundError(f"{name}: {error}") from None
        except OSError as error:
            if error.errno is None:  # one of our own lines
                raise
            where = missing[0].path.parent
            raise OSError(f"{name}: cannot write to {where} ({error.strerror}): {_elsewhere()}") from error
    return {place.file.name: place.path for place in found}


def is_whole(place: Original) -> bool:
    """Whether a file exists and has the right size and checksum."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _is_as_published(place.path, place.file)
    return False


def fetch(place: Original, waits: Sequence[float] = WAITS) -> None:
    """Fetches a file and checks it; several processes may ask for it at once, and one of them fetches.

    RefusedError with one line if the server does not have the file or has another one, or if connections still break after as
    many further attempts as there are `waits`. What has arrived by then is kept, and the next call goes on from there.
    """
    path = place.path
    part = part_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _interruptible(), _alone(path):
        if is_whole(place):  # another process has fetched it meanwhile
            return
        began_anew = not part.exists()
        _receive_all(place, part, waits)
        if not began_anew and not _is_as_published(part, place.file):  # its beginning may be of another version
            part.unlink()
            _receive_all(place, part, waits)
        if not _is_as_published(part, place.file):
            got = f"{part.stat().st_size:,} bytes, {_digest_of(part, place.file)}"
            part.unlink()
            raise RefusedError(
                f"{place.url} has another file ({got}) than {place.file.publisher} publishes ({place.file.checksum}); nothing "
                f"was kept: try another network, or set {MIRROR} to another copy"
            )
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)


def part_of(path: Path) -> Path:
    """The path of a file while it is being fetched."""
    return path.with_name(f".{path.name}.part")


def have(path: Path) -> int:
    """The size of a file in bytes, 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def shown(size: float) -> str:
    """A number of bytes as people read it."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _receive_all(place: Original, part: Path, waits: Sequence[float]) -> None:
    """Receives a file's bytes until all are there, over as many connections as it takes."""
    failed = 0
    while True:
        before = have(part)
        try:
            return transfer(place.url, part, place.file.size, place.path.name)
        except CutError as error:
            after = have(part)
            failed = failed + 1 if after - before < _PROGRESS else 0
            if failed > len(waits):
                kept = f"{shown(after)} of it are kept: the same command goes on from there; " if after else ""
                raise RefusedError(
                    f"cannot be fetched from {place.url} ({error}); {kept}check the network, set {MIRROR} to another copy, or "
                    f"put the file at {place.path}"
                ) from None
        if failed:
            time.sleep(waits[failed - 1])


def _is_as_published(path: Path, file: File) -> bool:
    return file.size in (0, regular(path).stat().st_size) and _digest_of(path, file) == file.checksum


def _digest_of(path: Path, file: File) -> str:
    found = path.stat()
    return _digest(path, file.checksum.partition(":")[0], found.st_size, found.st_mtime_ns)


@functools.lru_cache
def _digest(path: Path, algorithm: str, size: int, modified: int) -> str:
    """A file's checksum, computed once per process unless the file changes."""
    del size, modified
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def _replaced(group: str, files: Sequence[File]) -> list[File]:
    """The files with the sizes and checksums of FEDJAX_SSL_CHECKSUMS, a local file, where it has them, which is said."""
    path = os.environ.get(CHECKSUMS, "")
    if not path:
        return list(files)
    accepted = 'accepted: a JSON file such as {"cifar10/cifar-10-binary.tar.gz": {"size": 1, "checksum": "sha256:..."}}'
    try:
        table = json.loads(regular(Path(path).expanduser()).read_bytes())
        if not isinstance(table, dict):
            raise ValueError("no table")
        given = {name: table[f"{group}/{name}"] for name in (file.name for file in files) if f"{group}/{name}" in table}
        found = [
            file._replace(size=int(given[file.name]["size"]), checksum=str(given[file.name]["checksum"]), publisher=path)
            if file.name in given
            else file
            for file in files
        ]
        for file in found:
            hashlib.new(file.checksum.partition(":")[0])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{CHECKSUMS}: got {path} ({error}), {accepted}") from None
    if given:
        _say_once(f"{CHECKSUMS}: sizes and checksums in {path} take the place of the published ones")
    return found


def _announced(name: str, missing: Sequence[Original]) -> str:
    """What is fetched, from where, where it goes, and its terms, in a line."""
    about, size = DATASETS[name], sum(place.file.size for place in missing)
    amount = shown(size) if all(place.file.size for place in missing) else "a file whose size the server says"
    what = amount if len(missing) == 1 else f"{len(missing)} files, {amount}"
    where = ", ".join(sorted({urlsplit(place.url).netloc for place in missing}))
    damaged = ", ".join(place.path.name for place in missing if place.path.exists())
    again = f" ({damaged} there is damaged)" if damaged else ""
    return f"{name}: fetching {what}, from {where} to {missing[0].path.parent}{again}; terms: {about.terms} ({about.url})"


def _make_room(missing: Sequence[Original]) -> None:
    """Raises OSError where the disk is too full for what is missing."""
    needed = sum(place.file.size - have(part_of(place.path)) for place in missing)
    where = missing[0].path.parent
    free = shutil.disk_usage(where).free
    if needed > free:
        raise OSError(f"{where}: {shown(needed)} are needed and {shown(free)} are free: {_elsewhere()}")


def _elsewhere() -> str:
    return f"make room, or give another folder (data.data_dir, --data_dir or {DATA})"


def _absent(name: str, missing: Sequence[Original], data_dir: str | None) -> str:
    states = [f"{place.path} is damaged" for place in missing if place.path.exists()]
    where = f"data_dir={folder(data_dir)} holds {name} neither prepared by TFDS nor as its original files"
    option = f" --data_dir={data_dir}" if data_dir else ""
    return (
        f"{states[0] if states else where}, and data.download is false: give a folder that has it "
        f"(--config.data.data_dir=DIR), run fedjax-ssl prepare {name}{option}, or set data.download=true"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@functools.cache
def _say_once(line: str) -> None:
    _say(line)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Within it, no other process fetches this file."""
    import filelock

    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        acquired = lock.acquire(timeout=0)
    except filelock.Timeout:
        _say(f"{path}: another process fetches it: waiting")
        acquired = lock.acquire()
    with acquired:
        yield


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM end the process at once, whatever a run makes of them: what has arrived is on disk."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual: Mapping[int, signal.Handlers | object] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
