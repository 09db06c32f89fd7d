"""The candidates of the tuning, and the provenance that every result carries."""

import importlib
import json

import jax
import pytest

from benchmarks import provenance, tables, tune_digits
from fedjax_ssl.experiment.settings import Settings


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


def test_the_best_mean_of_the_last_evaluations_has_the_star(monkeypatch, tmp_path, capsys):
    def run(cell, seed, workdir, extra):
        rate = cell.overrides[tune_digits.CLIENT]
        if rate > 0.03:
            return {"seed": seed, "error": "error: round 3: NaN"}
        return {"seed": seed, "accuracy": 1 - rate, "accuracy_last5": 0.5 + rate, "curve": [[1, 0.5]]}

    path = tmp_path / "tuning.json"
    monkeypatch.setattr(tune_digits, "run", run)
    monkeypatch.setattr("sys.argv", ["tune_digits.py", "clients", f"--workdir={tmp_path}", "--rows=UDA", f"--json={path}"])
    tune_digits.main()
    words = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert words == [["UDA", "51.0"], ["UDA", "53.0*"], ["UDA", "error:"], ["UDA", "error:"]]
    written = json.loads(path.read_text())
    assert [one.get("accuracy_last5") for one in written["runs"]] == [0.51, 0.53, None, None]
    assert "curve" not in written["runs"][0]
    assert (written["command"], written["seed"]) == ("python -m benchmarks.tune_digits clients --rows=UDA", 10)


def test_a_result_says_where_it_is_from(monkeypatch):
    words = ["/somewhere/benchmarks/tables.py", "fl2_ablation", "--jobs=2", "--workdir=/tmp/a", "--config.data.data_dir=/b"]
    monkeypatch.setattr("sys.argv", words)
    got = provenance.provenance()
    assert got["command"] == "python -m benchmarks.tables fl2_ablation --jobs=2"
    assert got["versions"]["jax"] == jax.__version__
    assert got["device"] == f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    assert len(got["commit"].rstrip("+")) == 40
    assert "cores" in got["machine"]
