"""The state of the best round in a run's folder: kept, found again, and the same after any stop; and runs that end early."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

import fedjax_ssl
from tests.commands import launch, refused, rows, succeeded, without_times

# The loss falls and rises again, after other numbers of rounds for each seed; see `tests/average.py`.
ARGUMENTS = (
    "--config.data.name=digits", "--config.client.optimizer.learning_rate=0.001", "--config.data.validation=pool",
    "--config.keep_best=val_loss", "--config.patience=3", "--config.rounds=40", "--config.eval_every=1",
    "--config.checkpoint_every=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, own_methods, config):
    """The folder of three runs that end early, with what the command said."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, succeeded(config, *ARGUMENTS, "--config.seeds=3", f"--workdir={folder}").stderr


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def best(folder):
    return fedjax_ssl.load(folder, which="best")[1]


def assert_same(first, second):
    for one, other in zip(*(jax.tree.leaves(s._replace(key=jax.random.key_data(s.key))) for s in (first, second)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_each_run_ends_for_itself_with_its_summary_and_its_best_state(whole):
    folder, said = whole
    found = [summary(folder / f"{seed}") for seed in range(3)]
    assert len({one["rounds"] for one in found}) > 1
    for seed, one in enumerate(found):
        log = rows(folder / f"{seed}")
        losses = [row["eval/val_loss"] for row in log]
        assert one["rounds"] == len(log) == one["best/round"] + 3 < 40
        assert one["best/round"] == 1 + int(np.argmin(losses))
        assert one["best/val_loss"] == min(losses)
        assert one["best/accuracy"] == log[one["best/round"] - 1]["eval/accuracy"]
        assert one["eval/accuracy"] == log[-1]["eval/accuracy"]
        assert int(best(folder / f"{seed}").round) == one["best/round"]
        assert int(fedjax_ssl.load(folder / f"{seed}")[1].round) == one["rounds"]
        assert f"seed {seed}: ended early: {one['ended_early']}" in said
    experiment, state = fedjax_ssl.load(folder / "0", which="best")
    expected = experiment.simulator.evaluate(state)[0]
    assert expected["eval/val_loss"] == pytest.approx(found[0]["best/val_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "stops", [pytest.param((2, 7), marks=pytest.mark.ci), pytest.param((4, 5, 6, 11), marks=pytest.mark.slow)]
)
def test_a_run_that_was_stopped_has_the_same_best_state_log_and_end(whole, config, tmp_path, stops):
    for stop in (*map("--stop_after={}".format, stops), "--stop_after=40"):
        succeeded(config, *ARGUMENTS, "--config.seeds=3", f"--workdir={tmp_path}", stop)
    for seed in range(3):
        first, second = whole[0] / f"{seed}", tmp_path / f"{seed}"
        assert rows(first) == rows(second)
        assert_same(best(first), best(second))
        assert_same(fedjax_ssl.load(first)[1], fedjax_ssl.load(second)[1])
        assert without_times(summary(first)) | {"checksum": ""} == without_times(summary(second)) | {"checksum": ""}
    assert "all runs are done" in succeeded(config, *ARGUMENTS, "--config.seeds=3", f"--workdir={tmp_path}").stderr


@pytest.mark.slow
def test_a_run_that_lost_its_last_rounds_has_the_best_of_those_before_and_finds_the_others_again(whole, config, tmp_path):
    succeeded(config, *ARGUMENTS, "--config.seeds=3", f"--workdir={tmp_path}", "--stop_after=6")
    for seed in range(3):
        run = tmp_path / f"{seed}"
        if not (run / "summary.json").exists():
            (run / "checkpoints" / "6" / "manifest.json").write_text("damaged")
    succeeded(config, *ARGUMENTS, "--config.seeds=3", f"--workdir={tmp_path}")
    for seed in range(3):
        assert rows(whole[0] / f"{seed}") == rows(tmp_path / f"{seed}")
        assert_same(best(whole[0] / f"{seed}"), best(tmp_path / f"{seed}"))


@pytest.mark.ci
def test_what_a_folder_does_not_have_is_one_line(whole, config, tmp_path, own_methods):
    run = tmp_path / "run"
    shutil.copytree(whole[0] / "0", run)
    for number in (run / "best").iterdir():
        shutil.rmtree(number)
    with pytest.raises(FileNotFoundError, match="which has no checkpoint of the best round"):
        best(run)
    shutil.rmtree(run / "best")
    with pytest.raises(FileNotFoundError, match="no checkpoint of a best round, which keep_best keeps"):
        best(run)
    with pytest.raises(ValueError, match="which: got 'last', accepted: newest or best"):
        fedjax_ssl.load(run, which="last")


@pytest.mark.ci
def test_a_run_that_has_seen_its_last_round_as_an_evaluation_is_not_made_longer(config, tmp_path):
    arguments = [word.replace("eval_every=1", "eval_every=2") for word in ARGUMENTS if not re.search("patience|rounds", word)]
    succeeded(config, *arguments, f"--workdir={tmp_path}", "--config.rounds=3")
    longer = refused(config, *arguments, f"--workdir={tmp_path}", "--config.rounds=5")
    assert "keep_best=val_loss, which has seen round 3, the last one" in longer


def test_a_run_that_keeps_no_best_state_has_no_folder_for_it(finished, own_methods):
    assert not (finished / "best").exists()
    with pytest.raises(FileNotFoundError, match="no checkpoint of a best round, which keep_best keeps"):
        best(finished)


def test_the_best_round_is_evaluated_by_a_command(whole):
    from launch import evaluate

    done = launch(str(whole[0] / "0"), "--best", "--json", program=evaluate)
    (report,) = json.loads(done.stdout)["runs"].values()
    assert (report["round"], report["accuracy"]) == tuple(
        summary(whole[0] / "0")[f"best/{key}"] for key in ("round", "accuracy")
    )
    assert "--save: got it with --best" in refused(str(whole[0] / "0"), "--best", "--save", program=evaluate)
