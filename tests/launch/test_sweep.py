"""`launch.sweep`: a table of runs as a queue, that goes on where it stopped."""

import contextlib
import csv
import json
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.report.tables import DASH
from fedjax_ssl.runs.sweep import from_words
from fedjax_ssl.runs.sweep_queue import Queue, unread
from launch import arguments, config_file, report, sweep
from tests.commands import ROOT, launch, refused, rows, succeeded


def test_values_of_keys_may_be_words_of_their_own(tmp_path):
    given = ["--config=digits:{method}", "--methods=fl2", "--config.rounds", "3", "--config.data.data_dir", "here"]
    with contextlib.ExitStack() as until_the_end:
        queue = sweep._accepted(["sweep", *given, "--seeds=2", f"--workdir={tmp_path / 'out'}"], until_the_end)
    assert queue.extra == ["--config.rounds=3", "--config.data.data_dir=here"]
    typed = read_json(tmp_path / "out" / "sweep.json")["command"]
    assert typed.endswith("--methods=fl2 --seeds=2 --config.rounds=3 --config.data.data_dir=DIR")


def test_the_commands_of_the_help_are_accepted():
    lines = [line.split("launch.sweep ")[1] for line in sweep.__doc__.splitlines() if "python -m launch.sweep" in line]
    options, _ = sweep._parser().parse_known_args(shlex.split(lines[1]))
    cells = from_words(options.config, options.methods, options.set).cells()
    assert [cell.label for cell in cells][:2] == ["fl2 num_labels=10", "fl2 num_labels=40"]
    assert [sweep.settings_of(cell, {}).data.num_labels for cell in cells] == [10, 40, 10, 40]
    assert lines[0].split(" ")[0] in config_file.sweep_names()


def test_every_sweep_that_is_known_by_name_has_configs_that_run():
    for name in config_file.sweep_names():
        for small in (False, True):
            cells = config_file.sweep(name, small).cells()
            assert cells
            assert all(not sweep.settings_of(cell, {}).is_several for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", config_file.sweep_names())
def test_every_cell_of_a_small_sweep_can_be_built(name, tfds_dir):
    for cell in config_file.sweep(name, small=True).cells():
        settings = sweep.settings_of(cell, {"data.data_dir": str(tfds_dir)})
        if settings.data.name in ("digits", "mnist", "fashion_mnist", "cifar10"):
            as_run = settings.model_copy(update={"data": settings.data.resolved()})
            assert build(settings).runs[0].settings == as_run


def test_a_sweep_that_goes_on_elsewhere_names_both_machines(tmp_path, monkeypatch):
    for name in ("one", "two", "one"):
        monkeypatch.setattr("fedjax_ssl.runs.sweep.processor", lambda name=name: name)
        with contextlib.ExitStack() as until_the_end:
            sweep._accepted(["sweep", "--config=digits:fl2", f"--workdir={tmp_path}"], until_the_end)
    said = read_json(tmp_path / "sweep.json")
    assert [part.split(",")[0] for part in said["machine"].split("; ")] == ["one", "two"]
    assert len(said["command"].splitlines()) == 1


@pytest.mark.ci
def test_a_table_runs_once_and_names_what_failed(tmp_path, capfd):
    file = tmp_path / "two ways.toml"
    file.write_text(
        'config = "digits:{row}"\nseeds = 2\nrows = ["supervised"]\n'
        '[set]\n"rounds" = 2\n"model.name" = "linear"\n[columns]\n'
        'plain = {}\n"lr 1e30" = { set = { "server.training.optimizer.learning_rate" = 1e30 } }\n'
        '[paper]\nsupervised = { plain = "12.5 ± 1.0" }\n'
    )
    arguments = [str(file), f"--workdir={tmp_path / 'out'}", "--jobs=2"]
    done = launch(*arguments, cwd=tmp_path, program=sweep)
    assert done.returncode == 1
    assert "diverged: supervised lr 1e30: seed 0: round " in done.stderr
    header, _, names, supervised = done.stdout.splitlines()
    assert header == "Accuracy of the last round in %, mean ± sd over 2 seeds, in brackets the paper's"
    assert names.split("  ")[-1].strip() == "lr 1e30"
    assert supervised.split()[-1] == "diverged"
    assert " [12.5 ± 1.0]  " in supervised
    folders = [tmp_path / "out" / "supervised-plain" / str(seed) for seed in (0, 1)]
    accuracies = [100 * json.loads((folder / "summary.json").read_text())["eval/accuracy"] for folder in folders]
    assert f"{sum(accuracies) / 2:.1f} ± " in supervised
    other = launch(*arguments, "--config.client.epochs=2", cwd=tmp_path, program=sweep)  # another experiment in the same folder
    assert other.returncode == 1
    assert "failed: supervised plain: " in other.stderr
    assert "holds another experiment: client.epochs is" in other.stderr
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "supervised-plain").rglob("*")}
    launch(*arguments, cwd=tmp_path, program=sweep)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "supervised-plain").rglob("*")} == before
    whole = read_json(folders[0] / "summary.json")
    (folders[0] / "summary.json").write_text("{")  # damaged: its run writes it anew
    assert launch(*arguments, cwd=tmp_path, program=sweep).stdout == done.stdout
    assert read_json(folders[0] / "summary.json") == whole


