"""The programs that run jobs, ours and the peers': their virtual environments, and their processes, one at a time."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

SCRIPTS = pathlib.Path(__file__).parent / "peers"
PEERS = {"pfl": "pfl==0.6.0", "flower": "flwr[simulation]==1.41.0", "pytorch": ""}
"""The peers, and what pip is asked for besides PyTorch."""
OURS = "fedjax_ssl"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PFL_PYTORCH_DEVICE": "cpu"}
"""Keeps a program from a GPU that there is."""
MARK = "FEDJAX_SSL_BENCHMARK"
"""The environment variable by which all that a program starts is found."""
LEAST_S = 5.0
"""No process is started for less than this."""
ON_A_GPU = [4, 5, 8]
"""Numbers of pfl's and Flower's processes that share a GPU; pfl's paper has up to 5. On an H200 one took 2.8 times as long as
four (`benchmarks/results/full_pfl_h200.json`), so that two, at best twice as fast as one, cannot be the best."""


class Rival(NamedTuple):
    """What runs a job: its name, its program (a key of PEERS, or OURS), and what its job has of its own."""

    name: str
    program: str
    own: dict[str, Any]


class Environments(NamedTuple):
    """How the peers are installed.

    Attributes:
        peers: folder of their virtual environments.
        torch: what pip is asked for as PyTorch, with its options.
        wheels: a folder of wheels that pip takes in place of the network; None: the network.
        system_torch: take the PyTorch of the Python that runs this.
    """

    peers: pathlib.Path
    torch: str = "torch"
    wheels: pathlib.Path | None = None
    system_torch: bool = False

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Options for a command line, whose values have the names here."""
        parser.add_argument("--peers", type=pathlib.Path, help="folder of the peers' virtual environments")
        parser.add_argument("--wheels", type=pathlib.Path, help="folder of wheels to install from, in place of the network")
        torch = parser.add_mutually_exclusive_group()
        torch.add_argument("--torch", default="torch", help="what pip installs as PyTorch, with its options")
        torch.add_argument("--system-torch", action="store_true", help="take the PyTorch of this Python")

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Environments:
        """Those that a command line asks for."""
        return cls(*(getattr(arguments, name) for name in cls._fields))

    def python(self, name: str) -> pathlib.Path:
        """A peer's interpreter."""
        return (self.peers / name / "bin" / "python").absolute()

    def install(self, name: str) -> str:
        """Makes a peer's environment where it is not there; what went wrong, in a line, or empty."""
        folder = self.peers / name
        if (folder / "installed").exists():
            return ""
        print(f"installing {name} into {folder}", flush=True)
        offline = ["--no-index", f"--find-links={self.wheels.absolute()}"] if self.wheels else []
        pip = [sys.executable, "-m", "pip", f"--python={self.python(name)}", "install", "--quiet", *offline]
        # Without a pip of its own, which not every Python can give it.
        commands = [[sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]]
        wanted = [*([] if self.system_torch else self.torch.split()), "numpy"]
        commands += [[*pip, *words] for words in (wanted, [PEERS[name]]) if all(words)]
        for number, command in enumerate(commands):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"not installed: {last_error(done.stderr) or f'exit status {done.returncode}'}"
            if number == 0 and self.system_torch and (error := _lend_torch(folder)):
                return f"not installed: {error}"
        (folder / "installed").touch()
        return ""


def _lend_torch(folder: pathlib.Path) -> str:
    """Shows a virtual environment the packages among which this Python has PyTorch, after its own; what went wrong, or empty.

    Not by --system-site-packages: where this Python is of a virtual environment itself, those would be its base's.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return f"{sys.executable} has no torch"
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    pathlib.Path(packages, "torch.pth").write_text(f"{pathlib.Path(found.origin).parents[1]}\n")
    return ""


def last_error(text: str) -> str:
    """The last line of a log that is an error's message, or else the last line; empty where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    messages = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|ERROR|error|Exception): \S", line)]
    return (messages or lines or [""])[-1]


