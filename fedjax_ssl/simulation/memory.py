"""Cohorts that do not fit into memory at once: how many clients at a time do, by what the compiled programs say they need."""

from __future__ import annotations

import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from fedjax_ssl.simulation.execution import Execution

Result = TypeVar("Result")
_log = logging.getLogger(__name__)

MARGIN = 0.9
"""The share of a device's memory that a chunk may take by extrapolation: programs hold more than their clients' shares."""
LIMITS = tuple(pathlib.Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes"))
"""Where Linux says how much memory a container may take."""
MEMORY = pathlib.Path("/proc/meminfo")
"""Where Linux says how much memory is free."""
ADVICE = (
    "lower client.batch_size, execution.chunk_size or execution.batch_size, or set execution.dtype=bfloat16 or, of a single "
    "run whose data are on the device, execution.data=host"
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
    why = str(error).strip().splitlines()[0]
    if isinstance(error, OutOfMemoryError):
        return why
    return f"no memory ({why}): {ADVICE}"


def device_bytes(sharing: int = 0, held: int = 0) -> int:
    """Bytes of one device that a program may have: what JAX may take of an accelerator's memory; of a CPU's, a share of what is
    free, and no more than one of what the machine has, or its container; 0: unknown.

    Args:
        sharing: how many devices share a CPU's memory; 0: all.
        held: bytes that the program's arguments have of it already.
    """
    device = jax.local_devices()[0]
    if limit := (device.memory_stats() or {}).get("bytes_limit", 0):
        return limit
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        share = sharing or jax.local_device_count()
        of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min([size // share for size in (of_machine, *_of_container())] + [size // share + held for size in _free()])
    return 0


def _free() -> Iterator[int]:
    """Bytes that the system can give without swapping, where it says."""
    try:
        yield 1024 * int(re.findall(r"^MemAvailable:\s*(\d+) kB$", MEMORY.read_text(), re.MULTILINE)[0])
    except (OSError, IndexError):  # no Linux
        return


def _of_container() -> Iterator[int]:
    """The limits that a container's memory has, of control groups of either version."""
    for path in LIMITS:
        try:
            yield int(path.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue


def check(needed: int, sharing: int = 0, held: int = 0) -> None:
    """Raises OutOfMemoryError where a program needs more bytes than it may have, arguments included, see `device_bytes`."""
    if 0 < (there := device_bytes(sharing, held)) < needed:
        raise OutOfMemoryError(f"needs {needed / 1e9:.3g} GB of a device with {there / 1e9:.3g} GB")


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
            why = str(error).strip().splitlines()[0]
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
