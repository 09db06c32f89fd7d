"""Where a result is from, as every benchmark writes it beside its numbers."""

from __future__ import annotations

import itertools
import os
import pathlib
import platform
import shlex
import sys
from importlib import metadata
from typing import Any

import jax

from fedjax_ssl.experiment.loop import git_commit
from fedjax_ssl.experiment.machine import processor

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
PLACES = ("--workdir", "--json", "--peers", "--wheels", "--data_dir", "--config.data.data_dir", "--config.data.path")


def provenance(device: str = "") -> dict[str, Any]:
    """The command, the code's commit now, machine, device and versions.

    Of the command, arguments that name a folder or a file are left out, as they say nothing of the result.

    Args:
        device: what the work ran on, where that was in other processes: this one then takes no device. Empty: those here.
    """
    words = [f"benchmarks.{pathlib.Path(sys.argv[0]).stem}"]
    for before, word in itertools.pairwise(sys.argv):
        if before not in PLACES and word.partition("=")[0] not in PLACES:
            words.append(word)
    return {
        "command": f"python -m {shlex.join(words)}",
        "commit": git_commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "device": device or devices(jax.device_count()),
        "versions": versions(),
    }


def devices(number: int) -> str:
    """So many of the devices here, in words."""
    return f"{number} x {jax.devices()[0].device_kind}"


def versions() -> dict[str, str]:
    """Those of Python and of what computes."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
