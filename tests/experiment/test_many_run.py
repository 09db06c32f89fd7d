"""Several runs from the command line: a folder each as a single run leaves it, resume, divergence, what is refused."""

import itertools
import json
import re
import shutil
import signal

import numpy as np
import pytest

from fedjax_ssl.experiment import loop, many, many_loop, tuning
from fedjax_ssl.experiment.build import Plan, build
from fedjax_ssl.experiment.checkpoint import Checkpoints
from fedjax_ssl.experiment.experiment import DivergedError
from fedjax_ssl.experiment.layout import FORWARD_BATCH_SIZE
from fedjax_ssl.experiment.runs import runs_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.writers import MetricsLog
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.many import spread_of
from tests import tiny
from tests.experiment.test_resume import by_path
from tests.experiment.test_run import CONFIG, launch, rows
from tests.experiment.test_writers import drawn

FILES = {"config.json", "layout.json", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard"}
RATE = "client.optimizer.learning_rate"


def config(**overrides):
    """Two seeds on a device each, or more; two of four clients a round, so that some take part again with what they kept."""
    quick = {"data__num_clients": 4, "cohort_size": 2, "client__epochs": 0, "client__steps": 2, "server__epochs": 1}
    several = {"seeds": 2, "rounds": 4, "data__name": "digits", "execution__strategy": "auto", "execution__devices": 2}
    return tiny.config("fixmatch", network="linear", **quick | {"method__confidence": 0.12} | several | overrides)


def open_all(experiment, workdir):
    for run in experiment.runs:
        loop.open_workdir(workdir / run.name, run.settings.to_dict(), overwrite=False)


def go(experiment, workdir, stop_after=None):
    open_all(experiment, workdir)
    many_loop.run(experiment, workdir, loop.Stop(), stop_after=stop_after)


def restored(experiment, workdir, run):
    """The newest checkpoint of a run, as the single run's experiment reads it: its round, and its leaves by path."""
    template = build(experiment.runs[run].settings).simulator.template(0)
    with Checkpoints(workdir / experiment.runs[run].name) as checkpoints:
        number, state = checkpoints.restore(template)
    return number, by_path(state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An experiment of two seeds, and the folder of its whole run."""
    folder = tmp_path_factory.mktemp("whole")
    experiment = many.build(config())
    go(experiment, folder)
    return experiment, folder


def assert_same_runs(experiment, expected, got):
    for run, each in enumerate(experiment.runs):
        assert rows(got / each.name) == rows(expected / each.name)
        assert (got / each.name / "summary.json").exists()
        (last, leaves), (other, own) = restored(experiment, expected, run), restored(experiment, got, run)
        assert last == other == experiment.settings.rounds
        assert list(leaves) == list(own)
        for path, leaf in leaves.items():
            np.testing.assert_array_equal(own[path], leaf, err_msg=path)


def test_runs_whose_clients_devices_share_go_on_with_the_same_bits_also_when_others_have_finished(tmp_path):
    given = config(execution__devices=4)
    experiment = many.build(given)
    assert (experiment.layout.devices, experiment.num_devices) == (2, 4)
    go(experiment, tmp_path / "whole")
    go(many.build(given), tmp_path / "resumed", stop_after=2)
    shutil.copytree(tmp_path / "whole" / "0", tmp_path / "resumed" / "0", dirs_exist_ok=True)
    go(many.build(given), tmp_path / "resumed")  # the second run alone, on two of the devices, as before
    assert_same_runs(experiment, tmp_path / "whole", tmp_path / "resumed")
    assert json.loads((tmp_path / "resumed" / "1" / "summary.json").read_text())["devices"] == 2


def test_a_resumed_experiment_gives_the_same_bits(tmp_path, whole):
    experiment, expected = whole
    go(many.build(config()), tmp_path, stop_after=2)
    assert all(len(rows(tmp_path / run.name)) == 2 for run in experiment.runs)
    go(many.build(config()), tmp_path)
    assert_same_runs(experiment, expected, tmp_path)
    start = by_path(experiment.states(experiment.simulator.initialize()[0])[1])
    _, end = restored(experiment, tmp_path, 1)
    assert all(np.any(leaf != start[path]) for path, leaf in end.items() if "params" in path)
    assert any(np.any(leaf != start[path]) for path, leaf in end.items() if "clients" in path)


def test_runs_that_were_killed_between_their_saves_go_on_from_the_round_that_all_have(tmp_path, whole):
    experiment, expected = whole
    go(many.build(config()), tmp_path)
    shutil.rmtree(tmp_path / "1" / "checkpoints" / "4")
    for name in ("0", "1"):
        (tmp_path / name / "summary.json").unlink()
    go(many.build(config()), tmp_path, stop_after=3)  # from round 2; seed 0's round 4 does not stand in its way
    assert [len(rows(tmp_path / name)) for name in ("0", "1")] == [3, 3]
    go(many.build(config()), tmp_path)
    assert_same_runs(experiment, expected, tmp_path)


def test_a_signal_saves_every_run(tmp_path, monkeypatch, whole):
    experiment, expected = whole
    stop, together = loop.Stop(), many_loop.together

    def stopping(found):
        stop.signal = signal.SIGTERM if found[0]["round"] == 3 else None
        return together(found)

    monkeypatch.setattr(many_loop, "together", stopping)
    first = many.build(config())
    open_all(first, tmp_path)
    many_loop.run(first, tmp_path, stop)
    assert [restored(experiment, tmp_path, run)[0] for run in (0, 1)] == [3, 3]
    monkeypatch.undo()
    go(many.build(config()), tmp_path)
    assert_same_runs(experiment, expected, tmp_path)


def test_each_folder_is_as_a_single_run_leaves_it(tmp_path, whole):
    experiment, folder = whole
    single = build(experiment.runs[1].settings)
    loop.open_workdir(tmp_path, single.settings.to_dict(), overwrite=False)
    loop.run(single, tmp_path, loop.Stop())
    own = folder / "1"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in own.iterdir()} == FILES
    assert (tmp_path / "config.json").read_bytes() == (own / "config.json").read_bytes()
    noted = json.loads((own / "layout.json").read_text())
    assert noted["layout"] == experiment.layout._asdict()
    assert noted[many_loop.SHARED] == experiment.num_devices == 2
    alone, several = (json.loads((path / "summary.json").read_text()) for path in (tmp_path, own))
    assert alone.keys() == several.keys()
    changing = {key for key in alone if key.startswith(("time/", "perf/"))} | {"strategy", "devices", "device"}
    for key in alone.keys() - changing:
        value = alone[key]
        assert several[key] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), key
    assert [row.keys() for row in MetricsLog(own).rows()] == [row.keys() for row in MetricsLog(tmp_path).rows()]
    curves, of_seed = drawn(tmp_path), drawn(own)
    assert curves.keys() == of_seed.keys() == MetricsLog(own).rows()[-1].keys() - {"round"}
    for row in MetricsLog(own).rows():
        for key in row.keys() - {"round"}:
            assert dict(of_seed[key])[row["round"]] == pytest.approx(row[key]), key
    saved = [{step.name for step in (path / "checkpoints").iterdir()} for path in (tmp_path, own)]
    assert saved[0] == saved[1] == {"2", "4"}
    # A single run goes on from there, and finds that nothing is left to do.
    loop.run(single, own, loop.Stop())
    single.predict(experiment.states(experiment.start()[0])[1], single.problem.data.test.images[:3])


def noting(tmp_path, changes=(), **more):
    """The layout of two runs whose folders have notes: the experiment's own with changes to one or both, and more keys."""
    experiment = many.build(config())
    for run, change in itertools.zip_longest(experiment.runs, changes, fillvalue={}):
        (tmp_path / run.name).mkdir(exist_ok=True)
        tuning.note(experiment.layout._replace(**change), tmp_path / run.name, **more)
    return experiment


def read(experiment, tmp_path):
    return many_loop.in_noted_layout(experiment, [tmp_path / run.name for run in experiment.runs])


def test_runs_go_on_in_the_layout_that_their_folders_note(tmp_path):
    newer = many.build(config())
    assert read(newer, tmp_path / "none") is newer
    there = {"chunk_size": 2, "strategy": "chunked", "compiler": "lean", "conv": "im2col", "steps": "unrolled"}
    found = read(noting(tmp_path, [there, there], **{many_loop.SHARED: 1}), tmp_path)
    assert (found.layout, found.num_devices) == (newer.layout._replace(**there), 1)
    assert found.simulator.execution == Execution(2, compiler="lean", shrinks=True)
    assert found.settings == newer.settings
    found = read(noting(tmp_path, [there, there]), tmp_path)  # which single runs began
    assert (found.layout, found.num_devices) == (newer.layout._replace(**there), 2)
    over_devices = {"strategy": "sharded", "devices": 2}
    found = read(noting(tmp_path, [over_devices] * 2, **{many_loop.SHARED: 4}), tmp_path)
    assert (found.layout, found.num_devices) == (newer.layout._replace(**over_devices), 4)
    found = read(noting(tmp_path, [over_devices] * 2), tmp_path)  # which single runs began: one after the other
    assert (found.layout, found.num_devices) == (newer.layout._replace(**over_devices), 2)


def test_the_steps_and_the_convolutions_of_a_noted_layout_are_those_of_the_method(monkeypatch):
    experiment, seen = many.build(config()), []
    monkeypatch.setattr(Plan, "method", lambda self, _: seen.append((self.settings.execution.steps, self.conv)))
    monkeypatch.setattr(many, "check_unrolled", lambda _: None)
    experiment.in_layout(experiment.layout._replace(steps="unrolled", conv="shifted"), 2).problem.method(None)
    assert seen[-1] == ("unrolled", "shifted")


def test_pseudo_labels_are_made_of_as_many_examples_as_before_a_layout_was_noted(monkeypatch):
    sizes, experiments = [], {size: many.build(config(execution__batch_size=size)) for size in (0, 9)}
    monkeypatch.setattr(Plan, "method", lambda self, _: sizes.append(self.task().batch_size))
    for given, expected in ((0, FORWARD_BATCH_SIZE), (9, 9)):
        experiment = experiments[given]
        noted = experiment.in_layout(experiment.layout._replace(forward_batch_size=7), 2)
        noted.problem.method(None)
        assert (noted.layout.forward_batch_size, sizes[-1]) == (7, expected)


@pytest.mark.parametrize(
    ("changes", "more", "why"),
    [
        (({"compiler": "lean"},), {}, "0/layout.json and .*1/layout.json: got two layouts for runs that go on together"),
        (({"devices": 5, "strategy": "sharded"},) * 2, {}, "0/layout.json: got sharded on 5 of cpu, there are 4 of cpu here"),
        (({"strategy": "separate"},) * 2, {}, "0/layout.json: got separate, which several runs cannot have"),
        ((), {"platform": "gpu"}, "got scan on 2 of gpu, there are 4 of cpu here"),
        ((), {many_loop.SHARED: 5}, "got scan on 5 of cpu, there are 4 of cpu here"),
    ],
)
def test_a_layout_that_cannot_be_taken_is_said_and_runs_go_on_as_their_settings_say(tmp_path, caplog, changes, more, why):
    experiment = noting(tmp_path, changes, **more)
    assert read(experiment, tmp_path) is experiment
    (line,) = caplog.messages
    assert re.search(why, line)
    assert line.endswith(": going on in another layout, with other rounding")


def test_a_note_that_cannot_be_read_is_named(tmp_path, caplog):
    experiment = noting(tmp_path)
    (tmp_path / "1" / "layout.json").write_text("{")
    assert read(experiment, tmp_path) is experiment
    assert "1/layout.json: cannot be read" in caplog.text


def test_a_newer_choice_of_layout_does_not_change_runs_that_have_begun(tmp_path, monkeypatch, whole):
    experiment, expected = whole
    go(many.build(config()), tmp_path, stop_after=2)
    choose = many.resolve
    monkeypatch.setattr(many, "resolve", lambda settings: choose(settings)._replace(compiler="lean"))
    newer = many.build(config())
    assert newer.layout.compiler == "lean"
    monkeypatch.setattr(many, "spread_of", lambda *args: spreads.append(args) or spread_of(*args))
    spreads = []
    go(newer, tmp_path)
    assert spreads[-1] == (2, 2, 1)
    assert_same_runs(experiment, expected, tmp_path)
    assert json.loads((tmp_path / "0" / "summary.json").read_text())["compiler"] == "default"


def test_finished_runs_are_left_alone_where_more_are_asked_for(tmp_path):
    go(many.build(config(rounds=2)), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != "config.json"}
    three = many.build(config(rounds=2, seeds=3))
    go(three, tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    _, row = list(build(three.runs[2].settings).rounds())[-1]
    assert MetricsLog(tmp_path / "2").rows()[-1]["eval/accuracy"] == pytest.approx(row["eval/accuracy"], abs=0.01)


def test_a_new_run_among_unfinished_ones_is_refused(tmp_path):
    go(many.build(config()), tmp_path, stop_after=2)
    with pytest.raises(loop.RefusedError, match=r"2 has no checkpoint to go on from where other runs of .* have: let those"):
        go(many.build(config(seeds=3)), tmp_path)
    assert len(rows(tmp_path / "0")) == 2


@pytest.mark.parametrize("every", [1, 4])
def test_a_run_whose_checkpoints_are_gone_takes_nothing_from_the_others(tmp_path, every):
    given = config(checkpoint_every=every)
    for last in (1, 2):  # a checkpoint is saved at both
        go(many.build(given), tmp_path, stop_after=last)
    shutil.rmtree(tmp_path / "1" / "checkpoints")
    with pytest.raises(loop.RefusedError, match=r"1 has no checkpoint to go on from where other runs of .* have: let those"):
        go(many.build(given), tmp_path)
    assert [len(rows(tmp_path / name)) for name in "01"] == [2, 2]
    assert restored(many.build(given), tmp_path, 0)[0] == 2


def test_runs_that_were_killed_between_their_first_saves_begin_anew(tmp_path, caplog):
    given = config(checkpoint_every=1)
    go(many.build(given), tmp_path, stop_after=1)
    shutil.rmtree(tmp_path / "1" / "checkpoints")
    go(many.build(given), tmp_path)
    assert [len(rows(tmp_path / name)) for name in "01"] == [4, 4]
    assert "1: no checkpoint yet, as if killed while the first were written: all begin anew" in caplog.text


def test_runs_go_on_where_jax_has_no_cpu(tmp_path, without_cpu, whole):
    go(many.build(config()), tmp_path, stop_after=2)
    go(many.build(config()), tmp_path)
    assert_same_runs(*whole, tmp_path)


def test_a_run_that_diverges_stays_out_and_the_others_finish(tmp_path):
    given = config(seeds=1, vary=RATE, values=(1e37, 0.03, 0.1), method__confidence=0.0)
    for last in (2, None, None):
        with pytest.raises(
            DivergedError, match=r"1 of 3 runs diverged: learning_rate=1e\+37: round 1: all 2 clients returned NaN"
        ):
            go(many.build(given), tmp_path, stop_after=last)
        if last:
            assert len(rows(tmp_path / "0-learning_rate=0.03")) == 2
    bad, *both = (tmp_path / f"0-learning_rate={value}" for value in ("1e+37", "0.03", "0.1"))
    for good in both:
        assert {path.name for path in good.iterdir()} == FILES
        assert f"{json.loads((good / 'config.json').read_text())['client']['optimizer']['learning_rate']}" in good.name
    assert not rows(bad)
    assert not (bad / "summary.json").exists()
    assert not list((bad / "checkpoints").iterdir())
    assert json.loads((bad / "diverged.json").read_text())["round"] == 1
    expected = [row for _, row in many.build(given).rounds()]
    for number, good in enumerate(both, start=1):
        own = [{k: v for k, v in row[number].items() if not k.startswith(("time/", "perf/"))} for row in expected]
        assert [row["round"] for row in own] == [1, 2, 3, 4]
        assert rows(good) == own


@pytest.fixture
def command(tmp_path):
    (tmp_path / "small.py").write_text(CONFIG.replace('"synthetic"', '"digits"'))
    return f"--config={tmp_path / 'small.py'}"


def test_the_command_makes_a_folder_of_each_seed(tmp_path, command):
    done = launch(command, "--config.seeds=2", "--config.seed=3", "--config.rounds=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ") for line in done.stderr.splitlines() if line.startswith("round")]
    assert [line[0] for line in lines] == ["round 2/4", "round 4/4"]
    assert all(line[1].startswith("accuracy 0.") and line[2].startswith("± 0.") for line in lines)
    workdir = tmp_path / "runs" / "small"
    assert sorted(path.name for path in workdir.iterdir()) == ["3", "4"]
    found = [json.loads((workdir / name / "summary.json").read_text()) for name in ("3", "4")]
    assert [summary["seed"] for summary in found] == [3, 4]
    accuracies = [summary["eval/accuracy"] for summary in found]
    assert lines[1][1:3] == [f"accuracy {np.mean(accuracies):.3f}", f"± {np.std(accuracies, ddof=1):.3f}"]
    again = launch(command, "--config.seeds=2", "--config.seed=3", "--config.rounds=4", cwd=tmp_path)
    assert again.returncode == 0
    assert "round" not in again.stderr


def test_the_command_ends_with_1_and_names_the_run_that_diverged(tmp_path, command):
    given = [f"--config.vary={RATE}", "--config.values=1e37,0.03", "--config.client.epochs=5", "--config.rounds=2"]
    done = launch(command, f"--workdir={tmp_path / 'run'}", *given)
    assert done.returncode == 1
    assert "error: 1 of 2 runs diverged: learning_rate=1e+37: round 1: all 3 clients" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "0-learning_rate=0.03" / "summary.json").exists()


WRONG = [
    ({"seeds": 0}, "seeds: got 0, accepted: a number >= 1"),
    ({"seeds": 2, "vary": RATE, "values": (0.1, 0.2)}, "seeds: got 2 with vary and values, accepted: 1"),
    ({"values": (0.1, 0.2)}, "vary: got '' with 2 values"),
    ({"vary": RATE}, r"values: got \(\) with vary=client.optimizer.learning_rate, accepted: two numbers or more"),
    ({"vary": RATE, "values": (0.1,)}, "values: got .* accepted: two numbers or more, each once"),
    ({"vary": RATE, "values": (0.1, 0.1)}, "values: got .* accepted: two numbers or more, each once"),
    ({"vary": RATE, "values": (0.1, -1.0)}, "client.optimizer.learning_rate: got -1.0, accepted: a number > 0"),
    ({"vary": "method.confidence", "values": (0.1, 2.0)}, "method.confidence: got 2.0, accepted: a number in"),
    ({"vary": "client.optimizer.learning_rat", "values": (0.1, 0.2)}, f"accepted: .*did you mean '{RATE}'"),
    (
        {"vary": "client.epochs", "values": (1.0, 2.0)},
        "vary: got 'client.epochs', which is a int, accepted: the key of a float",
    ),
    (
        {"vary": "rounds", "values": (1.0, 2.0)},
        "vary: got 'rounds', accepted: the key of a float in client, server, method, data",
    ),
    ({"seeds": 2, "execution__tune": "always"}, "execution.tune: got always with several runs, whose layout is not measured"),
    ({"seeds": 2, "execution__rounds_per_dispatch": 2}, "execution.rounds_per_dispatch: got 2 with several runs, accepted: 1"),
    ({"seeds": 2, "execution__data": "host"}, "execution.data: got host with several runs, accepted: device"),
    ({"seeds": 2, "execution__strategy": "sharded"}, "execution.strategy: got sharded with several runs"),
    ({"seeds": 2, "execution__devices": 9}, "execution.devices: got 9, accepted: at most 4"),
    ({"seeds": 2, "data__name": "synthetic"}, "seeds: got 2 with data.name=synthetic, which the seed draws, accepted: 1"),
    (
        {"vary": "client.optimizer.momentum", "values": (0.1, 0.0)},
        r"values: got \(0.1, 0.0\) with vary=client.optimizer.momentum, accepted: numbers > 0, as without momentum",
    ),
    ({"vary": "client.optimizer.momentum", "values": (0.1, -0.2)}, "client.optimizer.momentum: got -0.2, accepted"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_cannot_be_several_runs_is_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        many.build(config(**{"seeds": 1} | given))
    assert "\n" not in str(error.value)


def test_one_run_and_several_are_built_by_their_own_functions():
    with pytest.raises(ValueError, match="seeds, vary: got several runs, accepted: one"):
        build(config())
    with pytest.raises(ValueError, match="seeds: got 1 without vary"):
        many.build(config(seeds=1))


def test_the_runs_have_the_settings_that_they_have_alone():
    seeds = runs_of(Settings.from_dict(config(seeds=3, seed=5)))
    assert [run.settings for run in seeds] == [Settings.from_dict(config(seeds=1, seed=seed)) for seed in (5, 6, 7)]
    assert [run.name for run in seeds] == ["5", "6", "7"]
    values = runs_of(Settings.from_dict(config(seeds=1, vary="method.confidence", values=(0.5, 1))))
    assert [run.settings for run in values] == [
        Settings.from_dict(config(seeds=1, method__confidence=value)) for value in (0.5, 1.0)
    ]
    assert [run.name for run in values] == ["0-confidence=0.5", "0-confidence=1.0"]
