"""The queue of `launch.sweep`: signals, one owner, what goes wrong with one cell, GPUs, and programs that go on."""

import contextvars
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from fedjax_ssl.data import download
from fedjax_ssl.experiment import plan
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import write_json
from fedjax_ssl.options import parse
from fedjax_ssl.runs import reading, sweep_queue
from fedjax_ssl.runs.lock import owned
from fedjax_ssl.runs.log import MetricsLog
from fedjax_ssl.runs.provenance import dataset_digest
from fedjax_ssl.runs.sweep import Cell, Table
from fedjax_ssl.runs.sweep_queue import Queue
from launch import sweep
from tests import tiny
from tests.commands import launch, refused, rows

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("usual_signals")]
DIGITS = ("--config=digits:supervised", "--workdir=out")


@pytest.fixture
def starting(monkeypatch):
    """Takes what is called, with the true one first, in the place of `subprocess.Popen` where the queue starts a program."""

    popen = subprocess.Popen

    def replace(starts):
        def called(line, **given):
            return starts(popen, line, **given) if "launch.run" in line else popen(line, **given)

        monkeypatch.setattr(subprocess, "Popen", called)

    return replace


def failing(popen, line, **given):
    return popen(["sh", "-c", "echo it failed; exit 1"], **given)


def test_a_signal_ends_a_program_that_just_starts_and_no_seed_follows(tmp_path, starting):
    started = []

    def starts(popen, line, **given):
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # the queue stops meanwhile
        started.append(popen(["sleep", "20"] if started else ["sh", "-c", "exit 2"], **given))
        return started[-1]

    starting(starts)
    done = launch(*DIGITS, "--seeds=3", cwd=tmp_path, program=sweep)
    assert (done.returncode, done.stderr) == (130, "stopped; the same command goes on\n")
    assert [process.returncode for process in started] == [2, -signal.SIGTERM]  # several seeds were refused, then seed 0


def test_seeds_that_are_refused_together_run_alone_each_of_them_and_a_killed_one_is_no_progress_line(tmp_path, starting):
    started = []

    def starts(popen, line, **given):
        started.append(line[-1])
        killed = line[-1].endswith("2")
        return popen(["sh", "-c", "echo round 1/4; kill -9 $$" if killed else "echo refused; exit 2"], **given)

    starting(starts)
    done = launch(*DIGITS, "--seeds=3", cwd=tmp_path, program=sweep)
    assert started == ["--workdir=out/run", *(f"--workdir=out/run/{seed}" for seed in range(3))]
    assert "failed: run: refused (out/run.log)" in done.stderr
    starting(lambda popen, line, **given: popen(["sh", "-c", "echo round 1/4; kill -9 $$"], **given))
    done = launch(*DIGITS, cwd=tmp_path, program=sweep)
    assert "failed: run: ended by SIGKILL, as where memory is short (out/run.log)" in done.stderr


def test_of_two_equal_sweeps_at_once_the_second_is_refused_and_touches_nothing(tmp_path, starting):
    starting(failing)
    launch(*DIGITS, cwd=tmp_path, program=sweep)
    out = tmp_path / "out"
    with owned([out]):
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
        line = contextvars.Context().run(refused, *DIGITS, cwd=tmp_path, program=sweep)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    assert f"--workdir: out is being written to by process {os.getpid()} on " in line


def test_a_run_that_outlived_its_killed_sweep_keeps_its_folder(tmp_path):
    (cell,) = parse(Table, {"config": "digits:supervised"}).cells()
    run = tmp_path / "out" / "shared@run" / "0-name=0.1"
    run.mkdir(parents=True)
    write_json(run / "config.json", sweep.settings_of(cell, {}).to_dict())
    with owned([run]):
        line = contextvars.Context().run(refused, *DIGITS, cwd=tmp_path, program=sweep)
    assert "shared@run/0-name=0.1 is being written to by process" in line
    assert run.exists()


