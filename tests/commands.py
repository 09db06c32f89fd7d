"""The commands within the tests' own process, so that nothing is imported anew."""

import contextlib
import io
import logging
import os
import pathlib
import subprocess
import sys
import time
from types import ModuleType
from unittest import mock

from fedjax_ssl.runs.log import MetricsLog
from launch import devices
from launch import evaluate as evaluate_command
from launch import run as run_command

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = """
from configs import common
from tests import average

def get_config(argument=None):
    average.register()
    config = common.base("average", "linear")
    config.update_from_flattened_dict({
        "data.name": "synthetic", "data.num_clients": 6, "data.num_labels": 20, "data.weak": "none",
        "data.strong": "none", "client.epochs": 1, "server.training.epochs": 1, "rounds": 6, "cohort_size": 3, "eval_every": 2,
        "checkpoint_every": 2,
    })
    return config
"""
FIXMATCH = CONFIG.replace('"average"', '"fixmatch"').replace('"rounds"', '"method.confidence": 0.3, "rounds"')


def launch(*arguments: str, cwd: pathlib.Path = ROOT, program: ModuleType = run_command) -> subprocess.CompletedProcess:
    """What `python -m PROGRAM ARGUMENTS` does and prints; JAX's devices and its cache are those of the tests."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2)]
    logger, root = logging.getLogger("fedjax_ssl"), logging.getLogger()
    level, handlers = logger.level, root.handlers
    root.handlers = []
    try:
        with (
            mock.patch.multiple(devices, use_all_cores=lambda: None),
            mock.patch.multiple(run_command, keep_programs=lambda: None),
            mock.patch.multiple(evaluate_command, keep_programs=lambda: None),
            contextlib.redirect_stdout(streams[0]),
            contextlib.redirect_stderr(streams[1]),
            contextlib.chdir(cwd),
        ):
            status = program.main([program.__name__, *arguments])
    finally:
        root.handlers = handlers
        logger.setLevel(level)
    return subprocess.CompletedProcess(arguments, status, *(stream.buffer.getvalue().decode() for stream in streams))


def succeeded(*arguments: str, **where) -> subprocess.CompletedProcess:
    """The same of a command that has to end with status 0."""
    done = launch(*arguments, **where)
    assert done.returncode == 0, done.stderr
    return done


def refused(*arguments: str, **where) -> str:
    """The one line on standard error of a command that ends with status 2."""
    done = launch(*arguments, **where)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


def launch_process(*arguments: str) -> subprocess.Popen:
    """The same command as a process of its own, with its standard error as a pipe."""
    words = [sys.executable, "-m", "launch.run", *arguments]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def content(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_times(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}


def rows(workdir: pathlib.Path) -> list[dict]:
    """The log without its times."""
    return [without_times(row) for row in MetricsLog(workdir).rows()]


def wait_for_rounds(workdir, number, jobs):
    """Returns once a log has so many rounds; an error where a process that writes it ends before."""
    log, deadline = workdir / "metrics.jsonl", time.monotonic() + 300
    while not log.exists() or log.read_bytes().count(b"\n") < number:
        assert all(job.poll() is None for job in jobs), [job.communicate() for job in jobs]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run_at_start(monkeypatch, folder: pathlib.Path, text: str) -> None:
    """Python processes that are started from now on run this text first."""
    (folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
