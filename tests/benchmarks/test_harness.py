"""What all benchmarks share: statistics, turns, processes and result files."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import harness


def test_statistics_are_medians_and_quartiles():
    assert harness.spread([4.0, 1.0, 3.0, 2.0]) == {"seconds": 2.5, "quartiles": [1.75, 3.25], "repeats": 4}
    assert harness.spread([2.0, 3.0, 5.0], "ratio", "ends") == {"ratio": 3.0, "ends": [2.5, 4.0], "repeats": 3}


class Turns:
    def __init__(self, seconds, log):
        self.seconds, self.log = seconds, log

    def ask(self, request, number):
        self.log.append(self.seconds)
        return [{"seconds": self.seconds}] * number


@pytest.mark.parametrize(("seconds", "least", "turns"), [(0.0, 3, 4), (9.0, 3, 10), (0.0, 5, 6)])
def test_turns_end_with_whole_sets_after_so_many_and_so_long(seconds, least, turns):
    log = []
    found = harness.in_turns([Turns(1.0, log), Turns(2.0, log)], "rounds", seconds, least)
    assert [[row["seconds"] for row in rows] for rows in found] == [[1.0] * turns, [2.0] * turns]
    assert log == [1.0, 2.0, 2.0, 1.0] * (turns // 2)


def test_a_file_has_each_case_once_with_the_command_that_it_is_from(tmp_path):
    path = tmp_path / "results.json"
    harness.save(path, {"command": "one"}, [{"case": {"n": 1}, "seconds": 1.0}, {"case": {"n": 2}, "seconds": 2.0}])
    harness.save(path, {"command": "two"}, [{"case": {"n": 2}, "seconds": 3.0}])
    found = [(run["command"], [(one["case"]["n"], one["seconds"]) for one in run["results"]]) for run in harness.load(path)]
    assert found == [("one", [(1, 1.0)]), ("two", [(2, 3.0)])]
    harness.save(path, {"command": "three"}, [{"case": {"n": 1}, "seconds": 4.0}])
    assert [run["command"] for run in harness.load(path)] == ["two", "three"]
    assert len(path.read_text().splitlines()) == 8  # a result a line


@pytest.mark.parametrize("words", [["--peers=/tmp/a b", "--json=/b"], ["--peers", "/tmp/a b", "--json", "/b"]])
def test_a_result_says_where_it_is_from_without_names_of_folders(monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["/a/benchmarks/compare.py", *words, "--name", "a b"])
    got = harness.provenance("2 x cpu", "1 round", seeds=3)
    expected = "python -m benchmarks.compare --peers DIR --json FILE --name 'a b'"
    assert got["command"].replace("=", " ") == expected
    assert (got["device"], got["warm_up"], got["seeds"]) == ("2 x cpu", "1 round", 3)
    assert got["versions"].keys() >= {"python", "jax", "numpy"}
    assert got["commit"] is None or len(got["commit"].rstrip("+")) == 40
    assert harness.git_commit(pathlib.Path("/")) is None


def test_results_are_written_as_they_come_and_an_error_is_the_exit_status(tmp_path, capsys):
    def found():
        yield {"case": {"n": 1}, "device": "3 x tpu"}
        assert harness.load(path)[0]["device"] == "3 x tpu"
        yield {"case": {"n": 2}, "error": "no room"}

    path = tmp_path / "results.json"
    with pytest.raises(SystemExit, match="1"):
        harness.collect(path, found(), lambda result: [["case", str(result["case"]["n"])]], "1 round", base=5)
    assert capsys.readouterr().out.splitlines() == ["case | 1", "case | 2"]
    (run,) = harness.load(path)
    assert (run["base"], [one.get("error") for one in run["results"]]) == (5, [None, "no room"])


@pytest.mark.ci
def test_a_command_that_runs_too_long_is_ended_with_what_it_started(tmp_path):
    command = ["sh", "-c", 'sleep 600 & echo $! > "$0"; sleep 600', str(tmp_path / "pid")]  # which has begun within 3 s
    assert harness.run_alone(command, tmp_path / "log", 3.0, dict(os.environ)) == "took longer than 3 s"
    state = pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    until = time.monotonic() + 60  # the system may take a moment to end it
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.05)
    failing = [sys.executable, "-c", "raise OSError('no such place')"]
    assert harness.run_alone(failing, tmp_path / "log", 60.0, dict(os.environ)) == "OSError: no such place"
    assert harness.run_alone([sys.executable, "-c", ""], tmp_path / "log", 60.0, dict(os.environ)) == ""


def test_a_benchmark_that_is_ended_ends_what_it_started(tmp_path):
    program = f"""
import os, pathlib
from benchmarks import harness
command = ["sh", "-c", 'echo $$ > "$0"; exec sleep 600', {str(tmp_path / "pid")!r}]
ends = (harness.run_alone(command, pathlib.Path({str(tmp_path / "log")!r}), 600.0, dict(os.environ)) for _ in range(1))
harness.collect(None, ends, lambda result: [], "")
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=harness.ROOT)
    until = time.monotonic() + 120
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert time.monotonic() < until, "it does not begin"
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.ci
def test_a_worker_answers_with_what_was_found_or_with_an_errors_line():
    with harness.Worker(environment={"JAX_PLATFORMS": "cpu"}, devices=3) as worker:
        assert worker.ask("device") == "3 x cpu"
        with pytest.raises(harness.WorkerError, match=r"^ValueError: method\.name: got 'fl3'"):
            worker.ask("build", config={"method": {"name": "fl3"}})
        most = worker.ask("ceilings", precisions=["float32 default"])
        assert most["flops"].keys() == {"float32 default"}
        assert min(most["bandwidth"], *most["flops"].values()) > 1e8
        worker._process.kill()
        with pytest.raises(harness.WorkerError, match=r"ended with status -9"):
            worker.ask("device")


def test_a_result_file_is_json():
    for path in harness.RESULTS.glob("*.json"):
        for run in json.loads(path.read_text())["runs"]:
            assert run.keys() >= {"command", "commit", "warm_up", "results"}, path
            assert len({json.dumps(one["case"]) for one in run["results"]}) == len(run["results"]), path
            assert all(np.isfinite(one.get("seconds", 0.0)) for one in run["results"]), path
