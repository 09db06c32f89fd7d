"""Checkpoints: a run's state on disk as two Orbax items, the bytes of all leaves, and a manifest with their checksum."""

import hashlib
import itertools
import json
import logging
import math
import os
import pathlib
import shutil
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.experiment.files import REMEDY

_log = logging.getLogger(__name__)


class Checkpoints(AbstractContextManager):
    """The newest two checkpoints of one run, in `<workdir>/checkpoints/<round>`; one process at a time may use the folder.

    Call `restore` before the first `save`, and `close` at the end, or use it as a context manager; saves end in the background.
    With `read_only` nothing in the folder changes, so that another process may be writing to it.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, read_only: bool = False):
        logging.getLogger("absl").addFilter(_without_orbax_chatter)
        self.folder = pathlib.Path(workdir).absolute() / "checkpoints"
        # What killed processes left. The manager's own option removes it in the background, even after it has been closed.
        for unfinished in [] if read_only else self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, read_only=read_only)
        self._manager, self._read_only = ocp.CheckpointManager(self.folder, options=options), read_only
        self.log = ""
        """The log's digest in the checkpoint that was restored last; empty: it has none."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, round: int, state: PyTree, *, log: str = "") -> None:
        """Copies `state` to the host, and writes it in the background as the checkpoint of `round`, unless that is the newest.

        `log` is a digest of the run's log at that round.

        Raises ValueError for a newer one or a leaf that is no array or number, and what made the last save fail (a full disk).
        """
        if round == (newest := self._manager.latest_step()):
            return
        if newest is not None and round < newest:
            path = self.folder / str(newest)
            raise ValueError(f"cannot save round {round}: {path} is newer; restore it, or use an empty folder")
        leaves = _leaves(state)
        arrays = {path: _to_host(path, leaf) for path, leaf in leaves.items()}
        # One array for all leaves: where one of several is damaged, TensorStore prints a traceback for each other one.
        content = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
        manifest = {"round": round, "log": log, "leaves": [_entry(path, leaves[path], array) for path, array in arrays.items()]}
        state_item = ocp.args.ArraySave(content, save_args=ocp.SaveArgs(chunk_byte_size=2**26))
        manifest_item = ocp.args.JsonSave(manifest | {"blake2b": _checksum(manifest, content)})
        self._manager.save(round, args=ocp.args.Composite(state=state_item, manifest=manifest_item))

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
            except _CorruptError as error:
                _log.warning("skipped corrupt checkpoint %s: %s", self.folder / str(round), error)
                corrupt.append(round)
                continue
            for path in [*likes, *saved]:
                there = saved[path][1]["kind"] if path in saved else "absent"
                here = _kind(likes[path]) if path in likes else "absent"
                if there != here:
                    raise ValueError(
                        f"{self.folder / str(round)} is another experiment's checkpoint: state{path} is {there} there and "
                        f"{here} here; use another workdir, or start this one anew"
                    )
            self._rename(corrupt)
            leaves = [_place(*saved[path], like) for path, like in likes.items()]
            return round, jax.tree.unflatten(jax.tree.structure(template), leaves)
        if corrupt:
            names = ", ".join(map(str, corrupt))
            raise ValueError(f"every checkpoint in {self.folder} is corrupt ({names}); {REMEDY}")
        return None

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, valid or not."""
        return [int(path.name) for path in self.folder.iterdir() if path.is_dir() and path.name.isdecimal()]

    def delete_after(self, round: int) -> None:
        """Deletes the checkpoints of rounds after `round`."""
        for newer in [number for number in self._manager.all_steps() if number > round]:
            self._manager.delete(newer)

    def wait(self) -> None:
        """Returns once the newest save is on disk; raises what made it fail."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and releases the background threads."""
        self.wait()
        self._manager.close()

    def _read(self, round: int) -> dict[str, tuple[np.ndarray, dict[str, Any]]]:
        """Each leaf's array and its entry in the manifest, by path; raises _CorruptError where they are not as saved."""
        as_numpy = ocp.args.ArrayRestore(restore_args=ocp.RestoreArgs(restore_type=np.ndarray))
        items = ocp.args.Composite(state=as_numpy, manifest=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(round, args=items)
            manifest, content = dict(restored["manifest"]), restored["state"]
            checksum = manifest.pop("blake2b")
        except Exception as error:  # damage surfaces as any exception of Orbax, TensorStore, JSON or the system
            raise _CorruptError(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}") from error
        if checksum != _checksum(manifest, content):
            raise _CorruptError("its content does not match its checksum")
        if manifest["round"] != round:
            raise _CorruptError(f"it holds round {manifest['round']}")
        entries, self.log = manifest["leaves"], manifest.get("log", "")
        ends = np.cumsum([math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize for entry in entries])
        leaves = zip(entries, np.split(content, ends[:-1]), strict=True)
        return {entry["path"]: (part.view(entry["dtype"]).reshape(entry["shape"]), entry) for entry, part in leaves}

    def _rename(self, corrupt: list[int]) -> None:
        if self._read_only:
            return
        for round in corrupt:
            names = itertools.chain([f"{round}.corrupt"], (f"{round}.corrupt-{n}" for n in itertools.count(2)))
            free = next(name for name in names if not (self.folder / name).exists())
            (self.folder / str(round)).rename(self.folder / free)
        self._manager.reload()


class _CorruptError(Exception):
    """Why a checkpoint is not valid."""


def _without_orbax_chatter(record: logging.LogRecord) -> bool:
    """Drops Orbax's log records, dozens a save; it raises its errors as well."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _entry(path: str, leaf: Any, array: np.ndarray) -> dict[str, Any]:
    """A leaf in the manifest: its kind, the stored array's dtype and shape, and what a NumPy array does not have."""
    stored = {"path": path, "kind": _kind(leaf), "dtype": str(array.dtype), "shape": list(array.shape)}
    if _is_key(leaf):
        return stored | {"key": str(jax.random.key_impl(leaf))}
    return stored | {"weak": isinstance(leaf, jax.Array) and leaf.weak_type}


def _kind(leaf: Any) -> str:
    """Dtype and shape, such as `float32[3,4]` or `key<fry>[]`, in which a checkpoint and a template have to agree."""
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _to_host(path: str, leaf: Any) -> np.ndarray:
    """The leaf as a NumPy array, a typed key as its uint32 data."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf, order="C")
    if array.dtype.kind in "OSU":
        raise ValueError(f"state{path} is a {type(leaf).__name__}; a checkpoint holds arrays and numbers")
    return array


def _place(array: np.ndarray, entry: dict[str, Any], like: Any) -> Any:
    """A copy of `array` as the saved leaf, its weak type included, placed as `like` is, so that jit traces nothing again."""
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


def _checksum(manifest: dict[str, Any], content: np.ndarray) -> str:
    digest = hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16)
    digest.update(content.data)
    return digest.hexdigest()
