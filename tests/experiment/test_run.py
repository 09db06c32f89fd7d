"""The command line as a person meets it: files, exit statuses, one-line errors, resume, signals."""

import signal
import time

import numpy as np
import pytest

from fedjax_ssl.experiment.files import MetricsLog, read_json
from tests.experiment.commands import CONFIG, FIXMATCH, launch, launch_process, refused, rows

pytestmark = pytest.mark.usefixtures("own_methods")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two configs: small.py, and fixmatch.py of a method whose clients and server train a network."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "small.py").write_text(CONFIG)
    (folder / "fixmatch.py").write_text(FIXMATCH)
    return folder


@pytest.fixture(scope="module")
def config(folder) -> str:
    return f"--config={folder / 'small.py'}"


@pytest.fixture(scope="module")
def usual(tmp_path_factory, config):
    workdir = tmp_path_factory.mktemp("usual")
    run(config, f"--workdir={workdir}")
    return rows(workdir)


def run(*arguments, **where):
    done = launch(*arguments, **where)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_rounds_of_one_dispatch_are_logged_saved_and_resumed_alike(tmp_path, config, usual):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    together = "--config.execution.rounds_per_dispatch=2"
    run(config, f"--workdir={whole}", together)
    assert [row["round"] for row in rows(whole)] == list(range(1, 7))
    assert [set(row) for row in rows(whole)] == [set(row) for row in usual]
    assert [row["client/loss"] for row in rows(whole)] == pytest.approx([row["client/loss"] for row in usual], rel=1e-3)
    run(config, f"--workdir={parts}", together, "--stop_after=3")
    assert len(rows(parts)) == 4  # to the end of its dispatch
    run(config, f"--workdir={parts}", together)
    assert rows(parts) == rows(whole)
    said = refused(config, f"--workdir={tmp_path / 'odd'}", together, "--config.eval_every=3")
    assert "eval_every: got 3 with execution.rounds_per_dispatch=2, accepted: a multiple of it" in said


