"""The states of all clients on the host: rows of arrays in memory, or in a file on disk that is mapped into memory."""

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_ssl.arrays import Number, PyTree

CHUNK = 2**28
"""Bytes of states that are computed at once, before round 1."""


class OnDisk(np.ndarray):
    """Rows [K, ...] in a file that is mapped into memory. All leaves of a state share `changed` and `pages`.

    `changed` [K] marks the rows that were assigned since it was reset, and `pages` is the whole file.
    """

    changed: np.ndarray | None
    pages: mmap.mmap | None

    def __array_finalize__(self, obj: Any) -> None:
        self.changed, self.pages = getattr(obj, "changed", None), getattr(obj, "pages", None)

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        if self.changed is not None:
            self.changed[index] = True

    def reset(self) -> None:
        """Marks all rows as unchanged, and drops the file's pages from this process's memory.

        The operating system may still cache those that fit.
        """
        if self.changed is not None:
            self.changed[:] = False
        if self.pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)


def initial(rows: Callable[[Number, int], PyTree], shapes: PyTree, *, on_disk: bool) -> PyTree:
    """The states [K, ...] of all clients before round 1; `rows(start, n)` gives those of n clients, traced for each n.

    Chunks that are all zeros are not written, and so take no memory.
    """
    states = zeros_on_disk(shapes) if on_disk else jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    leaves = jax.tree.leaves(states)
    num_clients, size = max((len(leaf) for leaf in leaves), default=0), sum(leaf.nbytes for leaf in leaves)
    at_once = max(1, num_clients * CHUNK // max(size, CHUNK))
    some = jax.jit(rows, static_argnums=1)
    for start in range(0, num_clients, at_once):
        number = min(at_once, num_clients - start)
        for leaf, new in zip(leaves, map(np.asarray, jax.tree.leaves(some(np.int32(start), number))), strict=True):
            if new.any():
                leaf[start : start + number] = new
        if on_disk:
            leaves[0].reset()
    return states


def zeros_on_disk(shapes: PyTree) -> PyTree:
    """Arrays of zeros in a file without a name, each client's rows side by side; OSError where TMPDIR has no room for it."""
    leaves, tree = jax.tree.flatten(shapes)
    if not leaves:
        return shapes
    record = np.dtype([(str(i), x.dtype, x.shape[1:]) for i, x in enumerate(leaves)], align=True)
    num_clients, size = len(leaves[0]), max(1, len(leaves[0]) * record.itemsize)
    with tempfile.TemporaryFile(prefix="fedjax_ssl") as file:
        if hasattr(os, "posix_fallocate"):  # else a disk that gets full would end the process by a signal
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)
        pages = mmap.mmap(file.fileno(), size)
    if hasattr(mmap, "MADV_RANDOM"):  # else each row that is read brings many of its neighbors
        pages.madvise(mmap.MADV_RANDOM)
    whole = np.frombuffer(pages, record, num_clients).view(OnDisk)
    whole.changed, whole.pages = np.zeros(num_clients, bool), pages
    return jax.tree.unflatten(tree, [whole[str(i)] for i in range(len(leaves))])
