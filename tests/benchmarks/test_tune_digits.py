"""The candidates of the tuning, what becomes of their results, and that the configs have the best of them."""

import importlib
import json
import pathlib

import pytest

from benchmarks import tables, tune_digits
from configs import digits
from fedjax_ssl.experiment.experiment import DIVERGED
from fedjax_ssl.experiment.settings import Settings

RESULTS = pathlib.Path(tables.__file__).parent / "results"


@pytest.mark.parametrize(("place", "rows"), [("server", tables.LABELS_AT_SERVER), ("clients", tables.LABELS_AT_CLIENTS)])
def test_every_method_of_a_table_is_tuned_once_in_its_own_setting(place, rows):
    cells = tune_digits.cells(place)
    assert len({(cell.row, cell.column) for cell in cells}) == len(cells)
    for cell in cells:
        path, _, argument = cell.config.partition(":")
        config = importlib.import_module(path.removesuffix(".py").replace("/", ".")).get_config(argument)
        config.update_from_flattened_dict(cell.overrides)
        settings = Settings.from_dict(config.to_dict())
        settings.method_options()
        method, own = rows[cell.row]
        assert (settings.method["name"], settings.data.labels_at) == (method, place)
        assert own.get("data.reveal_labels", False) == (cell.overrides.get("data.reveal_labels", False))
    assert {rows[cell.row][0] for cell in cells} == {method for method, _ in rows.values()}


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Tunes rows with clients' labels by given mean accuracies: (what is printed, in words; the runs that are written)."""

    def tune(rows, accuracies, path=tmp_path / "tuning.json"):
        def run(cell, seed, workdir, extra):
            accuracy = accuracies[cell.overrides[tune_digits.CLIENT]]
            if isinstance(accuracy, str):
                return {"seed": seed, "error": accuracy, "diverged": DIVERGED in accuracy}
            return {"seed": seed, "accuracy": 0.0, "accuracy_last5": accuracy, "curve": [[1, 0.5]]}

        words = ["tune_digits.py", "clients", f"--workdir={tmp_path}", f"--rows={rows}", f"--json={path}"]
        monkeypatch.setattr(tune_digits, "run", run)
        monkeypatch.setattr("sys.argv", words)
        tune_digits.main()
        return json.loads(path.read_text())

    return tune


def test_the_best_mean_of_the_last_evaluations_has_the_star(tuned, capsys):
    written = tuned("UDA", {0.01: 0.5, 0.03: 0.75, 0.1: 0.7, 0.3: "error: round 3: NaN or infinity"})
    words = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert words == [["UDA", "50.0"], ["UDA", "75.0*"], ["UDA", "70.0"], ["UDA", "error:"]]
    assert [one.get("accuracy_last5") for one in written["runs"]] == [0.5, 0.75, 0.7, None]
    assert "curve" not in written["runs"][0]
    assert {one["from"]["command"] for one in written["runs"]} == {
        "python -m benchmarks.tune_digits clients --workdir=DIR --rows=UDA --json=FILE"
    }
    assert written["seed"] == 10


def test_a_larger_rate_is_tried_where_the_largest_is_the_best(tuned, capsys):
    written = tuned("UDA", {0.01: 0.5, 0.03: 0.6, 0.1: 0.7, 0.3: 0.8, 1.0: 0.9})
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["UDA", "90.0*"]
    assert written["runs"][-1]["overrides"] == {tune_digits.CLIENT: 1.0, tune_digits.SERVER: 1.0}


def test_other_candidates_stay_in_the_file_in_the_tables_order(tuned):
    falling = {0.01: 0.8, 0.03: 0.6, 0.1: 0.5, 0.3: 0.4}
    tuned("UDA", falling)
    tuned("FedProx", falling)
    written = tuned("UDA", falling | {0.03: 0.7})
    assert [one["row"] for one in written["runs"]] == ["FedProx"] * 4 + ["UDA"] * 4
    assert [one["accuracy_last5"] for one in written["runs"][4:]] == [0.8, 0.7, 0.5, 0.4]
    assert [one["from"]["command"].split("=")[2].split()[0] for one in written["runs"]] == ["FedProx"] * 4 + ["UDA"] * 4


def test_a_run_that_fails_ends_with_status_1(tuned):
    with pytest.raises(SystemExit) as ended:
        tuned("UDA", {0.01: 0.8, 0.03: 0.6, 0.1: 0.5, 0.3: "error: no such file"})
    assert ended.value.code == 1


@pytest.mark.parametrize(("place", "rows"), [("server", tables.LABELS_AT_SERVER), ("clients", tables.LABELS_AT_CLIENTS)])
def test_the_configs_have_the_best_of_what_was_tried(place, rows):
    runs = json.loads((RESULTS / f"digits_{place}_tuning.json").read_text())["runs"]
    cells = tune_digits.cells(place)
    assert {cell.row for cell in cells} == {one["row"] for one in runs}
    for row in dict.fromkeys(one["row"] for one in runs):
        best = max((one for one in runs if one["row"] == row), key=tune_digits.score)["overrides"]
        method, own = rows[row]
        config = digits.get_config(f"{method},labels_at={place}")
        config.update_from_flattened_dict(own)
        before = config.to_dict()
        config.update_from_flattened_dict(best)
        assert config.to_dict() == before, row
        assert best.get(tune_digits.CLIENT) != tune_digits.LARGER, row  # something larger was tried
