"""The README of all measurements against the results that it is written from."""

import re

import pytest

from benchmarks import harness, report
from fedjax_ssl import moved
from fedjax_ssl.files import plain
from fedjax_ssl.report import cells
from fedjax_ssl.report.tables import DASH
from launch import command, sweep


def test_the_committed_readme_is_what_the_command_writes_and_has_as_many_cells_in_each_row_of_a_table():
    text, pictures = report.written()
    assert all((harness.RESULTS / name).is_file() for name in pictures)
    assert report.README.read_text() == text, "run python -m benchmarks.report"
    assert "Not measured yet." not in text
    for table in (part.splitlines() for part in text.split("\n\n") if part.startswith("|")):
        assert len({row.count("|") for row in table}) == 1, table


def test_the_committed_means_and_deviations_of_sweeps_are_those_of_their_runs():
    results = [one for file in harness.RESULTS.glob("sweep_*.json") for run in harness.load(file) for one in run["results"]]
    assert len(results) > 100
    for one in results:
        found = {"accuracy_mean": one["accuracy_mean"], "accuracy_sd": one["accuracy_sd"]}
        assert found == pytest.approx(plain(cells.over_seeds(one["runs"]))), one["case"]


PRETRAININGS = {"without pretraining": 0, "no pretraining": 0, "one pretraining": 1, "ten pretrainings": 10}


def pretrainings(config, overrides):
    """How often the server of a cell trains before round 1, by today's config."""
    name = config.removeprefix("configs/").replace(".py:", ":")
    today = {moved.MOVED.get(key, key): value for key, value in overrides.items()}  # results keep the keys of their time
    return today.get("server.training.pretrain", command.read(name).tree["server"]["training"]["pretrain"])


def test_a_result_of_fl2s_setting_has_the_pretraining_that_its_row_names_and_its_sweep_still_runs():
    """A default may change after a run: what the run had is then in its row's name, its overrides and its sweep's file."""
    named, repeatable = 0, 0
    results = [one for file in harness.RESULTS.glob("sweep_*.json") for run in harness.load(file) for one in run["results"]]
    for one in (one for one in results if re.search(r"\bfl2(_\w+)?\b", one["config"])):
        place, (table, _, small) = (one["case"]["row"], one["case"]["column"]), one["case"]["table"].partition("-")
        had = pretrainings(one["config"], one["overrides"])
        said = {count for words, count in PRETRAININGS.items() if words in ", ".join(place)}
        assert said <= {had}, one["case"]
        named += len(said)
        if (report.SWEEPS / f"{table}.toml").exists():
            cells_of = {(cell.row, cell.column): cell for cell in sweep.from_file(table, bool(small)).cells()}
            if cell := cells_of.get(place):
                assert pretrainings(cell.config, cell.overrides) == had, one["case"]
                repeatable += 1
    assert named > 20
    assert repeatable > 70


def test_a_section_has_a_table_of_each_machine_with_its_source(tmp_path):
    about = {"machine": "a machine", "device": "2 x cpu", "commit": "0123456789abcdef", "warm_up": "1 round"}
    about |= {"command": "python -m benchmarks.compare", "versions": {"python": "3.13", "jax": "0.12"}}
    one = {"case": {"kind": "cnn", "cohort": 10, "name": "pfl"}, "seconds": 0.51234, "quartiles": [0.5, 0.6], "ratio": 2.0}
    one |= {"least_and_greatest": [1.5, 2.25], "images_per_s": 1234.5, "difference": 2e-5}
    failed = {"case": {"kind": "cnn", "cohort": 10, "name": "Flower"}, "error": "no | wheel"}
    harness.save(tmp_path / "compare_here.json", about, [one, failed])
    lines = report.section("compare", tmp_path).splitlines()
    assert lines[0] == "a machine (`compare_here.json`):"
    assert lines[4] == "| cnn | 10 | pfl | 0.512 (0.5 to 0.6) | 2 (1.5 to 2.25) | 1,234 | 2e-05 |"
    assert lines[5] == "| cnn | 10 | Flower | no / wheel |  |  |  |"
    assert lines[7] == "- `python -m benchmarks.compare`, commit 012345678, 2 x cpu, python 3.13, jax 0.12, warm-up 1 round"
    assert report.section("costs", tmp_path) == "Not measured yet."


def test_a_sweeps_source_has_every_commit_and_the_number_of_seeds():
    run = {"command": "c", "commit": "0123456789abcdef, fedcba9876543210", "device": "1 x cpu", "warm_up": "none"}
    run |= {"versions": {"python": "3.13", "jax": "0.12"}, "results": [{"runs": [{}, {}]}, {"runs": [{}, {}, {}]}]}
    expected = "- `c`, commit 012345678, fedcba987, 2 or 3 seeds, 1 x cpu, python 3.13, jax 0.12, warm-up none"
    assert report.source(run) == expected


