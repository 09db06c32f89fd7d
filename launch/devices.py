"""What JAX is told before a command computes: devices, and the place in a job of several."""

import argparse
import os
import re
from typing import Any

MAY_WAIT = ("xla_cpu_collective_call_warn_stuck_timeout_seconds", "xla_cpu_collective_call_terminate_timeout_seconds")
"""XLA's flags for how long a CPU device waits for the others before it says so, and before it ends the process."""
MAY_WAIT_BELOW = (0, 13)
"""The first JAX on which they were not tried, and are not set: XLA ends a process for a flag that it does not know."""


def use_all_cores() -> None:
    """Makes a JAX device of each CPU core, unless XLA_FLAGS or JAX_NUM_CPU_DEVICES says how many; before JAX is used."""
    import jax

    from fedjax_ssl.runs.provenance import cores

    flags = os.environ.get("XLA_FLAGS", "")
    # Devices add up what their clients return. One that waits there for longer than a minute, as clients have more or less to
    # train, would end the process: XLA takes it to be stuck.
    waiting = [f for f in MAY_WAIT if f not in flags] if jax.__version_info__ < MAY_WAIT_BELOW else []
    os.environ["XLA_FLAGS"] = " ".join([flags, *(f"--{flag}={24 * 3600}" for flag in waiting)]).strip()

    if "JAX_NUM_CPU_DEVICES" not in os.environ and "xla_force_host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", cores())


def check_flags() -> None:
    """Raises ValueError for a number of devices that cannot be; XLA itself names a flag that it does not know."""
    flags = os.environ.get("XLA_FLAGS", "")
    counts = [
        ("XLA_FLAGS", found[0], found[1]) for found in re.finditer(r"--xla_force_host_platform_device_count=(\S*)", flags)
    ]
    if (text := os.environ.get(name := "JAX_NUM_CPU_DEVICES")) is not None:
        counts.append((name, text, text))
    for name, got, number in counts:
        if not re.fullmatch("0*[1-9][0-9]*", number):
            raise ValueError(f"{name}: got {got}, accepted: a whole number of devices >= 1")


def find_devices() -> None:
    """Raises ValueError where JAX finds none of the devices that it is told to use."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where the platform's plugin is not installed
        found = f" ({first})" if (first := str(error).partition("\n")[0]) else ""
        asked = jax.config.jax_platforms or "any"
        raise ValueError(f"JAX_PLATFORMS: got {asked}, of which JAX finds no device{found}, accepted: cpu, or unset") from None


def place(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the arguments say of this process's place among several; None: nothing. ValueError where they do not go together."""
    given = {f"--{name}": getattr(options, name) for name in ("coordinator", "num_processes", "process_id")}
    address, count, number = given.values()
    for name, value in given.items():
        if value is not None and not options.distributed:
            raise ValueError(f"{name}: got {value} without --distributed, accepted: with it")
        if value is None and any(other is not None for other in given.values()):
            raise ValueError(f"{name}: missing, accepted: all of {', '.join(given)}, or none of them")
    if address is None or count is None or number is None:
        return None
    if not re.fullmatch(r"([^:/\s]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}", address) or not 0 < int(address.rpartition(":")[2]) < 2**16:
        raise ValueError(f"--coordinator: got {address}, accepted: HOST:PORT of process 0")
    if number >= count:
        raise ValueError(f"--process_id: got {number} with --num_processes={count}, accepted: 0 to {count - 1}")
    return {"coordinator_address": address, "num_processes": count, "process_id": number}
