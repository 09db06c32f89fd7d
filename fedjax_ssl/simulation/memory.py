"""Cohorts that do not fit into memory at once: chunks are halved until a round does."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import jax

from fedjax_ssl.simulation.execution import Execution

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class OutOfMemoryError(RuntimeError):
    """A program needs more memory than its device has."""


def device_bytes() -> int:
    """Bytes of one device: what JAX may take of an accelerator's memory, of a CPU a share of the host's; 0: unknown."""
    device = jax.local_devices()[0]
    if limit := (device.memory_stats() or {}).get("bytes_limit", 0):
        return limit
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    return 0


def check(needed: int) -> None:
    """Raises OutOfMemoryError where a program needs more bytes than the device has."""
    if 0 < (there := device_bytes()) < needed:
        raise OutOfMemoryError(f"needs {needed / 1e9:.3g} GB of a device with {there / 1e9:.3g} GB")


def in_chunks_that_fit(run: Callable[[Execution], Result], execution: Execution, cohort_size: int) -> tuple[Result, Execution]:
    """`run(execution)`, with chunks halved as long as memory is short: its result, and the execution that it was got with.

    Args:
        run: raises OutOfMemoryError, or JAX's error, where memory is short; leaves everything as it was then.
        execution: to begin with.
        cohort_size: M.

    Raises:
        OutOfMemoryError: one client at a time is too much; the message says what to do.
    """
    while True:
        try:
            return run(execution), execution
        except (OutOfMemoryError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            of_device = -(-cohort_size // execution.num_devices)
            chunk = min(execution.chunk_size or of_device, of_device)
            why = str(error).strip().splitlines()[0]
            if chunk == 1:
                raise OutOfMemoryError(
                    f"one client at a time does not fit into memory ({why}): lower client.batch_size, or set "
                    "execution.dtype=bfloat16 or execution.data=host"
                ) from error
            execution = execution._replace(chunk_size=-(-chunk // 2))
            _log.warning("%d clients at a time do not fit into memory (%s): %d from now on", chunk, why, execution.chunk_size)
