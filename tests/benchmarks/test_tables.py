"""Tables of experiments: what a line says, and what becomes of a run that fails."""

import importlib

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


def test_every_cell_of_every_table_is_a_config():
    for table in tables.TABLES.values():
        assert len({(cell.row, cell.column) for cell in table.cells}) == len(table.cells)
        for cell in table.cells:
            path, _, argument = cell.config.partition(":")
            module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
            config = module.get_config(argument)
            config.update_from_flattened_dict(cell.overrides)
            Settings.from_dict(config.to_dict()).method_options()
