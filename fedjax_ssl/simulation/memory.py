"""What memory there is, and cohorts that do not fit into it at once: how many clients at a time do, by what their compiled
programs say they need."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax

from fedjax_ssl.simulation.execution import Execution

Result = TypeVar("Result")
_log = logging.getLogger(__name__)

MARGIN = 0.9
"""The share of what a program may have that chunks are made for: what these ask for is extrapolated, and may come to more."""
FREE_SHARE = 0.9
"""The share of a CPU's free memory that a program may have: it takes more than it asks for, and then the system ends it."""
MEMORY = pathlib.Path("/proc/meminfo")
"""Where Linux says how much memory is free."""
GROUP, GROUPS = pathlib.Path("/proc/self/cgroup"), pathlib.Path("/sys/fs/cgroup")
"""Where Linux says in which control groups this process is, as those of a container are, and how much memory they may take."""
ADVICE = (
    "lower client.batch_size, execution.chunk_size or execution.batch_size, or set execution.dtype=bfloat16 or, of a single "
    "run whose data are on the device, execution.data=host; of several, execution.devices to at most their number; where a "
    "search has chosen the layout, execution.tune=never"
)
FEW = 2
"""Clients of the small chunk that the extrapolation begins with; one alone is not vmapped, and says little of many."""


class OutOfMemoryError(RuntimeError):
    """A program needs more memory than its device has."""


def is_short(error: BaseException) -> bool:
    """Whether an error says that memory is short, this module's own or JAX's."""
    return isinstance(error, OutOfMemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    )


def explained(error: BaseException) -> str:
    """In one line, that memory is short, and what to do."""
    if isinstance(error, OutOfMemoryError):
        return str(error)
    return f"no memory ({reason(error)}): {ADVICE}"


def reason(error: BaseException) -> str:
    """The first line of an error, without what to do."""
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    return first.removesuffix(f": {ADVICE}")


def accelerator_bytes() -> int:
    """What JAX may take of an accelerator's memory; 0: unknown, as of a CPU's."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def total_bytes() -> int:
    """What there is for JAX, used or not: of an accelerator's memory, or of the machine's and its container's; 0: unknown."""
    if limit := accelerator_bytes():
        return limit
    return min((room.all for room in _rooms()), default=0) if _is_cpu() else 0


