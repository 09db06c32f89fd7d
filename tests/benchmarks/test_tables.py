"""Tables of experiments: what a line says, and what becomes of a run that fails."""

import importlib
import json

import numpy as np

from benchmarks import tables
from fedjax_ssl.experiment.settings import Settings

CELL = tables.Cell("fl2", "IID", "configs/digits.py:fl2", {"method.rho": 0.2})


def result(seed, accuracy, **changes):
    found = {"pseudo_label_accuracy": 0.5, "bytes_up": 2e6, "bytes_down": 4e6, "seconds": 30.0}
    return {"seed": seed, "accuracy": accuracy, **found, **changes}


def test_a_line_has_means_and_sample_deviations_in_percent():
    got = tables.line(CELL, [result(0, 0.9), result(1, 0.8, pseudo_label_accuracy=0.7, seconds=50.0)])
    deviation = np.std([90, 80], ddof=1)
    assert got == f"| fl2 | IID | 85.0 ± {deviation:.1f} | 60.0 ± 14.1 | 2.0 | 4.0 | 40 |"


def test_a_method_without_pseudo_labels_has_no_value_there():
    assert tables.line(CELL, [result(0, 0.9, pseudo_label_accuracy=None)]) == "| fl2 | IID | 90.0 | - | 2.0 | 4.0 | 30 |"


def test_no_mean_is_taken_over_a_run_that_failed():
    got = tables.line(CELL, [result(0, 0.9), {"seed": 1, "error": "error: the loss is not finite in round 15"}])
    assert got == "| fl2 | IID | failed: seed 1: error: the loss is not finite in round 15 | | | | |"


def test_a_run_that_fails_says_why(tmp_path):
    wrong = CELL._replace(overrides={"method.confidenc": 1})
    assert tables.run(wrong, 3, tmp_path, []) == {
        "seed": 3,
        "error": "error: config.method.confidenc: unknown key; did you mean config.method.confidence?",
    }


def test_a_file_keeps_its_other_cells_in_the_tables_order(tmp_path):
    path, other = tmp_path / "results.json", CELL._replace(row="before")
    table = tables.Table(1, [other, CELL])
    for cell, accuracy in ((CELL, 0.1), (other, 0.2), (CELL, 0.3)):
        tables.write(path, table, [{**cell._asdict(), "runs": [result(0, accuracy)]}], "name --jobs=1")
    written = json.loads(path.read_text())
    assert [(cell["row"], cell["runs"][0]["accuracy"]) for cell in written["cells"]] == [("before", 0.2), ("fl2", 0.3)]
    assert written["command"] == "python -m benchmarks.tables name --jobs=1"


def test_every_cell_of_every_table_is_a_config():
    for table in tables.TABLES.values():
        assert len({(cell.row, cell.column) for cell in table.cells}) == len(table.cells)
        for cell in table.cells:
            path, _, argument = cell.config.partition(":")
            module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
            config = module.get_config(argument)
            config.update_from_flattened_dict(cell.overrides)
            Settings.from_dict(config.to_dict()).method_options()
