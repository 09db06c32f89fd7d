"""The command as a person meets it: files, exit statuses, resume; wrong input is in test_refusals, signals in test_stop."""

import numpy as np
import pytest

from fedjax_ssl.files import read_json
from fedjax_ssl.runs.log import MetricsLog
from tests.commands import launch, launch_process, refused, rows, succeeded

pytestmark = pytest.mark.usefixtures("own_methods")


@pytest.mark.ci
def test_rounds_of_one_dispatch_are_logged_saved_and_resumed_alike(tmp_path, config, finished):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    together = "--config.execution.rounds_per_dispatch=2"
    succeeded(config, f"--workdir={whole}", together)
    assert [row["round"] for row in rows(whole)] == list(range(1, 7))
    for row, usual in zip(rows(whole), rows(finished), strict=True):
        assert set(row) == set(usual)
        assert row["client/loss"] == pytest.approx(usual["client/loss"], rel=1e-3)
    succeeded(config, f"--workdir={parts}", together, "--stop_after=3")
    assert len(rows(parts)) == 4  # to the end of its dispatch
    succeeded(config, f"--workdir={parts}", together)
    assert rows(parts) == rows(whole)


def test_a_run_writes_what_the_readme_lists_and_a_second_start_ends_at_once(tmp_path, fixmatch):
    workdir, arguments = tmp_path / "runs" / "fixmatch" / "3", (fixmatch, "--config.seed=3")
    lines = succeeded(*arguments, cwd=tmp_path).stderr.splitlines()
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
        "method", "dataset", "seed", "rounds", "eval/accuracy", "eval/loss", "eval/accuracy_last5", "comm/bytes_up",
        "comm/bytes_down", "cost/forward_passes", "cost/backward_passes",
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
    assert succeeded(*arguments, cwd=tmp_path).stderr == f"{lines[-1]}\n"
    assert times() == before


def test_a_stopped_run_whose_newest_checkpoint_is_corrupt_goes_on_from_the_one_before(tmp_path, config, finished):
    succeeded(config, f"--workdir={tmp_path}", "--stop_after=3")
    assert len(rows(tmp_path)) == 3
    assert not (tmp_path / "summary.json").exists()
    newest = tmp_path / "checkpoints" / "3"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    assert "skipped corrupt checkpoint" in succeeded(config, f"--workdir={tmp_path}").stderr
    assert rows(tmp_path) == rows(finished)
    assert newest.with_name("3.corrupt").is_dir()


def test_another_config_in_the_workdir_is_refused_with_the_keys_and_overwrite_starts_anew(tmp_path, config):
    workdir = tmp_path / "run"
    succeeded(config, f"--workdir={workdir}", "--config.rounds=2")
    said = refused(config, f"--workdir={workdir}", "--config.rounds=1", "--config.method.scale=0.5")
    assert "rounds is 2 there and 1 here" in said
    assert "method.scale is 1.0 there and 0.5 here" in said
    assert len(rows(workdir)) == 2
    succeeded(config, f"--workdir={workdir}", "--config.rounds=1", "--overwrite")
    assert len(rows(workdir)) == 1


def test_divergence_is_named(tmp_path, fixmatch):
    """Here the server's; that of the clients is in test_several_run."""
    overrides = ("--config.server.training.optimizer.learning_rate=1e37", "--config.server.training.epochs=5")
    diverged = launch(fixmatch, f"--workdir={tmp_path / 'run'}", *overrides)
    assert diverged.returncode == 1
    assert "the global model holds NaN or infinity" in diverged.stderr
    assert "Traceback" not in diverged.stderr
    assert "goes on" not in diverged.stderr  # the same command would diverge again
    assert not (tmp_path / "run" / "summary.json").exists()


def test_help_says_what_the_command_does_and_its_flags():
    shown, _ = launch_process("--help").communicate(timeout=60)
    assert "Exit status: 0 done" in shown
    assert all(flag in shown for flag in ("--config", "--workdir", "overwrite", "--stop_after"))
