"""Tables of experiments: that their configs exist, what a line says, and what becomes of a run that fails."""

import importlib
import json
import pathlib
import types

import numpy as np
import pytest

from benchmarks import harness, tables
from configs import digits
from fedjax_ssl.experiment.settings import Settings

CELL = {"config": "configs/digits.py:fl2", "overrides": {"method.rho": 0.2}}


@pytest.mark.parametrize("table", tables.TABLES)
def test_every_cell_is_an_experiment_and_no_two_are_the_same(table):
    cases, configs = [], []
    for cell in tables.cells(table):
        path, _, argument = cell["config"].partition(":")
        config = importlib.import_module(path.removesuffix(".py").replace("/", ".")).get_config(argument)
        config.update_from_flattened_dict(cell["overrides"])
        Settings.from_dict(config.to_dict()).method_options()
        cases.append(json.dumps(cell["case"]))
        configs.append(json.dumps(config.to_dict(), sort_keys=True))
    assert len(set(cases)) == len(set(configs)) == len(configs)


def test_a_line_has_means_and_sample_deviations_in_percent_and_the_difference_to_the_paper():
    def columns(*runs, paper=None):
        return tables.rows({"case": {"row": "fl2", "column": "IID"}, "runs": runs, "paper": paper})[0]

    one = {"seed": 0, "accuracy": 0.9, "pseudo_label_accuracy": 0.5, "bytes_up": 2e6, "bytes_down": 4e6, "seconds": 30.0}
    got = columns(one, one | {"accuracy": 0.8, "pseudo_label_accuracy": 0.7, "seconds": 50.0}, paper=86.2)
    deviation = np.std([90, 80], ddof=1)
    assert got == ["fl2", "IID", f"85.0 ± {deviation:.1f}", "86.20 (-1.20)", "60.0 ± 14.1", "2 / 4", "40"]
    assert columns(one | {"pseudo_label_accuracy": None})[2:5] == ["90.0", "-", "-"]
    assert columns(one, {"seed": 1, "error": "what went wrong"})[2] == "seed 1: what went wrong"  # no mean is taken over it


def finish(folder, accuracies, last=0.9, **changes):
    folder.mkdir(parents=True)
    summary = {"eval/accuracy": last, "eval/accuracy_last5": 0.8, "time/total_s": 3.0, "git_commit": "0123", "device": "a cpu"}
    (folder / "summary.json").write_text(json.dumps(summary))
    key = "diagnostics/pseudo_label_accuracy"
    rows = [{"round": i + 1, key: 0.1 * i, "eval/accuracy": of_round, **changes} for i, of_round in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_runs_results_are_those_of_its_files(tmp_path):
    finish(tmp_path / "0", [0.1, 0.2, 0.3, 0.4, 0.5, 0.9])
    got = tables.result_of(0, tmp_path / "0", "")
    assert (got["accuracy"], got["accuracy_last5"], got["seconds"], got["bytes_up"]) == (0.9, 0.8, 3.0, 0)
    assert got["pseudo_label_accuracy"] == pytest.approx(0.3)
    assert got["curve"][-1] == [6, 0.9]
    assert "error" not in got
    finish(tmp_path / "1", [0.8, 0.3])
    assert tables.result_of(1, tmp_path / "1", "")["error"] == "accuracy fell from 80.0% in round 1 to 30.0%"
    finish(tmp_path / "2", [0.8], **{"client/non_finite": 2})
    got = tables.result_of(2, tmp_path / "2", "")
    assert (got["error"], got["diverged"]) == ("round 1: clients returned NaN or infinity and were left out, in 1 rounds", True)
    got = tables.result_of(3, tmp_path / "3", "error: round 2: NaN or infinity")
    assert (got["error"], got["diverged"]) == ("error: round 2: NaN or infinity", True)
    assert not tables.result_of(3, tmp_path / "3", "no such file")["diverged"]


@pytest.mark.parametrize("refuses", [False, True])
def test_seeds_are_one_command_or_one_each_where_that_is_refused(monkeypatch, tmp_path, refuses):
    def run(command, **_):
        commands.append(command)
        words = dict(word.partition("=")[::2] for word in command[3:])
        if "--config.seeds" in words and refuses:
            return types.SimpleNamespace(returncode=2, stderr="error: seeds: got 2, accepted: 1")
        folder, first = pathlib.Path(words["--workdir"]), int(words["--config.seed"])
        for seed in range(first, first + int(words.get("--config.seeds", 1))):
            finish(folder / str(seed) if "--config.seeds" in words else folder, [0.9])
        return types.SimpleNamespace(returncode=0, stderr="")

    commands = []
    monkeypatch.setattr(tables.subprocess, "run", run)
    found = tables.run(CELL, [0, 1], tmp_path / "cell", ["--config.data.data_dir=D"])
    assert [(one["seed"], one["accuracy"]) for one in found] == [(0, 0.9), (1, 0.9)]
    assert len(commands) == (3 if refuses else 1)
    assert all({"--config.method.rho=0.2", "--config.data.data_dir=D"} <= set(command) for command in commands)


@pytest.mark.parametrize("place", ["server", "clients"])
def test_the_digits_have_the_learning_rates_that_were_the_best_of_those_tried(place):
    runs = harness.load(harness.RESULTS / "digits_rates.json")
    tried = [one for run in runs for one in run["results"] if one["case"]["labels_at"] == place]
    rows = tables.TABLES[f"digits_{place}"]["rows"]
    assert {one["case"]["row"] for one in tried} <= rows.keys()
    for row in {one["case"]["row"] for one in tried}:
        of_row = [one for one in tried if one["case"]["row"] == row]
        best = max(of_row, key=lambda one: -1.0 if "error" in one else one["accuracy_last5"])["case"]["overrides"]
        config = digits.get_config(f"{rows[row].get('name', row)},labels_at={place}")
        config.update_from_flattened_dict(rows[row].get("set", {}))
        before = config.to_dict()
        config.update_from_flattened_dict(best)
        assert config.to_dict() == before, row


@pytest.mark.slow
def test_a_real_cell_of_two_seeds(tmp_path):
    found = tables.run(CELL | {"overrides": {"rounds": 2, "model.width": 2}}, [0, 1], tmp_path, [])
    assert [one["seed"] for one in found] == [0, 1]
    assert all(0 < one["accuracy"] < 1 and one["bytes_up"] > 0 for one in found)
    assert found[0]["accuracy"] != found[1]["accuracy"]
