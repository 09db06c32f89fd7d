"""The client states of a checkpoint that are on disk: their rows that have changed, in files that checkpoints share.

A file has records, each a client's id and the bytes of its row over all leaves. Of two records of a client the one in the later
file counts. A checkpoint has links to the files of the one before and a file of what has changed since. A new file absorbs the
file before it as long as that one has at most twice as many records. So there are few files, and at most twice as many records
as clients.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedjax_ssl.files import DamagedError
from fedjax_ssl.simulation.client_states import OnDisk

BLOCK = 2**26  # bytes that are read at once
Entry = dict[str, Any]  # of a file in the manifest: its name, number of records and checksum


def taken(leaves: Sequence[OnDisk]) -> np.ndarray:
    """The records of the rows that have changed since the last call."""
    changed = leaves[0].changed
    assert changed is not None
    ids = np.flatnonzero(changed)
    records = np.empty(len(ids), _record(leaves))
    records["id"] = ids
    records["row"] = np.concatenate([np.array(x[ids]).reshape(len(ids), _width(x)).view(np.uint8) for x in leaves], axis=1)
    leaves[0].reset()
    return records


def write(folder: pathlib.Path, name: str, before: tuple[pathlib.Path, Sequence[Entry]], records: np.ndarray) -> list[Entry]:
    """Makes a checkpoint's folder; returns the entries of its files.

    It has links to files of the checkpoint `before`, which is given by its folder and entries, and a new file `name` with
    `records`.
    """
    folder.mkdir()
    source, entries = before[0], list(before[1])
    parts: list[np.ndarray] = [records] if len(records) else []
    while parts and entries and entries[-1]["records"] <= 2 * sum(map(len, parts)):
        parts.insert(0, np.memmap(source / entries.pop()["file"], records.dtype, "r"))
    for entry in entries:
        _link(source / entry["file"], folder / entry["file"])
    if not parts:
        return entries
    digest, number = hashlib.blake2b(digest_size=16), 0
    with (folder / name).open("xb") as file:
        for block in _newest(parts):
            content = block.tobytes()
            file.write(content)
            digest.update(content)
            number += len(block)
    return [*entries, {"file": name, "records": number, "blake2b": digest.hexdigest()}]


def check(folder: pathlib.Path, entries: Sequence[Entry]) -> None:
    """Raises DamagedError where a file is not as it was written."""
    for entry in entries:
        with (folder / entry["file"]).open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        if digest.hexdigest() != entry["blake2b"]:
            raise DamagedError(folder / entry["file"], "its content does not match its checksum")


def read(folder: pathlib.Path, entries: Sequence[Entry], leaves: Sequence[OnDisk]) -> None:
    """Assigns the rows of a checkpoint's files to the leaves, which have the states before round 1."""
    ends = np.cumsum([_width(leaf) * leaf.itemsize for leaf in leaves])
    for entry in entries:
        for block in _blocks(np.memmap(folder / entry["file"], _record(leaves), "r")):
            for leaf, part in zip(leaves, np.split(block["row"], ends[:-1], axis=1), strict=True):
                leaf[block["id"]] = np.ascontiguousarray(part).view(leaf.dtype).reshape(len(block), *leaf.shape[1:])
    leaves[0].reset()


def _newest(parts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The records, in blocks, without those of clients that a later part has."""
    later = [np.concatenate([np.empty(0, np.int64), *(part["id"] for part in parts[i + 1 :])]) for i in range(len(parts))]
    for part, ids in zip(parts, later, strict=True):
        for block in _blocks(part):
            yield block[~np.isin(block["id"], ids)]


def _blocks(records: np.ndarray) -> Iterator[np.ndarray]:
    at_once = max(1, BLOCK // records.itemsize)
    for start in range(0, len(records), at_once):
        yield np.array(records[start : start + at_once])


def _record(leaves: Sequence[OnDisk]) -> np.dtype:
    return np.dtype([("id", np.int64), ("row", np.uint8, (sum(_width(leaf) * leaf.itemsize for leaf in leaves),))])


def _width(leaf: OnDisk) -> int:
    """The numbers in a row."""
    return int(np.prod(leaf.shape[1:]))


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    """A second name of a file, or, where its file system has none, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
