"""The pages of all measurements against the results that they are written from."""

import re

import pytest

from benchmarks import harness, report
from fedjax_ssl import moved
from fedjax_ssl.files import plain
from fedjax_ssl.report import cells
from fedjax_ssl.report.tables import DASH
from launch import config_file

PAGES = {path.name: path.read_text() for path in report.PAGES.glob("*.md")}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_committed_page_is_what_the_command_writes_and_has_as_many_cells_in_each_row_of_a_table(name):
    text, pictures = report.written(PAGES[name])
    assert text == PAGES[name], "run python -m benchmarks.report"
    assert all((harness.RESULTS / picture).is_file() for picture in pictures)
    for table in (part.splitlines() for part in text.split("\n\n") if part.startswith("|")):
        assert len({row.count("|") for row in table}) == 1, table


def headings(page):
    """The names by which links go to a page's headings."""
    found = re.findall(r"^#+ (.*)$", PAGES[page], flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_pages_stay_within_their_sizes_and_the_readme_links_to_each():
    sizes = {name: len(text.encode()) for name, text in PAGES.items()}
    assert sizes["README.md"] <= 10_000, "the README has findings and the papers' tables; all else belongs on a page"
    assert sum(sizes.values()) - sizes["README.md"] <= 60_000, "merge tables, or drop what nobody would act on"
    for name, text in PAGES.items():
        for page, heading in re.findall(r"\]\((\w+\.md)#([^)]+)\)", text):
            assert heading in headings(page), (name, heading)
        assert name == "README.md" or f"]({name}" in PAGES["README.md"], name


def test_every_file_of_results_is_shown_on_a_page():
    shown = {path for text in PAGES.values() for block in report.BLOCK.finditer(text)
             for path in report.paths(block["words"], harness.RESULTS)}  # fmt: skip
    drawn = {harness.RESULTS / file for text in PAGES.values() for file in re.findall(r"results/(\S+\.svg)", text)}
    others = {harness.RESULTS / "digits_rates.json"}  # which test_rates.py holds configs/digits.py to
    assert shown | drawn | others == set(harness.RESULTS.iterdir())


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
    return today.get("server.training.pretrain", config_file.read(name).tree["server"]["training"]["pretrain"])


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
            cells_of = {(cell.row, cell.column): cell for cell in config_file.sweep(table, bool(small)).cells()}
            if cell := cells_of.get(place):
                assert pretrainings(cell.config, cell.overrides) == had, one["case"]
                repeatable += 1
    assert named > 20
    assert repeatable > 70


def block(words, folder):
    """What stands between the lines of a block."""
    text, _ = report.written(f"<!-- {words} -->\n<!-- end -->\n", folder)
    return text.removeprefix(f"<!-- {words} -->\n\n").removesuffix("\n\n<!-- end -->\n").replace(DASH, "-")


SOURCE = {"machine": "a machine", "device": "2 x cpu", "commit": "0123456789abcdef", "warm_up": "none: whole runs"}
SOURCE |= {"command": "python -m launch.sweep a", "versions": {"python": "3.13", "jax": "0.12"}}


def test_a_benchmarks_columns_are_shown_by_machine_or_beside_one_another(tmp_path):
    case = {"kind": "cnn", "cohort": 10, "name": "pfl"}
    one = {"case": case, "seconds": 0.51234, "quartiles": [0.5, 0.6], "ratio": 2.0, "least_and_greatest": [1.5, 2.25]}
    failed = {"case": {**case, "name": "Flower"}, "error": "no | wheel"}
    harness.save(tmp_path / "compare_here.json", SOURCE, [one, failed])
    harness.save(
        tmp_path / "compare_there.json", SOURCE | {"machine": "another", "device": "1 x GPU"}, [one | {"seconds": 0.25}]
    )
    assert block("compare | clients; program | s a round; times ours (turns)", tmp_path).splitlines() == [
        "Machine: a machine; °: 1 x GPU, another.",
        "",
        "|clients|program|s a round|times ours (turns)|",
        "|---|---|---|---|",
        "|10|pfl|0.512|2 (1.5 to 2.25)|",
        "|10°|pfl|0.25|2 (1.5 to 2.25)|",
        "|10|Flower|no / wheel||",
    ]
    assert block("compare | program | s a round; times ours | by machine | name=pfl", tmp_path).splitlines() == [
        "In each cell: s a round; times ours.",
        "",
        "|program|a machine|1 x GPU, another|",
        "|---|---|---|",
        "|pfl|0.512; 2|0.25; 2|",
    ]
    with pytest.raises(ValueError, match="has no `<!-- end -->`"):
        report.written("<!-- sources -->\n")


def test_sources_have_every_command_and_commit_by_machine_and_the_sweep_that_makes_the_cells_today(tmp_path):
    def cell(row):
        return {"case": {"table": "precision", "row": row, "column": "digits, FedDure"}, "paper": "", "runs": []}

    commits = {"commit": f"0123456789abcdef, {'f' * 40}+", "note": "by hand"}
    harness.save(tmp_path / "sweep_precision_here.json", SOURCE | commits, [cell("float32")])
    both = {"command": "python -m launch.run --x\npython -m launch.run --y"}
    harness.save(tmp_path / "sweep_precision_here.json", SOURCE | both, [cell("not a row of its file")])
    about = {"command": "python -m benchmarks.costs --json=FILE", "warm_up": "2 rounds", "machine": "another"}
    harness.save(tmp_path / "costs_here.json", SOURCE | about, [{"case": {"method": "fedavg"}, "error": "no"}])
    found, _ = report.load([*report.paths("sweep precision", tmp_path), *report.paths("costs | method | s", tmp_path)])
    assert report.of_sources(found).splitlines() == [
        "- a machine, python 3.13, jax 0.12: `launch.sweep precision` (012345678, fffffffff+, by hand); "
        "`launch.run --x`, `launch.run --y` (012345678)",
        "- another, python 3.13, jax 0.12: `benchmarks.costs` (012345678, 2 x cpu, warm-up 2 rounds)",
    ]


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
    cells_of += [cell("one pretraining", "II", 0.5, has_labels=True)]
    harness.save(folder / "sweep_fl2_settings_here.json", SOURCE, cells_of)


def test_what_runs_had_after_rounds_is_shown_by_run(tmp_path):
    saved(tmp_path)
    names = "accuracy, %; of these right, %; the server's loss"
    assert block(f"rounds fl2_settings | 5 10 15 | {names}", tmp_path).splitlines() == [
        "Machine: a machine.",
        "",
        f"|row, seed (rounds 5 10 15)|{names.replace('; ', '|')}|",
        "|---|---|---|---|",
        "|one pretraining, I, 0|50.0, 50.0|50|1.25, 0.12|",
        "|one pretraining, I, 1|60.0, 50.0|50|1.25, 0.12|",
        "|one pretraining, II, 0|50.0, 50.0|50|1.25, 0.12|",
        "|one pretraining, II, 1|60.0, 50.0|50|1.25, 0.12|",
        "|labels alone, I, 0|25.0, 25.0||1.25, 0.12|",
        "|labels alone, I, 1|35.0, 25.0||1.25, 0.12|",
    ]  # in the order of the sweep's file


def test_means_of_the_last_evaluations_and_curves_are_those_of_the_runs(tmp_path):
    saved(tmp_path)
    assert block("sweep fl2_settings | I+", tmp_path).splitlines()[2:] == [
        "||I, / last five|II, / last five|",
        "|---|---|---|",
        "|one pretraining|50.0 ± 0.0 / 62.5 ± 17.7 [55]|50.0 ± 0.0 / 62.5 ± 17.7 [55]|",
        "|labels alone|50.0 ± 0.0 / 37.5 ± 17.7 [55]||",
    ]
    picture = report.of_curves(tmp_path, "fl2_settings_here", "II", "one pretraining")
    assert picture.name == "curves_fl2_settings_here_II"
    assert "accuracy, %: one pretraining from 55 to 50. accepted pseudo-labels, %: one pretraining from 25 to 50" in picture.alt
    with pytest.raises(ValueError, match="fl2_settings_here, II: got the row 'labels alone', accepted: one pretraining"):
        report.of_curves(tmp_path, "fl2_settings_here", "II", "labels alone")


def test_a_sweep_is_shown_as_a_paper_has_it_with_a_second_machines_cells_beside_the_firsts(tmp_path):
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
        cell("ours", ".1, IID", [0.5, 0.5], up=1e7, right=0.125, paper="55.1"),
        cell("FedSem", ".1, IID", [0.625, 0.625]),
    ]
    harness.save(tmp_path / "sweep_fedsiam_mnist_here.json", SOURCE, found)
    other = [cell("FedSem", ".1, IID", [0.25])]
    harness.save(tmp_path / "sweep_fedsiam_mnist_away.json", SOURCE | {"machine": "another"}, other)
    assert block("sweep fedsiam_mnist", tmp_path).splitlines() == [
        "Machine: a machine; °: another.",
        "",
        "||.1, IID|II|MB up; down|",
        "|---|---|---|---|",
        "|FedSem|62.5 ± 0.0; 25.0°|failed: seed 1: fell|100; 200|",
        "|ours|50.0 ± 0.0 [55.1] (12)|62.5 ± 17.7 !1|9.50 to 10; 200|",
    ]  # FedSem and IID are a row and a column of the sweep's file, `ours` and II are not
    harness.save(tmp_path / "sweep_fedsiam_mu_here.json", SOURCE, [cell("MNIST", "0", [0.5], table="fedsiam_mu")])
    harness.save(tmp_path / "sweep_fedsiam_kl_here.json", SOURCE, [cell("MNIST", "KL", [0.5], table="fedsiam_kl")])
    assert block("sweep fedsiam_mu fedsiam_kl", tmp_path).splitlines() == [
        "Machine: a machine. MB up; down: 100; 200.",
        "",
        "||accuracy, %|",
        "|---|---|",
        "|`fedsiam_mu` 0|50.0|",
        "|`fedsiam_kl` KL|50.0|",
    ]
    for name, rows in (
        ("fl2_settings-small", ["one pretraining", "labels alone"]),
        ("feddure_iterations-small", ["T = 1, 40 rounds", "T = 5, 40 rounds"]),
    ):
        own = [cell(row, "", [0.5], table=name) for row in reversed(rows)]
        harness.save(tmp_path / f"sweep_{name}_here.json", SOURCE, own)
        assert [line.split("|")[1] for line in block(f"sweep {name}", tmp_path).splitlines()[4:]] == rows  # as in its file
