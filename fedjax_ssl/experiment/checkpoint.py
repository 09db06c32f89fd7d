"""Checkpoints: the run's state on disk, written atomically and verified before it is believed.

Orbax writes each checkpoint into a temporary folder and renames it, so a process that is killed leaves whole checkpoints
behind. What Orbax cannot see (a file that another program cut, a disk that flipped a bit) is caught by a manifest beside the
arrays, which holds a checksum of every leaf.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

PyTree = Any

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, in `<workdir>/checkpoints/<round>`; one process at a time may hold the folder.

    Call `restore` before the first `save`, and `close` at the end (or use it as a context manager): saves finish in the
    background.

    Attributes:
        folder: where the checkpoints are.
    """

    def __init__(self, workdir: str | os.PathLike[str], keep: int = 2):
        """Opens the folder, makes it where it is missing, and removes what killed processes left half-written.

        Args:
            workdir: the run's folder.
            keep: how many of the newest checkpoints stay, >= 1; with 2 there is one to fall back to.

        Raises:
            ValueError: `keep` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        logging.getLogger("absl").addFilter(_without_orbax_chatter)
        self.folder = pathlib.Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, round: int, state: PyTree) -> None:
        """Copies `state` to the host, and writes it in the background as the checkpoint of `round`.

        On return the caller may donate the state's buffers. A round that is the newest one already is not written again (a
        signal may ask for a checkpoint right after the loop did).

        Args:
            round: rounds finished, >= 0.
            state: pytree of jax or NumPy arrays (typed keys included) and Python numbers; arrays may be sharded over the
                devices of this process.

        Raises:
            ValueError: a newer checkpoint exists, or a leaf is neither an array nor a number.
            Exception: whatever made the save before this one fail (a full disk).
        """
        newest = self._manager.latest_step()
        if round == newest:
            return
        if newest is not None and round < newest:
            raise ValueError(
                f"cannot save round {round}: {self.folder / str(newest)} is newer; restore it, or use an empty folder"
            )
        arrays = {path: _to_host(path, leaf) for path, leaf in _leaves(state).items()}
        kinds = {path: _kind(leaf) for path, leaf in _leaves(state).items()}
        self._manager.save(
            round,
            args=ocp.args.Composite(
                # Orbax refuses arrays of size 0; the manifest says all that there is to know about them.
                state=ocp.args.StandardSave({path: array for path, array in arrays.items() if array.size}),
                manifest=ocp.args.JsonSave(_manifest(round, kinds, arrays)),
            ),
        )

    def restore(self, template: PyTree) -> tuple[int, PyTree] | None:
        """Reads the newest checkpoint that is whole, bit for bit as it was saved.

        A corrupt one is logged, and renamed to `<round>.corrupt` once an older one has been read, so that its round can be
        saved again; nothing is deleted.

        Args:
            template: a state of this experiment: its structure, shapes, dtypes and, for jax arrays, placement on devices are
                those of the result. Its values are not read.

        Returns:
            (round, state), or None where there is no checkpoint at all.

        Raises:
            ValueError: the checkpoint is another experiment's (structure, shape or dtype differs), or all are corrupt.
        """
        self.wait()
        rounds = (int(path.name) for path in self.folder.iterdir() if path.is_dir() and path.name.isdecimal())
        corrupt: list[int] = []
        for round in sorted(rounds, reverse=True):
            try:
                arrays = self._read(round, {path: _kind(leaf) for path, leaf in _leaves(template).items()})
            except _CorruptError as error:
                _log.warning("skipped corrupt checkpoint %s: %s", self.folder / str(round), error)
                corrupt.append(round)
                continue
            self._move_aside(corrupt)
            leaves = [_place(arrays[path], leaf) for path, leaf in _leaves(template).items()]
            return round, jax.tree.unflatten(jax.tree.structure(template), leaves)
        if corrupt:
            names = ", ".join(map(str, corrupt))
            raise ValueError(f"every checkpoint in {self.folder} is corrupt ({names}); move that folder away to start anew")
        return None

    def wait(self) -> None:
        """Returns once the newest save is on disk; raises what made it fail."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and releases the background threads."""
        self.wait()
        self._manager.close()

    def _read(self, round: int, kinds: dict[str, str]) -> dict[str, np.ndarray]:
        """Arrays by path, equal to those saved, or _CorruptError; ValueError where they are not of these kinds."""
        read = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        manifest = _reading(lambda: self._manager.restore(round, args=read)["manifest"])
        if not isinstance(manifest, dict) or manifest.get("blake2b") != _digest_of_json(manifest):
            raise _CorruptError("its manifest does not match its checksum")
        if manifest["round"] != round:
            raise _CorruptError(f"it holds round {manifest['round']}")
        saved = {leaf["path"]: leaf for leaf in manifest["leaves"]}
        for path in [*kinds, *saved]:
            here, there = kinds.get(path, "absent"), saved[path]["kind"] if path in saved else "absent"
            if here != there:
                raise ValueError(
                    f"{self.folder / str(round)} is another experiment's checkpoint: state{path} is {there} there and {here} "
                    "here; use another workdir, or start this one anew"
                )
        empty = {path: np.empty(leaf["shape"], leaf["dtype"]) for path, leaf in saved.items()}
        stored = {path: array for path, array in empty.items() if array.size}
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(stored))
        arrays = empty | _reading(lambda: self._manager.restore(round, args=arguments)["state"])
        for path, array in arrays.items():
            if _digest(array) != saved[path]["blake2b"]:
                raise _CorruptError(f"state{path} does not match its checksum")
        return arrays

    def _move_aside(self, rounds: list[int]) -> None:
        for round in rounds:
            names = itertools.chain([f"{round}.corrupt"], (f"{round}.corrupt-{n}" for n in itertools.count(2)))
            free = next(name for name in names if not (self.folder / name).exists())
            (self.folder / str(round)).rename(self.folder / free)
        self._manager.reload()