def test_a_run_writes_what_the_readme_lists_and_a_second_start_ends_at_once(tmp_path, folder):
    workdir, arguments = tmp_path / "runs" / "fixmatch" / "3", (f"--config={folder / 'fixmatch.py'}", "--config.seed=3")
    lines = run(*arguments, cwd=tmp_path).splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["round 2/6", "round 4/6", "round 6/6"]
    assert lines[-1] == "all 6 rounds are done, results in runs/fixmatch/3"
    log = MetricsLog(workdir).rows()
    assert [row["round"] for row in log] == [1, 2, 3, 4, 5, 6]
    assert [("eval/accuracy" in row) for row in log] == [False, True] * 3
    expected = {
        "client/loss", "client/mask_rate", "server/loss", "diagnostics/pseudo_label_accuracy", "diagnostics/label_ratio",
        "diagnostics/correct_ratio", "diagnostics/wrong_ratio", "comm/bytes_up", "comm/bytes_down", "time/round_s",
        "perf/client_images_per_s",
    }  # fmt: skip
    assert all(expected <= set(row) for row in log)
    per_round = log[0]["comm/bytes_up"]
    assert [row["comm/bytes_up"] for row in log] == [per_round * n for n in range(1, 7)]
    summary = read_json(workdir / "summary.json")
    assert set(summary) == {
        "method", "dataset", "seed", "rounds", "eval/accuracy", "eval/accuracy_last5", "comm/bytes_up", "comm/bytes_down",
        "cost/forward_passes", "cost/backward_passes",
        "time/total_s", "time/compile_s", "perf/client_images_per_s", "device", "jax_version", "git_commit", "num_params",
        "strategy",
    }  # fmt: skip
    assert summary["seed"] == 3
    assert summary["eval/accuracy"] == log[-1]["eval/accuracy"]
    evaluated = [row["eval/accuracy"] for row in log if "eval/accuracy" in row]
    assert summary["eval/accuracy_last5"] == pytest.approx(np.mean(evaluated))
    assert summary["num_params"] == 64 * 10 + 10
    assert read_json(workdir / "config.json")["seed"] == 3
    assert list((workdir / "tensorboard").iterdir())
    assert {path.name for path in (workdir / "checkpoints").iterdir()} >= {"6"}

    def times():
        return {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file() and path.name != "config.json"}

    before = times()
    assert run(*arguments, cwd=tmp_path) == f"{lines[-1]}\n"
    assert times() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_a_checkpoint_and_the_run_goes_on_from_it(tmp_path, config, number):
    workdir = tmp_path / "run"
    arguments = [config, f"--workdir={workdir}", "--config.rounds=100000", "--config.checkpoint_every=100000"]
    process = launch_process(*arguments)
    deadline = time.monotonic() + 120
    while not (workdir / "metrics.jsonl").exists() or len((workdir / "metrics.jsonl").read_text().splitlines()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    finished = len(rows(workdir))
    assert (workdir / "checkpoints" / str(finished)).is_dir()
    run(*arguments, f"--stop_after={finished + 2}")
    assert [row["round"] for row in rows(workdir)] == list(range(1, finished + 3))


def test_a_stopped_run_whose_newest_checkpoint_is_corrupt_goes_on_from_the_one_before(tmp_path, config, usual):
    run(config, f"--workdir={tmp_path}", "--stop_after=3")
    assert len(rows(tmp_path)) == 3
    assert not (tmp_path / "summary.json").exists()
    newest = tmp_path / "checkpoints" / "3"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    assert "skipped corrupt checkpoint" in run(config, f"--workdir={tmp_path}")
    assert rows(tmp_path) == usual
    assert newest.with_name("3.corrupt").is_dir()


def test_another_config_in_the_workdir_is_refused_with_the_keys_and_overwrite_starts_anew(tmp_path, config):
    workdir = tmp_path / "run"
    run(config, f"--workdir={workdir}", "--config.rounds=2")
    said = refused(config, f"--workdir={workdir}", "--config.rounds=1", "--config.method.scale=0.5")
    assert "rounds is 2 there and 1 here" in said
    assert "method.scale is 1.0 there and 0.5 here" in said
    assert len(rows(workdir)) == 2
    run(config, f"--workdir={workdir}", "--config.rounds=1", "--overwrite")
    assert len(rows(workdir)) == 1


def test_divergence_is_named(tmp_path, folder):
    """Here the server's; that of the clients is in test_several_run."""
    overrides = ("--config.server.optimizer.learning_rate=1e37", "--config.server.epochs=5")
    diverged = launch(f"--config={folder / 'fixmatch.py'}", f"--workdir={tmp_path / 'run'}", *overrides)
    assert diverged.returncode == 1
    assert "the global model holds NaN or infinity" in diverged.stderr
    assert "Traceback" not in diverged.stderr
    assert "goes on" not in diverged.stderr  # the same command would diverge again
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.data.num_labels=15"], ["data.num_labels=15", "multiple of 10"]),
        (["--config.data.name=npz", "--config.data.path=floats.npz"], ["floats.npz", "images have dtype float64"]),
        (["--overwrit"], ["overwrit", "did you mean --overwrite?"]),
        (["rounds=3"], ["rounds=3: unknown argument", "--config.KEY"]),
        (["--stop_after=0"], ["--stop_after: got '0', accepted: a whole number >= 1"]),
        (["--config=configs/no_such_file.py"], ["got configs/no_such_file.py"]),
        (["--config.nonsense=1"], ["config.nonsense: unknown key"]),
        (["--noconfig"], ["--config: missing"]),
        (["--workdir=floats.npz"], ["--workdir: got floats.npz ("]),
        (["--workdir=floats.npz/run"], ["--workdir: got floats.npz/run ("]),
    ],
)
def test_wrong_input_is_one_line_with_status_2(tmp_path, config, arguments, words):
    """Also where the split leaves images over, which is not said before the run is accepted."""
    np.savez(tmp_path / "floats.npz", x_train=np.zeros((9, 3)), y_train=np.zeros(9, int), x_test=[[0.0]], y_test=[0])
    said = refused(config, "--config.data.name=digits", "--workdir=run", *arguments, cwd=tmp_path)
    assert all(word in said for word in words), said
    assert not (tmp_path / "run").exists()


def test_help_says_what_the_command_does_and_its_flags():
    shown, _ = launch_process("--help").communicate(timeout=60)
    assert "Exit status: 0 done" in shown
    assert all(flag in shown for flag in ("--config", "--workdir", "overwrite", "--stop_after"))