def launch(
    rival: Rival, job: dict[str, Any], folder: pathlib.Path, environments: Environments, timeout: float
) -> dict[str, Any]:
    """Runs a job by a rival in processes of its own: its report, or `error`. What they print is in the folder's `log`.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was ended.
    """
    job = job | rival.own
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "report.json").unlink(missing_ok=True)
    environment = dict(os.environ) if job["device"] != "cpu" else {**os.environ, **ON_CPU}
    if rival.program == OURS:
        command = [sys.executable, "-m", "benchmarks.jobs", str(folder)]
    else:
        environment.pop("PYTHONPATH", None)  # it is for this Python
        command = [str(environments.python(rival.program))]
        if rival.program == "pfl" and job["processes"] > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={job['processes']}"]
        script = "run_pytorch_fl2" if job["kind"] == "fl2" else f"run_{rival.program}"
        command += [str(SCRIPTS / f"{script}.py"), str(folder)]
    status = run(command, folder / "log", timeout, environment)
    if status or not (folder / "report.json").exists():
        return {"error": last_error((folder / "log").read_text(errors="replace")) or f"exit status {status}"}
    return json.loads((folder / "report.json").read_text())


def run(
    command: list[str],
    log: pathlib.Path,
    timeout: float,
    environment: dict[str, str] | None = None,
    ask_first: float = 0.0,
) -> int:
    """Runs a command, with its output in a file, and ends all that it started when it ends: its exit status.

    Args:
        command: its words.
        log: the file.
        timeout: seconds after which it is ended.
        environment: its environment variables; None: those here.
        ask_first: seconds that it is given then to end by itself.

    Raises:
        subprocess.TimeoutExpired: it was ended, and had not ended by itself.
        OSError: it cannot be started.
    """
    mark = secrets.token_hex(16)
    environment = {**(os.environ if environment is None else environment), MARK: mark}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            if not ask_first:
                raise
            process.terminate()
            return process.wait(ask_first)
        finally:
            with contextlib.suppress(ProcessLookupError):  # none of them is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            while marked := list(_marked(mark)):  # those in sessions of their own, as torchrun's workers are
                for one in marked:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
                time.sleep(0.05)


def _marked(mark: str) -> Iterator[int]:
    """The processes whose environment has a mark, which they have from the one that started them."""
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if f"{MARK}={mark}".encode() in path.read_bytes():
                yield int(path.parent.name)


class Limits(NamedTuple):
    """How long programs may take.

    Attributes:
        timeout: seconds of each process.
        until: when all must have ended, by `time.monotonic`.
    """

    timeout: float
    until: float

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.until - time.monotonic()

    def share(self, parts: float) -> Limits:
        """The limits of the first of so many parts of what is left."""
        return self._replace(until=time.monotonic() + self.left / parts)

    def attempt(self, rival: Rival, job: dict[str, Any], folder: pathlib.Path, environments: Environments) -> dict[str, Any]:
        """As `launch`, within the limits: a report, `error`, or `left_out`, where there is no time left for it."""
        left = self.left
        if left < LEAST_S:
            return {"left_out": "left out, --budget is used up"}
        try:
            return launch(rival, job, folder, environments, min(self.timeout, left))
        except subprocess.TimeoutExpired:
            if left < self.timeout:
                return {"left_out": "left out, --budget was used up meanwhile"}
            return {"error": f"took longer than --timeout, {self.timeout:.0f} s"}
        except OSError as error:
            return {"error": str(error)}


def has_gpu() -> bool:
    """Whether JAX finds a GPU, asked in a process of its own: this one must leave its memory to the programs."""
    asked = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.split()[-1:] == ["gpu"]


def processes_of(device: str, threads: int) -> list[int]:
    """In how many processes pfl and Flower are run, where nothing else is said: of a CPU one, and one a thread."""
    return ON_A_GPU if device == "cuda" else sorted({1, threads})
