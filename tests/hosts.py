"""Processes of this machine that run together, with CPU devices of their own; as a program, rounds of methods.

python -m tests.hosts PROCESS PROCESSES PORT FILE METHOD-PLACE ...
"""

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(words: Sequence[Sequence[str]], devices: int) -> list[subprocess.Popen]:
    """A Python process for each list of words, with so many CPU devices each."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([sys.executable, "-m", *of_process], **options) for of_process in words]


def launched(count: int, *arguments: str, devices: int = 2, own: Sequence[Sequence[str]] = ()) -> list[subprocess.Popen]:
    """`launch.run` in `count` processes; `own` are further arguments of each."""
    common = ["launch.run", *arguments]
    if count > 1:
        common += ["--distributed", f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}"]
    own = own or [[]] * count
    return started([[*common, *([f"--process_id={i}"] if count > 1 else []), *own[i]] for i in range(count)], devices)


def ended(processes: Sequence[subprocess.Popen], timeout: float = 120) -> list[Ended]:
    """How the processes end; Gloo, which adds up what CPU devices have, announces itself on standard output."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    streams = [["".join(line for line in text.splitlines(True) if "[Gloo]" not in line) for text in both] for both in outputs]
    return [Ended(process.returncode, *both) for process, both in zip(processes, streams, strict=True)]