@pytest.mark.slow
def test_cells_of_one_program_have_the_rows_of_separate_runs_and_a_report_has_the_papers_numbers(tmp_path):
    quick = ["--config.rounds=2", "--config.model.name=linear", "--config.client.epochs=1", "--config.cohort_size=2"]
    file, out = tmp_path / "rates.toml", tmp_path / "out"
    file.write_text(
        'about = "Two rates"\nconfig = "digits:{row},labels_at=clients"\nseeds = 2\nrows = ["fedavg"]\n[columns]\n'
        '".1".set = { "client.optimizer.learning_rate" = 0.1 }\n".01".set = { "client.optimizer.learning_rate" = 0.01 }\n'
        '[paper]\nfedavg = { ".1" = "12.5 ± 1.0" }\n'
    )
    done = launch(str(file), f"--workdir={out}", "--jobs=1", *quick, cwd=tmp_path, program=sweep)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["fedavg-.01", "fedavg-.1"]
    (log,) = out.glob("*.log")
    assert log.read_text().count("$ ") == 1  # one program
    shared, alone = out / "fedavg-.01" / "1", tmp_path / "alone"
    given = [*quick, "--config.seed=1", "--config.client.optimizer.learning_rate=.01", f"--workdir={alone}"]
    assert launch("--config=digits:fedavg,labels_at=clients", *given).returncode == 0
    assert (alone / "config.json").read_text() == (shared / "config.json").read_text()
    assert rows(shared) == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in rows(alone)]
    again = launch(str(file), f"--workdir={out}", "--jobs=1", *quick, cwd=tmp_path, program=sweep)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert log.read_text().count("$ ") == 1

    (cell,) = (one for one in config_file.sweep(str(file), small=False).cells() if one.column == ".01")
    summary, cell = shared / "summary.json", cell._replace(settings=sweep.settings_of(cell, arguments.split_words(quick)[1]))
    queue, whole = Queue([cell], 2, out, [], 1), summary.read_text()
    assert queue.done(cell).has_ended
    write_json(summary, read_json(summary) | {"eval/accuracy": 0.99})  # which the log does not have
    damaged = queue.done(cell)
    assert not damaged.has_ended
    assert damaged.error.startswith("seed 1: summary.json: eval/accuracy is 0.99, and the last row's ")
    summary.write_text(whole)

    made = launch(str(out), f"--json={tmp_path / 'cells.json'}", f"--out={tmp_path / 'r.html'}", program=report)
    assert made.returncode == 0, made.stderr
    (source,) = json.loads((tmp_path / "cells.json").read_text())["runs"]
    assert source["command"] == f"python -m launch.sweep {file} {' '.join(quick)}"
    with (tmp_path / "r_files" / "sweep_rates.csv").open() as lines:
        table = {line["column"]: line for line in csv.DictReader(lines)}
    for one, paper in zip(source["results"], ("12.5 ± 1.0", DASH), strict=True):
        line, accuracy = table[one["case"]["column"]], 100 * np.mean([run["accuracy"] for run in one["runs"]])
        assert float(line["accuracy, %"]) == pytest.approx(accuracy, rel=1e-4)
        assert line["the paper, %"] == paper
        assert line["difference"] == (DASH if paper == DASH else f"{accuracy - 12.5:+.2f}")


@pytest.mark.slow
def test_a_sweep_that_stops_early_shows_how_far_it_is_and_goes_on(tmp_path):
    words = ["--config=digits:supervised", "--config.model.name=linear", "--config.rounds=3", "--jobs=1"]
    words += ["--config.eval_every=1", f"--workdir={tmp_path / 'out'}"]
    stopped = succeeded(*words, "--stop_after=2", program=sweep)
    assert stopped.stdout.split()[-1] == "stopped"
    with contextlib.ExitStack() as until_the_end:
        queue = sweep._accepted(["sweep", *words, "--stop_after=2"], until_the_end)
        assert queue.done(queue.cells[0]).is_stopped
        log = next((tmp_path / "out").glob("*/0/metrics.jsonl"))
        whole = log.read_text()
        log.write_text(whole + "{}\n")
        assert queue.done(queue.cells[0]).error.startswith("seed 0: metrics.jsonl, line 3: ")
        log.write_text(whole)
    made = [str(tmp_path / "out"), f"--json={tmp_path / 'cells.json'}", f"--out={tmp_path / 'r.html'}"]
    succeeded(*made, program=report)
    (source,) = json.loads((tmp_path / "cells.json").read_text())["runs"]
    ((run,),) = (one["runs"] for one in source["results"])
    assert run["error"] == "unfinished: round 2 of 3"
    assert source["commit"]
    assert [number for number, _ in run["curve"]] == [1, 2]

    succeeded(*words, program=sweep)
    succeeded(*made, program=report)
    (source,) = json.loads((tmp_path / "cells.json").read_text())["runs"]  # in place of the earlier one
    ((run,),) = (one["runs"] for one in source["results"])
    assert [number for number, _ in run["curve"]] == [1, 2, 3]
    first, second = source["command"].splitlines()
    assert first.endswith(" --stop_after=2 --config.model.name=linear --config.rounds=3 --config.eval_every=1")
    assert second == first.replace(" --stop_after=2", "")
    whole = (tmp_path / "cells.json").read_text()
    next((tmp_path / "out").glob("*/0/summary.json")).unlink()
    again = launch(*made, program=report)
    row = source["results"][0]["case"]["row"]
    assert f"note: left as they were, for they failed or are unfinished here: {row}" in again.stderr
    assert (tmp_path / "cells.json").read_text() == whole
    (tmp_path / "cells.json").write_text('{"runs": [{}]}')
    wrong = launch(*made, program=report)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        f"error: {made[1][7:]}: got a file without results, accepted: one that --json wrote, or a new one\n",
    )