def device_bytes(sharing: int = 0, held: int = 0) -> int:
    """Bytes of one device that a program may have: what JAX may take of an accelerator's memory; of a CPU's, a share
    of FREE_SHARE of what is free, and no more than one of what the machine has, or its container; 0: unknown.

    Args:
        sharing: how many devices share a CPU's memory; 0: all.
        held: bytes that the program's arguments have of it already.
    """
    if limit := accelerator_bytes():
        return limit
    if _is_cpu() and (rooms := _rooms()):
        share = sharing or jax.local_device_count()
        return max(1, min(min(room.all // share, int(FREE_SHARE * room.free) // share + held) for room in rooms))
    return 0


def _is_cpu() -> bool:
    return jax.local_devices()[0].platform == "cpu"


class _Room(NamedTuple):
    """Bytes that there are, and how many of them can be had without swapping."""

    all: int
    free: int


def _rooms() -> list[_Room]:
    """The machine's and its container's memory; none where the system does not say."""
    return [_of_machine(), *_of_groups()] if hasattr(os, "sysconf") else []


def _of_machine() -> _Room:
    """The machine's memory; where the system does not say how much is free, all is."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return _Room(there, 1024 * _number("MemAvailable", MEMORY))
    except OSError:  # no Linux
        return _Room(there, there)


class _Names(NamedTuple):
    """What a version of control groups calls a limit, what is used of it, and files' pages therein, which can be given up."""

    limit: str
    usage: str
    files: str


_NAMES = (_Names("memory.max", "memory.current", ""), _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
"""Of the second version, and of the first. All count what is in the groups below, too."""


def _of_groups() -> Iterator[_Room]:
    """What each control group that has a limit may take: this process's own and all that it is in."""
    for folder in _groups():
        for names in _NAMES:
            try:
                most = int((folder / names.limit).read_text())
            except (OSError, ValueError):  # no such file, or "max"
                continue
            try:
                used = int((folder / names.usage).read_text())
                files = sum(_number(f"{names.files}{kind}_file", folder / "memory.stat") for kind in ("active", "inactive"))
                yield _Room(most, most - used + files)
            except OSError:  # it does not say how much is free
                yield _Room(most, most)


def _groups() -> Iterator[pathlib.Path]:
    """The folders of the control groups that this process is in, the innermost first."""
    try:
        lines = [line.split(":", 2) for line in GROUP.read_text().splitlines()]
    except OSError:  # no Linux
        return
    for _, kind, path in lines:
        if kind in ("", "memory"):  # the second version has one tree, the first one of each kind
            root = GROUPS / kind
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _number(name: str, path: pathlib.Path) -> int:
    """The number of a line `name: 1 kB` or `name 1` of a file; OSError where there is none."""
    if found := re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE):
        return int(found[1])
    raise OSError(f"{path} has no {name}")


def trim() -> None:
    """Frees what only refers to itself, and gives the system what the C library keeps of what was freed, if that is glibc.

    Compiling a large network for a CPU, or dropping its program, leaves much with it, in pieces among what is still in use.
    Whoever asks how much memory is free does not see these. Errors and what they were raised in may hold each other.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library, or another system
        ctypes.CDLL(None).malloc_trim(0)


def check(needed: int, sharing: int = 0, held: int = 0) -> None:
    """Raises OutOfMemoryError where a program needs more bytes than it may have, arguments included, see `device_bytes`."""
    if 0 < (there := device_bytes(sharing, held)) < needed:
        raise OutOfMemoryError(f"needs {needed / 1e9:.3g} GB of a device, and may have {there / 1e9:.3g} GB of it")


def in_chunks_that_fit(
    run: Callable[[Execution], Result],
    needs: Callable[[Execution], int],
    executions: Sequence[Execution],
    cohort_size: int,
    sharing: int = 0,
) -> tuple[Result, Execution]:
    """`run(execution)` for the first execution that fits into memory: its result, and that execution.

    Args:
        run: raises OutOfMemoryError, or JAX's error, where memory is short; leaves everything as it was then.
        needs: the bytes that a device needs for an execution, by its compiled program; 0: unknown.
        executions: one or more, tried one after another; where none fits, the chunks of the last one shrink if it says so.
        cohort_size: M.
        sharing: as in `device_bytes`.

    Raises:
        OutOfMemoryError: nothing fits; the message says what to do.
    """
    execution, *others = executions
    while True:
        try:
            return run(execution), execution
        except (OutOfMemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_short(error):
                raise
            why = reason(error)
            smaller = others.pop(0) if others else shrunk(execution, needs, cohort_size, sharing)
            if smaller is None:
                raise OutOfMemoryError(f"no memory for {_clients(execution)} ({why}): {ADVICE}") from error
        _log.warning("no memory for %s (%s): %s from now on", _clients(execution), why, _clients(smaller))
        execution = smaller


def shrunk(execution: Execution, needs: Callable[[Execution], int], cohort_size: int, sharing: int = 0) -> Execution | None:
    """The execution with fewer clients in a chunk, None where it says that they stay, or one is left.

    How many fit is extrapolated from the bytes of the chunk that did not and of a small one, linearly; where they are not known
    it is half as many, and never more. Chunks are as even as the turns that they take allow.
    """
    of_device = -(-cohort_size // execution.num_devices)
    chunk = min(execution.chunk_size or of_device, of_device)
    if chunk == 1 or not execution.shrinks:
        return None
    half = -(-chunk // 2)
    if half <= FEW or not (there := device_bytes(sharing)) or not (large := needs(execution)):
        return execution._replace(chunk_size=half)
    small = needs(execution._replace(chunk_size=FEW))
    if not 0 < small < large:
        return execution._replace(chunk_size=half)
    fit = FEW + (MARGIN * there - small) * (chunk - FEW) / (large - small)
    turns = -(-chunk // max(1, int(fit)))
    return execution._replace(chunk_size=min(half, -(-chunk // turns)))


def _clients(execution: Execution) -> str:
    return {0: "all clients at once", 1: "one client at a time"}.get(
        execution.chunk_size, f"{execution.chunk_size} clients at a time"
    )
