"""Several runs in folders: each as a single run leaves it, resume, divergence, layouts that are found again."""

import errno
import os
import pathlib
import shutil
import signal

import numpy as np
import optax
import pytest

from fedjax_ssl.experiment import layout as layout_module
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.divergence import DivergedError
from fedjax_ssl.experiment.expansion import runs_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.runs import provenance
from fedjax_ssl.runs import run as run_module
from fedjax_ssl.runs.checkpoint import Checkpoints
from fedjax_ssl.runs.folder import folders, newest, open_workdir
from fedjax_ssl.runs.log import MetricsLog
from fedjax_ssl.runs.run import RefusedError, Stop, noted
from tests import tiny
from tests.commands import rows, succeeded, without_times
from tests.runs.test_progress import drawn
from tests.runs.test_resume import assert_same_checkpoint, restored

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]
FILES = {"config.json", "run.json", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard", "registered"}
RATE = "client.optimizer.learning_rate"


def several(**overrides):
    """Two seeds on a device each, or more; two of four clients a round, so that some take part again with their states."""
    usual = {"seeds": 2, "rounds": 4, "data__name": "digits", "execution__strategy": "auto", "execution__devices": 2}
    return tiny.config("average", network="linear", data__num_clients=4, cohort_size=2, **usual | overrides)


def go(given, workdir, stop_after=None, stop=None):
    """What the command does: builds in the noted layout, opens the folders, runs."""
    settings = given if isinstance(given, Settings) else Settings.from_dict(given)
    layout, widths = noted(workdir, [run.name for run in runs_of(settings)], settings.rounds)
    experiment = build(settings, layout=layout, widths=widths)
    for run, folder in zip(experiment.runs, folders(experiment, workdir), strict=True):
        open_workdir(folder, run.settings.to_dict())
    run_module.run(experiment, workdir, stop or Stop(), stop_after=stop_after)
    return experiment


def single(experiment, run):
    return build(experiment.runs[run].settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An experiment of two seeds, and the folder of its whole run."""
    folder = tmp_path_factory.mktemp("whole")
    return go(several(), folder), folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run of the same that was stopped after round 2."""
    folder = tmp_path_factory.mktemp("stopped")
    go(several(), folder, stop_after=2)
    return folder


@pytest.fixture
def begun(tmp_path, stopped):
    return pathlib.Path(shutil.copytree(stopped, tmp_path / "begun"))


def assert_same_runs(experiment, expected, got):
    for run, each in enumerate(experiment.runs):
        assert rows(got / each.name) == rows(expected / each.name)
        assert (got / each.name / "summary.json").exists()
        assert_same_checkpoint(single(experiment, run), expected / each.name, got / each.name)


@pytest.mark.slow
def test_runs_whose_clients_devices_share_go_on_with_the_same_bits_also_when_others_have_finished(tmp_path):
    given = several(execution__devices=4)
    experiment = go(given, tmp_path / "whole")
    assert (experiment.layout.devices, experiment.layout.runs_at_once) == (2, 2)
    go(given, tmp_path / "resumed", stop_after=2)
    shutil.copytree(tmp_path / "whole" / "0", tmp_path / "resumed" / "0", dirs_exist_ok=True)
    go(given, tmp_path / "resumed")  # the second run alone, as before
    assert_same_runs(experiment, tmp_path / "whole", tmp_path / "resumed")


def killed_between_saves(workdir, whole, patched):
    """Seed 0 has round 4, which does not stand in the way of those that both have."""
    shutil.copytree(whole, workdir, dirs_exist_ok=True)
    shutil.rmtree(workdir / "1" / "checkpoints" / "4")
    for name in ("0", "1"):
        (workdir / name / "summary.json").unlink()
    go(several(), workdir, stop_after=3)  # from round 2
    assert [len(rows(workdir / name)) for name in ("0", "1")] == [3, 3]


def one_cannot_save(workdir, whole, patched):
    """No other saves a later round, else nothing would be left that all have."""
    write = Checkpoints._write

    def full(self, round, *content):
        if self.folder.parent.name == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, round, *content)

    patched.setattr(Checkpoints, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        go(several(), workdir)
    assert [[path.name for path in (workdir / run / "checkpoints").iterdir()] for run in ("0", "1")] == [["2"], []]


def signaled(workdir, whole, patched):
    """Every run is saved."""
    stop, seen = Stop(), run_module.seen

    def stopping(found):
        stop.signal = signal.SIGTERM if found[0]["round"] == 3 else None
        return seen(found)

    patched.setattr(run_module, "seen", stopping)
    go(several(), workdir, stop=stop)
    assert [max(Checkpoints(workdir / name, read_only=True).rounds()) for name in ("0", "1")] == [3, 3]


@pytest.mark.parametrize(
    "ended", [killed_between_saves, *(pytest.param(one, marks=pytest.mark.ci) for one in (one_cannot_save, signaled))]
)
def test_runs_that_ended_early_go_on_with_the_same_bits(tmp_path, monkeypatch, whole, ended):
    experiment, expected = whole
    with monkeypatch.context() as patched:
        ended(tmp_path, expected, patched)
    go(several(), tmp_path)
    assert_same_runs(experiment, expected, tmp_path)


def test_each_folder_is_as_a_single_run_leaves_it(tmp_path, whole):
    experiment, folder = whole
    one = go(experiment.runs[1].settings, tmp_path)
    own = folder / "1"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in own.iterdir()} == FILES
    assert (tmp_path / "config.json").read_bytes() == (own / "config.json").read_bytes()
    noted, of_single = (read_json(path / "run.json") for path in (own, tmp_path))
    assert noted["layout"] == experiment.layout._asdict()
    assert (noted["data"], noted["machine"]) == (of_single["data"], of_single["machine"])
    assert noted["data"] != read_json(folder / "0" / "run.json")["data"]  # another split
    alone, of_several = (read_json(path / "summary.json") for path in (tmp_path, own))
    assert alone.keys() == of_several.keys()
    changing = {key for key in alone if key.startswith(("time/", "perf/"))} | {"strategy", "device"}
    for key in alone.keys() - changing:
        value = alone[key]
        assert of_several[key] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), key
    assert [row.keys() for row in MetricsLog(own).rows()] == [row.keys() for row in MetricsLog(tmp_path).rows()]
    curves, of_seed = drawn(tmp_path), drawn(own)
    assert curves.keys() == of_seed.keys() == MetricsLog(own).rows()[-1].keys() - {"round"}
    for row in MetricsLog(own).rows():
        for key in row.keys() - {"round"}:
            assert dict(of_seed[key])[row["round"]] == pytest.approx(row[key]), key
    saved = [{step.name for step in (path / "checkpoints").iterdir()} for path in (tmp_path, own)]
    assert saved[0] == saved[1] == {"2", "4"}
    # A single run goes on from there, and finds that nothing is left to do; its model predicts.
    run_module.run(one, own, Stop())
    state = experiment.simulator.split(experiment.start()[0])[1]
    assert one.predict(state, one.problem.data.test.images[:3]).shape == (3, 10)


