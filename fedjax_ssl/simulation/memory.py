"""How much memory there is, and what to say where it is short."""

import jax

from fedjax_ssl.host_memory import free_bytes

FREE_SHARE = 0.9  # the share of a CPU's free memory that a program may ask for, as it takes somewhat more than it asks for
ADVICE = (
    "lower client.batch_size, execution.chunk_size or execution.batch_size, or set execution.dtype=bfloat16, or, for one run, "
    "execution.data=host"
)


class OutOfMemoryError(RuntimeError):
    """A program needs more memory than there is."""


def is_short(error: BaseException) -> bool:
    """Whether an error, this module's or JAX's, says that memory is short."""
    return isinstance(error, OutOfMemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    )


def reason(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def explained(error: BaseException) -> str:
    """One line that says that memory is short, and what to do."""
    return f"no memory ({reason(error)}): {ADVICE}"


def check(needed: int, arguments: int, devices: int) -> None:
    """Raises OutOfMemoryError where a program needs more bytes than its device has; its `arguments` are in memory already."""
    device = jax.local_devices()[0]
    there = (device.memory_stats() or {}).get("bytes_limit", 0)
    if device.platform == "cpu" and (free := free_bytes()):
        there = int(FREE_SHARE * free) // devices + arguments  # devices share a CPU's memory
    if 0 < there < needed:
        raise OutOfMemoryError(f"a round needs {needed / 1e9:.3g} GB of a device, and may have {there / 1e9:.3g} GB of it")


def available(*, on_host: bool) -> int:
    """The bytes that arrays may have in the host's memory, or in that of all devices together; 0 if unknown."""
    devices = jax.devices()
    if on_host or devices[0].platform == "cpu":
        return int(FREE_SHARE * free_bytes()) * jax.process_count()
    return len(devices) * (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
