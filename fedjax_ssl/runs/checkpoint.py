"""Checkpoints: a run's state on disk as the bytes of all leaves, which Orbax writes, and a manifest with their checksum."""

import hashlib
import itertools
import logging
import math
import os
import pathlib
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.files import REMEDY, DamagedError, check_below, make_folder, read_json, sync, write_json
from fedjax_ssl.runs import increments
from fedjax_ssl.runs.overwrite import remove
from fedjax_ssl.simulation.client_states import OnDisk
from fedjax_ssl.simulation.distributed import is_key

CHECKPOINTS, BEST = "checkpoints", "best"  # the folders of a run's newest states, and of its best ones
STATE, ROWS, MANIFEST, UNFINISHED = "state", "rows", "manifest.json", ".tmp"
KEPT = 2
_log = logging.getLogger(__name__)


def is_unfinished(path: pathlib.Path) -> bool:
    """Whether a path has the name of a checkpoint of which only a part may be on disk."""
    return path.suffix == UNFINISHED and path.stem.isdecimal()


class Checkpoints(AbstractContextManager):
    """The newest two checkpoints of one run, in `<workdir>/checkpoints/<round>`; one process at a time may use the folder.

    In the folder `best` all stay until `delete_before`.

    A checkpoint is written to `<round>.tmp`. Once all of it is on disk the folder gets its name, and then older ones go: a kill
    or a power cut at any moment leaves the newest whole ones. Orbax's CheckpointManager renames and deletes folders without a
    sync, so that a power cut may take both, and has no checksum and no files that checkpoints share.

    Call `restore` before the first `save`, and `close` at the end, or use it as a context manager; saves end in the background.
    With `read_only` nothing in the folder changes, so that another process may be writing to it.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, read_only: bool = False, name: str = CHECKPOINTS):
        logging.getLogger("absl").addFilter(_without_orbax_chatter)
        self.folder = pathlib.Path(workdir).absolute() / name
        if not read_only:
            make_folder(self.folder)
            for unfinished in filter(is_unfinished, self.folder.iterdir()):
                remove(unfinished)
        alone = ocp.options.MultiprocessingOptions(active_processes={0})  # of several processes
        self._orbax = ocp.Checkpointer(ocp.ArrayCheckpointHandler(), multiprocessing_options=alone)
        self._read_only = read_only
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self.log = ""
        """The log's digest in the checkpoint that was restored last."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, round: int, state: PyTree, *, log: str = "") -> None:
        """Copies `state` to the host, and writes it in the background as the checkpoint of `round`, unless that is the newest.

        `log` is a digest of the run's log at that round.

        Raises ValueError if a newer checkpoint exists or a leaf is no array or number, and the OSError with which the previous
        save failed.
        """
        self.wait()
        newest = max(self.rounds(), default=-1)
        if round == newest:
            return
        if round < newest:
            path = self.folder / str(newest)
            raise ValueError(f"cannot save round {round}: {path} is newer; restore it, or use an empty folder")
        leaves, on_disk = _parted(_leaves(state))
        arrays = {path: _to_host(path, leaf) for path, leaf in leaves.items()}
        # One array for all leaves: where one of several is damaged, TensorStore prints a traceback for each other one.
        content = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
        manifest = {"round": round, "log": log, "leaves": [_entry(path, leaves[path], array) for path, array in arrays.items()]}
        records = changed = None
        if on_disk:
            changed = next(iter(on_disk.values())).changed
            manifest["on_disk"] = {path: _kind(leaf) for path, leaf in on_disk.items()}
            records = increments.taken([*on_disk.values()])
        self._saving = self._thread.submit(self._write, round, content, manifest, newest, records, changed)

    def _write(
        self,
        round: int,
        content: np.ndarray,
        manifest: dict[str, Any],
        newest: int,
        records: np.ndarray | None,
        changed: np.ndarray | None,
    ) -> None:
        """Writes a checkpoint, on disk in this order: all that is in its folder, the folder's name, the end of older ones.

        `newest` is the round of the one before it, or -1, and `records` are what has changed since of states on disk. If it
        fails, these clients count as `changed` [K] again, so that the next checkpoint has them.
        """
        folder = self.folder / f"{round}{UNFINISHED}"
        try:
            folder.mkdir()
            if records is not None:
                before = self.folder / str(newest)
                entries = read_json(before / MANIFEST)["rows"] if newest >= 0 else []
                manifest["rows"] = increments.write(folder / ROWS, f"{round}", (before / ROWS, entries), records)
            self._orbax.save(folder / STATE, args=ocp.args.ArraySave(content, save_args=ocp.SaveArgs(chunk_byte_size=2**26)))
            write_json(folder / MANIFEST, manifest | {"blake2b": _checksum(content)})
            for path in (*folder.rglob("*"), folder):
                sync(path)
            folder.rename(self.folder / str(round))
        except BaseException as error:
            if records is not None and changed is not None:
                changed[records["id"]] = True
            shutil.rmtree(folder, ignore_errors=True)
            if code := re.search(r"os_error_code='(\d+)'", str(error)):  # TensorStore's: a full disk is its ValueError
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
            raise
        sync(self.folder)
        for old in sorted(self.rounds())[:-KEPT] if self.folder.name == CHECKPOINTS else ():
            self._delete(old)

    def restore(self, template: PyTree, upto: int | None = None) -> tuple[int, PyTree] | None:
        """(round, state) of the newest valid checkpoint, bit for bit as it was saved; None where there is no checkpoint.

        The result has the structure and the placement on devices of `template`, a state of this experiment, or its shapes
        (`jax.ShapeDtypeStruct`). Rounds after `upto` are not read. A corrupt checkpoint is logged, and renamed to
        `<round>.corrupt` once an older one has been read. Raises ValueError for another experiment's, or where all are corrupt.
        """
        self.wait()
        likes = _leaves(template)
        corrupt: list[int] = []
        for round in sorted((number for number in self.rounds() if upto is None or number <= upto), reverse=True):
            try:
                saved = self._read(round)
            except DamagedError as error:
                _log.warning("skipped corrupt checkpoint %s: %s", self.folder / str(round), error.why)
                corrupt.append(round)
                continue
            for path in [*likes, *saved]:
                there = saved[path][1]["kind"] if path in saved else "absent"
                here = _kind(likes[path]) if path in likes else "absent"
                if there != here:
                    raise ValueError(
                        f"{self.folder / str(round)} is another experiment's or version's checkpoint: state{path} is {there} "
                        f"there and {here} here; use another workdir, or start this one anew"
                    )
            if not self._read_only:
                self._set_aside(corrupt)
            if on_disk := _parted(likes)[1]:
                increments.read(self.folder / str(round) / ROWS, saved[next(iter(on_disk))][1]["rows"], [*on_disk.values()])
            leaves = [_place(*saved[path], like) for path, like in likes.items()]
            return round, jax.tree.unflatten(jax.tree.structure(template), leaves)
        if corrupt:
            names = ", ".join(map(str, corrupt))
            raise ValueError(f"every checkpoint in {self.folder} is corrupt ({names}); {REMEDY}")
        return None

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, valid or not."""
        found = self.folder.iterdir() if self.folder.exists() else ()
        return [int(path.name) for path in found if path.name.isdecimal() and path.is_dir()]

    def newest_log(self) -> tuple[int, str]:
        """The newest round with a checkpoint, and the log's digest in its manifest; (0, ""): none, or it is damaged."""
        try:
            manifest = read_json(self.folder / f"{max(self.rounds(), default=0)}" / MANIFEST)
            return int(manifest["round"]), str(manifest["log"])
        except (OSError, ValueError, KeyError):
            return 0, ""

    def delete_after(self, round: int) -> None:
        """Deletes the checkpoints of rounds after `round`, for good."""
        for newer in [number for number in self.rounds() if number > round]:
            self._delete(newer)
        sync(self.folder)

    def delete_before(self, round: int) -> None:
        """Deletes those before the last one of the rounds up to `round`."""
        for older in sorted(number for number in self.rounds() if number <= round)[:-1]:
            self._delete(older)

    def wait(self) -> None:
        """Returns once the newest save is on disk; raises what made it fail, once."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Waits, and ends the background thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def _read(self, round: int) -> dict[str, tuple[np.ndarray | None, dict[str, Any]]]:
        """Each leaf's array, or None of one on disk, and its entry in the manifest, by path; DamagedError: not as saved."""
        folder = self.folder / str(round)
        as_numpy = ocp.args.ArrayRestore(restore_args=ocp.RestoreArgs(restore_type=np.ndarray))
        try:
            check_below(folder)
            manifest, content = read_json(folder / MANIFEST), self._orbax.restore(folder / STATE, args=as_numpy)
            checksum, rows = manifest.pop("blake2b"), manifest.get("rows", [])
            increments.check(folder / ROWS, rows)
        except DamagedError:
            raise
        except Exception as error:  # damage surfaces as any exception of Orbax, TensorStore or the system
            raise DamagedError(folder, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}") from error
        if checksum != _checksum(content):
            raise DamagedError(folder, "its content does not match its checksum")
        if manifest["round"] != round:
            raise DamagedError(folder, f"it holds round {manifest['round']}")
        entries, self.log = manifest["leaves"], manifest["log"]
        ends = np.cumsum([math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize for entry in entries])
        leaves = zip(entries, np.split(content, ends[:-1]), strict=True)
        saved = {entry["path"]: (part.view(entry["dtype"]).reshape(entry["shape"]), entry) for entry, part in leaves}
        return saved | {path: (None, {"kind": kind, "rows": rows}) for path, kind in manifest.get("on_disk", {}).items()}

    def _set_aside(self, corrupt: list[int]) -> None:
        for round in corrupt:
            names = itertools.chain([f"{round}.corrupt"], (f"{round}.corrupt-{n}" for n in itertools.count(2)))
            free = next(name for name in names if not (self.folder / name).exists())
            (self.folder / str(round)).rename(self.folder / free)

    def _delete(self, round: int) -> None:
        """Deletes a checkpoint, of which a kill leaves no half by its name."""
        remove((self.folder / str(round)).rename(self.folder / f"{round}{UNFINISHED}"))


