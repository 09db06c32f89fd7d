"""The machine that a program runs on, the version of the program, and where it keeps what it has found out."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform


def processor() -> str:
    """The processor's name and generation, on which the last bits depend; its architecture where the system does not tell."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    first = dict(reversed([[word.strip() for word in line.split(":", 1)] for line in lines if ":" in line]))
    if "model name" not in first:
        return platform.machine()
    return f"{first['model name']} (family {first.get('cpu family')}, model {first.get('model')})"


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def sources() -> str:
    """A digest of this package's modules, another one in each version."""
    package = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def cache_folder() -> pathlib.Path | None:
    """Where what has been found out about a machine is kept: `~/.cache/fedjax_ssl`, made where it is missing.

    None where it cannot be: without a home, or where it cannot be written to. XDG_CACHE_HOME goes first.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(caches, "fedjax_ssl")
    if not folder.is_absolute():  # a user without a home: "~" stays as it is
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
