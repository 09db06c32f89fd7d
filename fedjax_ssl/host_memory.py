"""How much memory the host has free."""

import pathlib
import re

MEMINFO, CGROUP = pathlib.Path("/proc/meminfo"), pathlib.Path("/sys/fs/cgroup")
"""Where Linux shows the machine's free memory, and a container's limits."""


def free_bytes() -> int:
    """Free memory of the machine, or of its container where that is less; 0 if unknown."""
    try:
        free = [1024 * int(re.findall(r"MemAvailable:\s+(\d+)", MEMINFO.read_text())[0])]
    except (OSError, IndexError):  # no Linux
        return 0
    for limit, usage in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            free.append(int((CGROUP / limit).read_text()) - int((CGROUP / usage).read_text()))
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return max(min(free), 1)