def saved(folder):
    """A results file with two cells of a column and one of another, each of two seeds."""

    def cell(row, column, shift, *, has_labels):
        runs = [
            {"seed": seed, "accuracy": 0.5, "accuracy_last5": shift + 0.25 * seed, "pseudo_label_accuracy": None,
             "bytes_up": 1e6, "bytes_down": 1e6, "seconds": 1.0, "curve": [[5, shift + 0.1 * seed], [10, shift]],
             "pseudo_labels": [[5, 0.9, 0.25, 0.5], [10, 0.95, 0.5, None]] if has_labels else [],
             "server_loss": [[5, 1.25], [10, 0.125]]}
            for seed in (0, 1)
        ]  # fmt: skip
        return {"case": {"table": "fl2_settings", "row": row, "column": column}, "paper": "55", "runs": runs}

    cells_of = [cell("labels alone", "I", 0.25, has_labels=False), cell("one pretraining", "I", 0.5, has_labels=True)]
    about = {
        "command": "c",
        "commit": "0" * 40 + "+",
        "device": "cpu",
        "warm_up": "none",
        "versions": {"python": "3", "jax": "0"},
    }
    about |= {"machine": "a machine", "note": "by hand"}
    harness.save(folder / "sweep_settings_here.json", about, [*cells_of, cell("one pretraining", "II", 0.5, has_labels=True)])
    return lambda words: report.of_cells(report.CELLS.fullmatch(words), folder)


def test_what_runs_had_after_rounds_is_shown_by_run_or_by_cell(tmp_path):
    shown = saved(tmp_path)
    assert shown("rounds settings_here I at 5 10 15").replace(DASH, "-").splitlines() == [
        f"| I, row, seed (rounds 5, 10, 15) | {' | '.join(report.QUANTITIES)} |",
        "| --- | --- | --- | --- | --- | --- |",
        "| one pretraining, 0 | 50.0, 50.0, - | 25, 50, - | 50, -, - | 0.90, 0.95, - | 1.25, 0.12, - |",
        "| one pretraining, 1 | 60.0, 50.0, - | 25, 50, - | 50, -, - | 0.90, 0.95, - | 1.25, 0.12, - |",
        "| labels alone, 0 | 25.0, 25.0, - | - | - | - | 1.25, 0.12, - |",
        "| labels alone, 1 | 35.0, 25.0, - | - | - | - | 1.25, 0.12, - |",
    ]  # as in its file
    assert shown("rounds settings_here II at 10").replace(DASH, "-").splitlines()[::2] == [
        "| II, round 10 | accuracy, % | accepted pseudo-labels, % | mean threshold | the server's loss |",
        "| one pretraining | 50.0, 50.0 | 50, 50 | 0.95, 0.95 | 0.12, 0.12 |",
    ]
    assert "(by hand)" in report.section("sweep fl2_settings", tmp_path)
    assert "commit 000000000+" in report.section("sweep fl2_settings", tmp_path)
    for words, why in (
        ("rounds settings_here III at 5", "names no cell"),
        ("rounds settings_here I", "names no cell, or no rounds or rows"),
        ("last5 settings_here I: one pretraining", "names no cell, or no rounds or rows"),
        ("rounds settings_here I+ at 5", "got 2 columns, accepted: one"),
        ("curves settings_here II: labels alone", "has no row 'labels alone'"),
    ):
        with pytest.raises(ValueError, match=why):
            shown(words)


def test_means_of_the_last_evaluations_and_curves_are_those_of_the_runs(tmp_path):
    shown = saved(tmp_path)
    assert shown("last5 settings_here I+").replace(DASH, "-").splitlines()[2:] == [
        "| one pretraining | 62.5 ± 17.7 | 62.5 ± 17.7 |", "| labels alone | 37.5 ± 17.7 | - |"
    ]  # fmt: skip
    picture = shown("curves settings_here II: one pretraining")
    assert picture.name == "curves_settings_here_II"
    assert "accuracy, %: one pretraining from 55 to 50. accepted pseudo-labels, %: one pretraining from 25 to 50" in picture.alt


def test_a_sweep_of_several_columns_is_shown_as_a_paper_has_it():
    def cell(row, column, accuracies, up=1e8, right=None, paper="", table="fedsiam_mnist"):
        runs = [
            {"seed": i, "accuracy": one, "pseudo_label_accuracy": right, "bytes_up": up, "bytes_down": 2e8, "seconds": 1.0}
            | ({"note": "accuracy fell"} if one == 0.75 else {})
            if one
            else {"seed": i, "error": "fell"}
            for i, one in enumerate(accuracies)
        ]
        return {"case": {"table": table, "row": row, "column": column}, "paper": paper, "runs": runs}

    found = [
        cell("ours", "II", [0.5, 0.75], up=9.5e6),
        cell("FedSem", "II", [0.25, None]),
        cell("ours", "I", [0.5, 0.5], up=1e7, right=0.125, paper="55.1"),
        cell("FedSem", "I", [0.625, 0.625]),
    ]
    expected = """| accuracy, % | II | I | MB up | MB down |
| --- | --- | --- | --- | --- |
| FedSem | failed | 62.5 ± 0.0 | 100 | 200 |
| ours | 62.5 ± 17.7 | 50.0 ± 0.0 [55.1] | 9.50 to 10 | 200 |

| pseudo-labels right, % | I |
| --- | --- |
| ours | 12.5 ± 0.0 |

FedSem, II: seed 1: fell.

To be looked at before a mean is trusted:

* ours, II: accuracy fell (seed 1)"""
    assert report.of_sweep("fedsiam_mnist", found) == expected  # FedSem is a row of its file, `ours` is not
    with pytest.raises(ValueError, match="the results of fedsiam_mnist have a cell twice"):
        report.of_sweep("fedsiam_mnist", [*found, found[0]])
    for name, rows in (
        ("fl2_settings-small", ["one pretraining", "labels alone"]),
        ("feddure_iterations-small", ["T = 1, 40 rounds", "T = 5, 40 rounds"]),
    ):
        table = report.of_sweep(name, [cell(row, "", [0.5], table=name) for row in reversed(rows)])
        assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [f"| {row}" for row in rows]  # as in its file