def test_an_error_of_the_system_is_the_failure_of_its_cells_alone(tmp_path, starting, monkeypatch):
    def read(path, name):
        if path.parent.name == "epochs=3":
            raise OSError(5, "Input/output error", str(path))
        return true_read(path, name)

    true_read = reading.read
    monkeypatch.setattr(reading, "read", read)
    starting(lambda popen, line, **given: popen(["true"], **given))
    (tmp_path / "out" / "epochs=1.log").mkdir(parents=True)
    done = launch(*DIGITS, "--set=client.epochs=1,2,3", cwd=tmp_path, program=sweep)
    assert done.returncode == 1
    assert done.stderr.splitlines()[3:-1] == [
        "failed: epochs=1: [Errno 21] Is a directory: 'out/epochs=1.log'",
        "failed: epochs=2: no result",
        "failed: epochs=3: seed 0: [Errno 5] Input/output error: 'out/epochs=3/0'",
    ]


def test_a_folder_keeps_its_sweep(tmp_path, starting):
    starting(failing)
    assert launch(*DIGITS, "--set=client.epochs=1", cwd=tmp_path, program=sweep).returncode == 1
    first = (tmp_path / "out" / "sweep.json").read_text()
    line = refused(*DIGITS, "--set=server.training.epochs=1", cwd=tmp_path, program=sweep)
    assert "--workdir: got out, which has another sweep, with 'epochs=1', accepted: another --workdir" in line
    assert (tmp_path / "out" / "sweep.json").read_text() == first
    assert launch(*DIGITS, "--set=client.epochs=1,2", cwd=tmp_path, program=sweep).returncode == 1  # it has grown


@pytest.mark.parametrize(("platforms", "expected"), [("", {"3", "5"}), ("cpu", {"3,5"})])
def test_programs_are_dealt_to_the_gpus_that_are_visible(tmp_path, starting, monkeypatch, platforms, expected):
    seen = []

    def starts(popen, line, env, **given):
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        return failing(popen, line, env=env, **given)

    starting(starts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    launch(*DIGITS, "--set=client.epochs=1,2,3", cwd=tmp_path, program=sweep)
    assert (len(seen), set(seen)) == (3, expected)  # which of two has the third is a matter of time


@pytest.mark.parametrize(
    ("free", "plugins", "platforms", "expected"),
    [
        (10**11, (), "", 3), (5 * 10**9, (), "", 2), (0, (), "", 1),
        (10**11, ("libtpu",), "", 1), (10**11, ("jax_plugins",), "", 1), (10**11, ("libtpu",), "cpu", 3),
    ],
)  # fmt: skip
def test_without_a_gpu_each_core_that_has_memory_runs_a_program(monkeypatch, free, plugins, platforms, expected):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(sweep_queue, "free_bytes", lambda: free)
    monkeypatch.setattr(sweep_queue, "cores", lambda: 3)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in plugins else None)
    assert sweep_queue._cpu_jobs() == expected


def test_rows_and_columns_that_are_named_run_alone(tmp_path, starting):
    seen = []
    starting(lambda popen, line, **given: [seen.append(line[3:5]), failing(popen, line, **given)][1])
    words = ("--config=digits:{method}", "--methods=fl2,uda", "--set=client.epochs=1,2,3", "--workdir=out")
    done = launch(*words, "--rows", "uda", "--columns", "epochs=3", "epochs=1", cwd=tmp_path, program=sweep)
    # Two may start at once.
    assert sorted(seen) == [["--config=digits:uda", f"--config.client.epochs={epochs}"] for epochs in (1, 3)]
    assert [line.split()[0] for line in done.stdout.splitlines()[-1:]] == ["uda"]


