"""A run in several processes, on one host or on many: how they find each other, and how one that ends takes the others along."""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from absl import flags

from . import command

DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Run as one of several processes, which share the clients of a round.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where no launcher tells.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are, where no launcher tells.", 1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0 on, where no launcher tells.", 0)
LAUNCHERS = "Slurm, Open MPI, Kubernetes and Cloud TPU"
BEAT, DEAD_AFTER, BACKSTOP = 5.0, 30.0, 50
"""Seconds: between a process's signs of life; without one until it counts as dead; the same for JAX, which then aborts all."""
TOGETHER, LONG = 5_000, 30 * 24 * 3_600_000
"""Milliseconds for which a process that fails, or is done, waits for others that end as well."""
Result = TypeVar("Result")


def check_flags() -> None:
    """Raises ValueError where the flags do not go together."""
    given = {flag.name: flag.value for flag in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)}
    named = [f"--{name}" for name, value in given.items() if value is not None]
    if named and not DISTRIBUTED.value:
        raise ValueError(f"{named[0]}: got {given[named[0][2:]]} without --distributed, accepted: with it")
    if lacking := [f"--{name}" for name, value in given.items() if value is None and named]:
        raise ValueError(f"{lacking[0]}: missing, accepted: {', '.join(f'--{name}' for name in given)}, or none with {LAUNCHERS}")
    if named and not re.fullmatch(r"[^:/\s]+:\d+|\[[0-9a-fA-F:]+\]:\d+", COORDINATOR.value):
        raise ValueError(f"--coordinator: got {COORDINATOR.value}, accepted: HOST:PORT of process 0")
    if named and PROCESS_ID.value >= NUM_PROCESSES.value:
        raise ValueError(f"--process_id: got {PROCESS_ID.value} of {NUM_PROCESSES.value}, accepted: 0 to {NUM_PROCESSES.value - 1}")