def change_note(path, **changes):
    noted = read_json(path)
    for key, value in changes.items():
        noted[key] = {**noted[key], **value} if isinstance(value, dict) else value
    write_json(path, noted)


@pytest.mark.ci
def test_begun_runs_keep_their_layout_and_bits_also_where_jax_has_no_cpu(begun, without_cpu, monkeypatch, whole):
    experiment, expected = whole
    assert all(len(rows(begun / run.name)) == 2 for run in experiment.runs)
    choose = layout_module.resolve
    monkeypatch.setattr(
        "fedjax_ssl.experiment.build.resolve", lambda *args: choose(*args)._replace(strategy="chunked", chunk_size=2)
    )
    assert build(several()).layout.chunk_size == 2
    go(several(), begun)
    assert_same_runs(experiment, expected, begun)
    assert read_json(begun / "0" / "summary.json")["strategy"] == "scan"


@pytest.mark.slow
def test_runs_of_unequal_splits_are_the_same_alone_and_beside_others(tmp_path):
    split = {"data__partition": "dirichlet", "data__alpha": 0.1, "data__min_size": 1, "execution__devices": 1}
    together, alone = several(seeds=3, **split), [several(seeds=1, seed=seed, **split) for seed in range(3)]
    widths = [provenance.widths(build(Settings.from_dict(one)))["unlabeled"] for one in alone]
    assert len(set(widths)) == 3
    whole = go(together, tmp_path / "whole")
    narrow, wide = int(np.argmin(widths)), int(np.argmax(widths))
    go(alone[narrow], tmp_path / "whole" / f"{narrow}")  # finished beside others
    go(together, tmp_path / "cut", stop_after=2)
    go(alone[narrow], tmp_path / "cut" / f"{narrow}")  # goes on with the width that it began with
    assert rows(tmp_path / "cut" / f"{narrow}") == rows(tmp_path / "whole" / f"{narrow}")
    go(alone[wide], tmp_path / "own" / f"{wide}")
    go(together, tmp_path / "own")  # others join one that has finished
    assert_same_runs(whole.only([i for i in range(3) if i != wide]), tmp_path / "whole", tmp_path / "own")
    go(alone[narrow], tmp_path / "joined" / f"{narrow}", stop_after=2)
    with pytest.raises(RefusedError, match="got it beside runs whose clients' tables are not as wide"):
        go(together, tmp_path / "joined")
    assert newest(tmp_path / "joined" / f"{narrow}") == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"machine": {"platform": "gpu"}}, "platform was 'gpu'"),
        ({"layout": {"of_tomorrow": 1, "conv": "of yesterday"}}, "conv was 'of yesterday'"),
    ],
)
def test_a_layout_that_cannot_be_had_is_said(begun, caplog, change, why):
    for name in "01":
        change_note(begun / name / "run.json", **change)
    assert noted(begun, ["0", "1"], 4)[0] is None
    go(several(), begun, stop_after=2)
    assert [message.rpartition(": ")[2] for message in caplog.messages if "rounding" in message] == [why]