@pytest.mark.slow
def test_a_sweep_that_is_ended_ends_its_runs_and_goes_on(tmp_path):
    words = ["--config=digits:supervised", "--config.model.name=linear", f"--workdir={tmp_path}"]
    one_by_one = ["--seeds=2", "--config.client.on_nonfinite=stop"]  # which takes no seeds together
    many = [sys.executable, "-m", "launch.sweep", *words, *one_by_one, "--config.rounds=100000"]
    process = subprocess.Popen(many, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "0" / "metrics.jsonl"
    while process.poll() is None and not log.exists():
        time.sleep(0.1)
    process.terminate()
    assert "stopped; the same command goes on" in process.communicate()[1]
    assert process.returncode == 130
    assert not (tmp_path / "run" / "1").exists()
    done = len(log.read_bytes().splitlines())
    more = launch(*words[:2], f"--workdir={log.parent}", "--config.rounds=100000", f"--stop_after={done + 1}")
    assert f"going on after round {done}" in more.stderr  # its run has saved a checkpoint, and left the folder


@pytest.mark.slow
def test_cells_whose_method_refuses_several_values_have_a_program_each(tmp_path):
    words = ["--config=digits:fedlabel,labels_at=clients", "--set=method.consistency_weight=.05,.5", "--config.rounds=1"]
    succeeded(*words, "--config.model.name=linear", "--workdir=out", "--jobs=1", cwd=tmp_path, program=sweep)
    assert sorted(path.name for path in (tmp_path / "out").glob("*/0")) == ["0", "0"]
    (refusal,) = (tmp_path / "out").glob("shared@*.log")
    assert "error: vary: got 'method.consistency_weight', by which the program" in refusal.read_text()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("paper.fl = 90.0", "paper: got 'fl', accepted: a row, and a column where"),
        ('paper.fl2 = "high"', "paper: got 'high', accepted: an accuracy in %"),
        ("paper = 3", "paper: got 3, accepted: a group of keys"),
        ("set = 3", "set: got 3, accepted: a group of keys"),
        ("columns = 3", "columns: got 3, accepted: a group of keys"),
        ("columns.a.set = 3", "columns.a.set: got 3, accepted: a group of keys"),
        ("columns.a.data = [3]", "rows, columns and paper: got [3] for a word, accepted: text or a number"),
        ('columns = ["a b", "a-b"]', "rows and columns: got two with the same name"),
        ('x = "labels"\ncolumns = [10, "some"]', "x: got 'labels', accepted: where all columns, or all rows, have a number in"),
        ("small = 3", "small: got 3, accepted: a group of keys"),
        ("seeds = 1001", "seeds: got 1001, accepted: a whole number >= 1 and <= 1000"),
        ("seed = 1", "seed: unknown key; did you mean seeds?"),
        ("seeds =", "Invalid value"),
        ("config = ''", "config: got '', accepted: text"),
        ("config = 3", "config: got 3, accepted: text"),
        ("", "got no [small] table, accepted: without --small"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(tmp_path, text, line):
    others = 'config = "digits:{row}"\nrows = ["fl2"]\n' if not text.startswith("config") else ""
    (tmp_path / "typo.toml").write_text(f"{others}{text}\n")
    said = refused("typo.toml", *["--small"] * (not text), cwd=tmp_path, program=sweep)
    assert said.startswith(f"error: typo.toml: {line}")


def test_keys_that_no_run_of_a_sweep_reads_are_named():
    cells = from_words("digits:supervised", "", ["client.epochs=1,2", "rounds=3,4"]).cells()
    config = {"rounds": 3}  # of a run's config reports keep what the run reads
    done = [SimpleNamespace(cell=cell, runs=[SimpleNamespace(error="", config=config)]) for cell in cells]
    assert unread(done) == ["client.epochs: no run of this sweep reads it"]
    assert unread([SimpleNamespace(cell=cells[0], runs=[])]) == []
