"""Processes of this machine that run together, with CPU devices of their own; as a program, rounds of methods.

python -m tests.hosts PROCESS PORT FILE METHOD-PLACE ...
"""

import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_ssl.runs import hosts
from fedjax_ssl.simulation import distributed
from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]
GLOO = re.compile(r"(\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d+|\s)*")


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(words: Sequence[Sequence[str]], devices: int | Sequence[int]) -> list[subprocess.Popen]:
    """A Python process for each list of words, with so many CPU devices each."""
    devices = [devices] * len(words) if isinstance(devices, int) else devices
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, "-m", *own], env=os.environ | {"JAX_NUM_CPU_DEVICES": str(number)}, **options)
        for own, number in zip(words, devices, strict=True)
    ]


def launched(
    count: int, *arguments: str, devices: int | Sequence[int] = 2, own: Sequence[Sequence[str]] = ()
) -> list[subprocess.Popen]:
    """`launch.run` in `count` processes; `own` are further arguments of each."""
    common = ["launch.run", *arguments]
    if count > 1:
        common += ["--distributed", f"--coordinator=127.0.0.1:{free_port()}", f"--num_processes={count}"]
    own = own or [[]] * count
    return started([[*common, *([f"--process_id={i}"] if count > 1 else []), *own[i]] for i in range(count)], devices)


def ended(processes: Sequence[subprocess.Popen], timeout: float = 300) -> list[Ended]:
    """How the processes end, and what they say of their own.

    Gloo, which adds up what CPU devices have, announces itself from several threads, whose words mix; who is 10 s ahead
    says so.
    """
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()

    def own(text: str) -> str:
        lines = [line for line in text.splitlines(True) if "waiting for the other processes" not in line]
        return "".join(line for line in lines if not GLOO.fullmatch(line))

    return [Ended(process.returncode, *map(own, both)) for process, both in zip(processes, outputs, strict=True)]


def rounds(case: Sequence[str], number: int = 2) -> list[tuple[dict, Any]]:
    """Of a method with the labels in a place: each round's metrics, evaluated, and the state after it, on all devices."""
    quick = {"client__epochs": 0, "client__steps": 2, "server__training__epochs": 0, "server__training__steps": 2}
    quick |= {"eval_metrics": "macro_f1"}
    one_by_one = {"execution__strategy": "sharded", "execution__devices": jax.device_count()}
    experiment = tiny.experiment(case[0], labels_at=case[1], **tiny.confident(case[0]) | quick | one_by_one)
    simulator, found = experiment.simulator, []
    state = simulator.initialize()
    for _ in range(number):
        state, row = simulator.round(state)
        (own,) = simulator.split(state)
        found.append((row | simulator.evaluate(state)[0], jax.device_get((own.server, own.clients))))
    return found


def main(process: int, port: int, file: str, *cases: str) -> None:
    hosts.connected({"coordinator_address": f"127.0.0.1:{port}", "num_processes": 2, "process_id": process})
    distributed.meet()
    tree = {"key": jax.random.key(process), "zeros": np.float32([0.0, -0.0]), "flag": np.bool_(process == 0)}
    found = {"first": jax.device_get(distributed.from_first(tree | {"key": jax.random.key_data(tree["key"])}))}
    found |= {case: rounds(case.split("-")) for case in cases}
    if process == 0:
        pathlib.Path(file).write_bytes(pickle.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