@pytest.mark.slow
def test_a_program_of_several_values_goes_on_where_it_was_after_one_diverged(tmp_path, starting):
    words = ["--config=digits:fedavg,labels_at=clients", "--set=client.optimizer.learning_rate=.1,.2,1e30", "--config.rounds=6"]
    words += ["--config.model.name=linear", "--config.client.epochs=1", "--workdir=out"]
    out, kept = tmp_path / "out", [tmp_path / "out" / f"learning_rate={rate}" / "0" for rate in (".1", ".2")]
    before, until = [[], []], []
    starting(lambda popen, line, **given: popen([*line, f"--stop_after={until[-1]}"], **given))
    for stop, at_once, logs in ((2, 1, ["shared@learning_rate=.1"]), (4, 1, ["shared@learning_rate=.1"]), (6, 2, [])):
        until.append(stop)
        done = launch(*words, f"--jobs={at_once}", cwd=tmp_path, program=sweep)
        assert "diverged: learning_rate=1e30: seed 0: round 2: " in done.stderr
        assert not list(out.glob("shared*/"))
        for folder, rows_before in zip(kept, before, strict=True):
            now = rows(folder)
            assert (now[: len(rows_before)], len(now)) == (rows_before, stop)
            log = (out / f"{(logs or [folder.parent.name])[0]}.log").read_text()
            assert stop == 2 or f"going on after round {stop - 2}" in log
        before = [rows(folder) for folder in kept]
        if stop == 2:  # as a kill leaves a run
            (out / "shared@learning_rate=.2").mkdir()
            kept[1].rename(out / "shared@learning_rate=.2" / "0-learning_rate=0.2")
    assert "failed" not in done.stderr


@pytest.mark.slow
def test_a_small_sweep_that_is_known_by_name_runs(tmp_path):
    words = ("fl2_ag_news", "--small", "--rows", "SemiFL", "--config.rounds=1")
    done = launch(*words, cwd=tmp_path, program=sweep)
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:]] == ["", "SemiFL"]
    assert sorted(path.parent.name for path in (tmp_path / "runs" / "fl2_ag_news-small").glob("*/0")) == [
        "SemiFL-Dir-.3",
        "SemiFL-IID",
    ]


@pytest.mark.parametrize(("trace", "has_ended"), [("there/phones.csv", True), ("here/servers.csv", False)])
def test_a_cell_has_the_runs_of_its_trace_wherever_that_lies(tmp_path, trace, has_ended):
    asked, there = (Settings.from_dict(tiny.config("fl2", rounds=1, system__trace=path)) for path in ("here/phones.csv", trace))
    cell = Cell("row", "", "digits:fl2", {}, settings=asked)
    run = tmp_path / cell.name / "0"
    run.mkdir(parents=True)
    write_json(run / "config.json", there.to_dict())
    MetricsLog(run).append({"round": 1, "eval/accuracy": 0.5})
    write_json(run / "summary.json", {"rounds": 1, "eval/accuracy": 0.5})
    assert Queue([cell], 1, tmp_path, (), 1).done(cell).has_ended is has_ended


def test_a_cell_whose_own_data_have_changed_is_not_done(tmp_path):
    labels = np.arange(20) % 2
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images[:4], y_test=labels[:4])
    config = tiny.config("fl2", rounds=1, data__name="npz", data__path=str(tmp_path / "own.npz"))
    cell = Cell("row", "", "digits:fl2", {}, settings=Settings.from_dict(config))
    found = plan.load_dataset(cell.settings)
    run = tmp_path / cell.name / "0"
    run.mkdir(parents=True)
    write_json(run / "config.json", config)
    write_json(run / "run.json", {"dataset": dataset_digest(found, (8, 8, 1))})
    MetricsLog(run).append({"round": 1, "eval/accuracy": 0.5})
    write_json(run / "summary.json", {"rounds": 1, "eval/accuracy": 0.5})
    assert Queue([cell], 1, tmp_path, (), 1).done(cell).has_ended
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images[:4], y_test=1 - labels[:4])
    assert not Queue([cell], 1, tmp_path, (), 1).done(cell).has_ended


@pytest.mark.ci
def test_data_that_are_missing_are_fetched_once_and_where_that_cannot_be_nothing_runs(tmp_path, starting, monkeypatch):
    for name, value in {download.MIRROR: "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}.items():  # nobody listens
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(download, "WAITS", ())
    starting(failing)
    words = ["--config=fl2_cifar10:paper,method={method}", "--methods=fl2,uda", "--seeds=2"]
    done = launch(*words, f"--config.data.data_dir={tmp_path}", cwd=tmp_path, program=sweep)
    assert done.returncode == 2
    announced, line = done.stderr.splitlines()
    assert announced.startswith("cifar10: fetching 170.1 MB, from 127.0.0.1:9 to ")
    assert line.startswith("error: cifar10: cannot be fetched from http://127.0.0.1:9/cifar10/")
    assert not list(tmp_path.rglob("*.log"))
