"""Where a result is from, as every benchmark writes it beside its numbers."""

from __future__ import annotations

import itertools
import os
import pathlib
import platform
import shlex
import sys
import time
from importlib import metadata
from typing import Any

import jax
from fedjax_ssl.experiment.loop import git_commit
from fedjax_ssl.experiment.machine import processor

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
PLACES = {"--json": "FILE", "--config.data.path": "FILE"} | dict.fromkeys(
    ("--workdir", "--peers", "--wheels", "--data_dir", "--config.data.data_dir"), "DIR"
)
"""Options that name a file or a folder, and what stands in its place."""
BEGAN = time.monotonic()


def provenance(device: str = "") -> dict[str, Any]:
    """The command, the code's commit now, machine, device, versions, and seconds since the command began.

    In the command, names of folders and files are put as DIR and FILE, as they say nothing of the result.

    Args:
        device: what the work ran on, where that was in other processes: this one then takes no device. Empty: those here.
    """
    words = [f"benchmarks.{pathlib.Path(sys.argv[0]).stem}"]
    for before, word in itertools.pairwise(sys.argv):
        option, equals, _ = word.partition("=")
        words.append(PLACES.get(before) or (f"{option}={PLACES[option]}" if equals and option in PLACES else word))
    return {
        "command": f"python -m {shlex.join(words)}",
        "commit": git_commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "device": device or devices(jax.device_count()),
        "versions": versions(),
        "elapsed_s": round(time.monotonic() - BEGAN, 1),
    }


def devices(number: int) -> str:
    """So many of the devices here, in words, of an accelerator with what JAX was built for, such as a version of CUDA."""
    device = jax.devices()[0]
    built_for = "" if device.platform == "cpu" else f" ({' '.join(device.client.platform_version.split()[-2:])})"
    return f"{number} x {device.device_kind}{built_for}"


def versions() -> dict[str, str]:
    """Those of Python and of what computes, and how glibc was told to allocate in this process."""
    tunables = {"glibc_tunables": os.environ.get("GLIBC_TUNABLES", "")}
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}, **tunables}
