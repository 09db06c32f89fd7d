"""Tables of experiments: what a line says, and what becomes of a run that fails."""

import importlib
import json
import pathlib
import subprocess

import numpy as np
import pytest

from benchmarks import provenance, tables
from fedjax_ssl.experiment.experiment import DIVERGED
from fedjax_ssl.experiment.settings import Settings

CELL = tables.Cell("fl2", "IID", "configs/digits.py:fl2", {"method.rho": 0.2})


def result(seed, accuracy, **changes):
    found = {"pseudo_label_accuracy": 0.5, "bytes_up": 2e6, "bytes_down": 4e6, "seconds": 30.0}
    return {"seed": seed, "accuracy": accuracy, **found, **changes}


def test_a_line_has_means_and_sample_deviations_in_percent():
    got = tables.line(CELL, [result(0, 0.9), result(1, 0.8, pseudo_label_accuracy=0.7, seconds=50.0)])
    deviation = np.std([90, 80], ddof=1)
    assert got == f"| fl2 | IID | 85.0 ± {deviation:.1f} | - | 60.0 ± 14.1 | 2.0 | 4.0 | 40 |"


def test_a_method_without_pseudo_labels_has_no_value_there():
    assert tables.line(CELL, [result(0, 0.9, pseudo_label_accuracy=None)]) == "| fl2 | IID | 90.0 | - | - | 2.0 | 4.0 | 30 |"


def test_beside_a_papers_accuracy_stands_the_difference_to_it():
    got = tables.line(CELL._replace(paper=86.2), [result(0, 0.9), result(1, 0.81)])
    assert got.split(" | ")[3] == "86.20 (-0.70)"
    columns = tables.HEAD.splitlines()[0].split(" | ")
    assert (columns[3], len(columns)) == ("the paper", len(got.split(" | ")))


def test_beside_the_bytes_of_d_stand_mu_and_what_it_saved():
    found = [result(seed, 0.9, mu=0.5, bytes_saved=saved) for seed, saved in enumerate((0.22, 0.28))]
    assert tables.line(CELL, found).split(" | ")[5] == "2.0 (mu 0.5, 0.25 of bytes saved)"


def test_no_mean_is_taken_over_a_run_that_failed():
    got = tables.line(CELL._replace(paper=86.2), [result(0, 0.9), {"seed": 1, "error": "error: what went wrong"}])
    assert got == "| fl2 | IID | failed: seed 1: error: what went wrong | 86.20 | | | | |"


def finished(monkeypatch, rows, **method):
    """Stands a finished run of such rounds in for `launch.run`."""

    def launch(command, **_):
        (folder,) = (pathlib.Path(word.removeprefix("--workdir=")) for word in command if word.startswith("--workdir="))
        folder.mkdir(parents=True)
        summary = {
            "eval/accuracy": 0.9,
            "eval/accuracy_last5": 0.8,
            "time/total_s": 3.0,
            "git_commit": "0123abc",
            "device": "1 x cpu",
            "jax_version": "0.10",
        }
        for name, value in (("config.json", {"method": method}), ("summary.json", summary)):
            (folder / name).write_text(json.dumps(value))
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"round": i + 1, **row}) + "\n" for i, row in enumerate(rows)))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tables.subprocess, "run", launch)


def test_clients_that_were_left_out_make_a_run_that_diverged(monkeypatch, tmp_path):
    finished(monkeypatch, [{"client/non_finite": n, "eval/accuracy": 0.9} for n in (0, 2, 0, 5)], name="fl2")
    got = tables.run(CELL, 3, tmp_path, [])
    error = "round 2: clients returned NaN or infinity and were left out, 7 in all rounds"
    assert (got["error"], got["diverged"]) == (error, True)
    assert "failed: seed 3: round 2" in tables.line(CELL, [result(0, 0.9), got])