class _CorruptError(Exception):
    """A checkpoint that cannot be believed, and why."""


def _reading(read: Callable[[], Any]) -> Any:
    """What `read` returns, or _CorruptError: damage surfaces as any exception of Orbax, TensorStore, JSON or the system."""
    try:
        return read()
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise _CorruptError(f"{type(error).__name__}: {reason[:200]}") from error


def _without_orbax_chatter(record: logging.LogRecord) -> bool:
    """Keeps Orbax's progress reports, dozens of lines a save, off the terminal; its errors pass."""
    return record.levelno >= logging.ERROR or f"{os.sep}orbax{os.sep}" not in record.pathname


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf: Any) -> str:
    """Dtype and shape, as `float32[3,4]` or `key<fry>[]`; what must agree between a checkpoint and a template."""
    dtype, shape = (leaf.dtype, leaf.shape) if hasattr(leaf, "dtype") else (np.asarray(leaf).dtype, ())
    return f"{dtype}[{','.join(map(str, shape))}]"


def _to_host(path: str, leaf: Any) -> np.ndarray:
    """The leaf as a NumPy array, without a copy where that is possible: Orbax copies it before its `save` returns."""
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf, order="C")
    if array.dtype.kind in "OSU":
        raise ValueError(f"state{path} is a {type(leaf).__name__}; a checkpoint holds arrays and numbers")
    return array


def _place(array: np.ndarray, like: Any) -> Any:
    """`array` as the kind of leaf that `like` is: where it is, committed to it or not, weakly typed or not.

    All three are part of jit's cache key, so that a restored state runs the program that its template runs.
    """
    if isinstance(like, np.ndarray):
        return array
    if not isinstance(like, jax.Array):
        return array[()] if isinstance(like, np.generic) else array.item()
    value: Any = array
    if _is_key(like):
        value = jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    elif like.weak_type:
        value = jnp.zeros_like(like).at[...].set(array)
    return jax.device_put(value, like.sharding if like.committed else None, may_alias=False)


def _manifest(round: int, kinds: dict[str, str], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """What the checkpoint holds: per leaf its kind, how it is stored (a key as its uint32 data) and its checksum."""
    leaves = [
        {"path": path, "kind": kinds[path], "dtype": str(array.dtype), "shape": list(array.shape), "blake2b": _digest(array)}
        for path, array in arrays.items()
    ]
    manifest = {"round": round, "leaves": leaves}
    return manifest | {"blake2b": _digest_of_json(manifest)}


def _digest(array: np.ndarray) -> str:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def _digest_of_json(manifest: dict[str, Any]) -> str:
    content = {name: manifest.get(name) for name in ("round", "leaves")}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