def test_runs_go_on_in_another_layout_and_on_another_machine_which_is_said(begun, caplog):
    options = {"jax_default_matmul_precision": "high"}
    machine = {"cores": 99, "jax": "0.1", **options, "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    for name in "01":
        change_note(begun / name / "run.json", layout={"devices": 5}, machine=machine)
    go(several(), begun)
    given = "jax_default_matmul_precision was 'high'"
    said = f"cores was 99, jax was '0.1', {given}, XLA_FLAGS was '--xla_cpu_enable_fast_math=true', devices was 5"
    found = [message.partition(": ")[2] for message in caplog.messages if "rounding" in message]
    assert found == [f"going on with other rounding: {said}"]
    assert [len(rows(begun / name)) for name in "01"] == [4, 4]


def test_flags_are_noted_but_for_those_that_change_no_result(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_cpu_enable_fast_math=true")
    assert provenance.machine()["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"
    assert provenance.machine()["optax"] == optax.__version__


@pytest.mark.slow
def test_finished_runs_are_left_alone_where_more_are_asked_for(tmp_path):
    go(several(rounds=2), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != "config.json"}
    three = go(several(rounds=2, seeds=3), tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    _, row = list(single(three, 2).rounds())[-1]
    assert MetricsLog(tmp_path / "2").rows()[-1]["eval/accuracy"] == pytest.approx(row["eval/accuracy"], abs=0.01)


def test_a_new_run_among_unfinished_ones_is_refused(begun):
    with pytest.raises(RefusedError, match=r"2 has no checkpoint to go on from where other runs of .* have: let those"):
        go(several(seeds=3), begun)
    assert len(rows(begun / "0")) == 2


@pytest.mark.parametrize("every", [1, 4])
def test_a_run_whose_checkpoints_are_gone_takes_nothing_from_the_others(tmp_path, every):
    given = several(checkpoint_every=every)
    for last in (1, 2)[-every:]:  # a checkpoint is saved after both rounds
        go(given, tmp_path, stop_after=last)
    shutil.rmtree(tmp_path / "1" / "checkpoints")
    with pytest.raises(RefusedError, match=r"1 has no checkpoint to go on from where other runs of .* have: let those"):
        go(given, tmp_path)
    assert [len(rows(tmp_path / name)) for name in "01"] == [2, 2]
    assert restored(single(build(given), 0), tmp_path / "0")[0] == 2


def test_runs_that_were_killed_between_their_first_saves_begin_anew(tmp_path, caplog):
    given = several(checkpoint_every=1)
    go(given, tmp_path, stop_after=1)
    shutil.rmtree(tmp_path / "1" / "checkpoints")
    go(given, tmp_path)
    assert [len(rows(tmp_path / name)) for name in "01"] == [4, 4]
    assert "1: no checkpoint yet, perhaps killed while the first were written: all begin anew" in caplog.text


@pytest.mark.ci
def test_a_run_that_diverges_stays_out_and_the_others_finish(tmp_path):
    given = several(seeds=1, vary=RATE, values=(1e37, 0.03, 0.1))
    for last in (2, None, None):
        with pytest.raises(
            DivergedError, match=r"1 of 3 runs diverged: seed 0, learning_rate=1e\+37: round 1: all 2 clients returned NaN"
        ):
            go(given, tmp_path, stop_after=last)
        if last:
            assert len(rows(tmp_path / "0-learning_rate=0.03")) == 2
    bad, *both = (tmp_path / f"0-learning_rate={value}" for value in ("1e+37", "0.03", "0.1"))
    for good in both:
        assert {path.name for path in good.iterdir()} == FILES
        assert f"{read_json(good / 'config.json')['client']['optimizer']['learning_rate']}" in good.name
    assert not rows(bad)
    assert not (bad / "summary.json").exists()
    assert not list((bad / "checkpoints").iterdir())
    assert read_json(bad / "diverged.json")["round"] == 1
    expected = [row for _, row in build(given).rounds()]
    for number, good in enumerate(both, start=1):
        own = [without_times(row[number]) for row in expected]
        assert [row["round"] for row in own] == [1, 2, 3, 4]
        assert rows(good) == own


@pytest.mark.ci
def test_the_command_makes_a_folder_of_each_seed(tmp_path, config):
    arguments = (config, "--config.data.name=digits", "--config.seeds=2", "--config.seed=3", "--config.rounds=4")
    done = succeeded(*arguments, cwd=tmp_path)
    lines = [line.split("  ") for line in done.stderr.splitlines() if line.startswith("round")]
    assert [line[0] for line in lines] == ["round 2/4", "round 4/4"]
    assert all(line[1].startswith("accuracy 0.") and line[2].startswith("± 0.") for line in lines)
    workdir = tmp_path / "runs" / "small"
    assert sorted(path.name for path in workdir.iterdir()) == ["3", "4"]
    found = [read_json(workdir / name / "summary.json") for name in ("3", "4")]
    assert [summary["seed"] for summary in found] == [3, 4]
    accuracies = [summary["eval/accuracy"] for summary in found]
    assert lines[1][1:3] == [f"accuracy {np.mean(accuracies):.3f}", f"± {np.std(accuracies, ddof=1):.3f}"]
    again = succeeded(*arguments, cwd=tmp_path)
    assert "round 4/4" not in again.stderr


@pytest.mark.parametrize("option", [{"jax_threefry_partitionable": False}, {"jax_default_prng_impl": "rbg"}])
def test_runs_do_not_go_on_with_other_random_draws(begun, option):
    for name in "01":
        change_note(begun / name / "run.json", machine=option)
    ((key, value),), before = option.items(), (begun / "0" / "metrics.jsonl").read_bytes()
    with pytest.raises(RefusedError, match=f"its run began with {key}={value} and not .*, which changes all random draws"):
        go(several(), begun)
    assert (begun / "0" / "metrics.jsonl").read_bytes() == before
