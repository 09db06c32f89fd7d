"""The programs of the comparison: how they are installed, run and ended. Nothing is fetched here."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks import programs
from benchmarks.programs import Environments, Limits, Rival

PFL = Rival("pfl, 2 processes", "pfl", {"processes": 2})
JOB = {"kind": "cnn", "device": "cpu", "processes": 1}


def interpreter(folder, script):
    """A stand-in for a peer's Python, which is given the job's folder last."""
    python = folder / "pfl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nfor folder; do :; done\n{script}\n")
    python.chmod(0o755)
    return Environments(folder)


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_is_run_by_its_own_interpreter_away_from_the_gpu(tmp_path, monkeypatch, fails):
    ends = 'echo "ValueError: what is wrong" >&2; echo "===" >&2; exit 1' if fails else ""
    report = '{\\"seconds\\": [1.5], \\"words\\": \\"$*\\", \\"jax\\": \\"$JAX_PLATFORMS\\", \\"path\\": \\"$PYTHONPATH\\"}'
    environments = interpreter(tmp_path, f'echo "{report}" > $folder/report.json\n{ends}')
    monkeypatch.setenv("PYTHONPATH", "/of/this/python")
    report = programs.launch(PFL, JOB, tmp_path / "job", environments, 60)
    if fails:
        assert report == {"error": "ValueError: what is wrong"}
        return
    assert json.loads((tmp_path / "job" / "job.json").read_text()) == JOB | {"processes": 2}
    assert (report["seconds"], report["jax"], report["path"]) == ([1.5], "cpu", "")
    assert report["words"].startswith("-m torch.distributed.run --standalone --nproc_per_node=2 ")
    assert report["words"].endswith(f"run_pfl.py {tmp_path / 'job'}")


@pytest.mark.parametrize("child", ["sleep 60", "setsid sleep 60"])  # in its session, or in one of its own
@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("wait", {"error": "took longer than --timeout, 0 s"}),
        ("echo '{}' > $folder/report.json", {}),  # it ends well, and leaves its child
    ],
)
def test_what_ends_or_runs_out_of_time_is_ended_with_all_that_it_started(tmp_path, child, then, said):
    environments = interpreter(tmp_path, f"{child} & echo $! > $folder/child; sleep .2; {then}")
    limits = Limits(timeout=0.5, until=time.monotonic() + 60)
    report = limits.attempt(PFL, JOB, tmp_path / "job", environments)
    assert report == said
    child = (tmp_path / "job" / "child").read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True, check=False).stdout.strip()
    assert state == "" or state.startswith("Z")


def test_a_program_that_is_asked_to_end_may_save_first(tmp_path):
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('on', flush=True); time.sleep(60)"
    log = tmp_path / "log"
    assert programs.run([sys.executable, "-c", script], log, 2.0, ask_first=30) == 143
    assert log.read_text() == "on\n"


def test_a_budget_is_shared_and_nothing_is_started_after_it(tmp_path):
    limits = Limits(timeout=100, until=time.monotonic() + 60)
    assert limits.share(3).left == pytest.approx(20, abs=1)
    assert limits._replace(until=time.monotonic() + 1).attempt(PFL, JOB, tmp_path / "job", Environments(tmp_path)) == {
        "left_out": "left out, --budget is used up"
    }
    assert not (tmp_path / "job").exists()


@pytest.fixture
def commands(monkeypatch):
    """The commands that installing runs, in place of running those of pip."""
    run, words = subprocess.run, []

    def stand_in(command, **options):
        words.append(command)
        return run(command, **options) if "venv" in command else subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(programs.subprocess, "run", stand_in)
    return words


def test_a_peer_is_installed_once(tmp_path, commands):
    environments = Environments(tmp_path, torch="torch --index-url=URL")
    assert environments.install("pfl") == ""
    _, torch, package = commands
    assert torch[-3:] == ["torch", "--index-url=URL", "numpy"]
    assert package[-1] == "pfl==0.6.0"
    assert not any(word.startswith(("--no-index", "--find-links")) for word in (*torch, *package))
    assert environments.install("pfl") == ""
    assert len(commands) == 3


def test_without_a_network_wheels_and_this_pythons_torch_are_taken(tmp_path, commands, monkeypatch):
    here = tmp_path / "here"
    (here / "torch").mkdir(parents=True)
    (here / "torch" / "__init__.py").write_text("at = 'here'")
    monkeypatch.syspath_prepend(here)
    environments = Environments(tmp_path / "peers", wheels=tmp_path / "wheels", system_torch=True)
    assert environments.install("pytorch") == ""
    _, pip = commands
    assert pip[-3:] == ["--no-index", f"--find-links={tmp_path / 'wheels'}", "numpy"]
    asked = [environments.python("pytorch"), "-c", "import torch; print(torch.at)"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == "here\n"


def test_what_cannot_be_installed_says_why_and_is_tried_again(tmp_path, monkeypatch):
    environments = Environments(tmp_path, wheels=tmp_path)  # a folder without wheels, and no network is asked
    error = environments.install("pfl")
    assert error.startswith("not installed: ERROR: No matching distribution found for ")
    assert not (tmp_path / "pfl" / "installed").exists()
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda name: None)
    assert environments._replace(system_torch=True).install("pfl") == f"not installed: {sys.executable} has no torch"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("Traceback\nValueError: what is wrong\n====\n", "ValueError: what is wrong"),
        ("[rank0]: a.b.OwnError: why\na.ChildFailedError:\n  see https://x/errors.html\n", "[rank0]: a.b.OwnError: why"),
        ("ERROR: No wheel\n[notice] a new pip\n", "ERROR: No wheel"),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)
def test_an_error_is_found_in_a_log(log, expected):
    assert programs.last_error(log) == expected


def test_processes_share_the_threads():
    assert programs.processes_of("cpu", 2) == [1, 2]
    assert programs.processes_of("cpu", 1) == [1]
    assert programs.processes_of("cuda", 16) == [4, 5, 8]