@pytest.mark.parametrize(("accuracies", "fell"), [((0.3, 0.8, 0.6, 0.39), True), ((0.3, 0.8, 0.3, 0.41), False)])
def test_a_run_that_loses_most_of_what_it_had_learned_has_diverged(monkeypatch, tmp_path, accuracies, fell):
    finished(monkeypatch, [{"client/non_finite": 0, "eval/accuracy": accuracy} for accuracy in accuracies], name="fl2")
    got = tables.run(CELL, 3, tmp_path, [])
    assert got.get("error") == ("accuracy fell from 80.0% in round 2 to 39.0%" if fell else None)
    assert got.get("diverged", False) == fell
    assert got["curve"][-1] == [4, accuracies[-1]]  # what there was is kept


def test_what_d_saves_of_the_online_network_is_over_all_rounds(monkeypatch, tmp_path):
    rows = [
        {"client/non_finite": 0, "client/upload_bytes_fraction": share, "eval/accuracy": 0.9}
        for share in (0.0, 0.0, 1.0, 1.0, 0.8, 0.7, 0.5)
    ]
    finished(monkeypatch, rows, name="fedsiam_d", saved=0.5)
    got = tables.run(CELL, 0, tmp_path, [])
    assert [got[key] for key in ("git_commit", "device", "jax_version")] == ["0123abc", "1 x cpu", "0.10"]
    assert got["mu"] == 0.5
    assert got["bytes_saved"] == pytest.approx(1 - 4 / 7)
    finished(monkeypatch, rows, name="fedsiam_mt")
    assert "mu" not in tables.run(CELL, 1, tmp_path, [])


@pytest.mark.parametrize(("error", "status"), [(f"error: round 2: {DIVERGED}", 0), ("error: no such file", 1)])
def test_a_table_of_runs_that_diverged_is_a_result(monkeypatch, tmp_path, capsys, error, status):
    failed = {"seed": 0, "error": error, "diverged": DIVERGED in error}
    monkeypatch.setattr(tables, "run", lambda cell, seed, *_: result(seed, 0.9) if seed else failed)
    monkeypatch.setattr("sys.argv", ["tables", "fl2_ablation", f"--workdir={tmp_path}", "--rows=CAT", "--seeds=2"])
    if status:
        with pytest.raises(SystemExit) as ended:
            tables.main()
        assert ended.value.code == status
    else:
        tables.main()
    assert capsys.readouterr().out.count(f"failed: seed 0: {error} |") == 3


def test_rows_that_no_table_has_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["tables", "fl2_ablation", f"--workdir={tmp_path}", "--rows=CAT,CTA"])
    with pytest.raises(SystemExit) as ended:
        tables.main()
    assert ended.value.code == 2
    accepted = "FixMatch + FedAvg, + SACR, CAT, CAT + SACR, CAT + SACR + LSAA"
    assert capsys.readouterr().err.endswith(f"argument --rows: got 'CTA', accepted: beginnings of {accepted}\n")


def test_a_run_that_fails_says_why(tmp_path):
    wrong = CELL._replace(overrides={"method.confidenc": 1})
    assert tables.run(wrong, 3, tmp_path, []) == {
        "seed": 3,
        "error": "error: config.method.confidenc: unknown key; did you mean config.method.confidence?",
        "diverged": False,
    }


def test_a_file_keeps_its_other_cells_in_the_tables_order(tmp_path):
    path, other = tmp_path / "results.json", CELL._replace(row="before")
    table = tables.Table(1, [other, CELL])
    for cell, accuracy in ((CELL, 0.1), (other, 0.2), (CELL, 0.3)):
        tables.write(path, table, [{**cell._asdict(), "runs": [result(0, accuracy)]}])
    written = json.loads(path.read_text())
    assert [(cell["row"], cell["runs"][0]["accuracy"]) for cell in written["cells"]] == [("before", 0.2), ("fl2", 0.3)]
    for cell in written["cells"]:
        assert cell["from"] == provenance.provenance() | {"elapsed_s": cell["from"]["elapsed_s"]}


def test_every_cell_of_every_table_is_a_config():
    for table in tables.TABLES.values():
        assert len({(cell.row, cell.column) for cell in table.cells}) == len(table.cells)
        for cell in table.cells:
            path, _, argument = cell.config.partition(":")
            module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
            config = module.get_config(argument)
            config.update_from_flattened_dict(cell.overrides)
            Settings.from_dict(config.to_dict()).method_options()