def _without_orbax_chatter(record: logging.LogRecord) -> bool:
    """Drops Orbax's log records, dozens a save; what it logs as an error it raises as well."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _parted(leaves: dict[str, Any]) -> tuple[dict[str, Any], dict[str, OnDisk]]:
    """The leaves that are saved whole, and those on disk, of which a checkpoint has the rows that have changed."""
    on_disk = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, OnDisk)}
    return {path: leaf for path, leaf in leaves.items() if path not in on_disk}, on_disk


def _entry(path: str, leaf: Any, array: np.ndarray) -> dict[str, Any]:
    """A leaf in the manifest: its kind, the stored array's dtype and shape, and what a NumPy array does not have."""
    stored = {"path": path, "kind": _kind(leaf), "dtype": str(array.dtype), "shape": list(array.shape)}
    if is_key(leaf):
        return stored | {"key": str(jax.random.key_impl(leaf))}
    return stored | {"weak": isinstance(leaf, jax.Array) and leaf.weak_type}


def _kind(leaf: Any) -> str:
    """Dtype and shape, such as `float32[3,4]` or `key<fry>[]`, in which a checkpoint and a template have to agree."""
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]{' on disk' * isinstance(leaf, OnDisk)}"


def _to_host(path: str, leaf: Any) -> np.ndarray:
    """The leaf as a NumPy array, a typed key as its uint32 data."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf, order="C")
    if array.dtype.kind in "OSU":
        raise ValueError(f"state{path} is a {type(leaf).__name__}; a checkpoint holds arrays and numbers")
    return array


def _place(array: np.ndarray | None, entry: dict[str, Any], like: Any) -> Any:
    """A copy of `array` as the saved leaf, its weak type included, placed as `like` is, so that jit traces nothing again.

    Without an array it is `like` itself, whose rows have been read from disk.
    """
    if array is None:
        return like
    if isinstance(like, np.ndarray):
        return array.copy()
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return array[()] if isinstance(like, np.generic) else array.item()
    value: Any = array
    if "key" in entry:
        value = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["key"])
    elif entry["weak"]:
        value = jnp.full(array.shape, array.dtype.type(0).item()).at[...].set(array)  # a Python number has a weak type
    committed = isinstance(like, jax.ShapeDtypeStruct) or like.committed
    return jax.device_put(value, like.sharding if committed else None, may_alias=False)


def _checksum(content: np.ndarray) -> str:
    return hashlib.blake2b(content.data, digest_size=16).hexdigest()
