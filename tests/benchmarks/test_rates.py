"""The learning rates of the digits against those that were tried."""

import pytest

from benchmarks import harness
from configs import common, digits
from launch import config_file


@pytest.mark.parametrize("place", ["server", "clients", "some_clients"])
def test_the_digits_have_the_learning_rates_that_were_the_best_of_those_tried(place):
    runs = harness.load(harness.RESULTS / "digits_rates.json")
    tried = [one for run in runs for one in run["results"] if one["case"]["labels_at"] == place]
    table = config_file.sweep("field" if place == "some_clients" else f"digits_{place}", small=False)
    cells = {cell.row: cell for cell in table.cells()}
    assert tried
    assert {one["case"]["row"] for one in tried} <= cells.keys()
    for row in {one["case"]["row"] for one in tried}:
        of_row = [one for one in tried if one["case"]["row"] == row]
        best = max(of_row, key=lambda one: -1.0 if "error" in one else one["accuracy_last5"])["case"]["overrides"]
        config = digits.get_config(f"{cells[row].config.removeprefix('digits:').partition(',')[0]},labels_at={place}")
        config.update_from_flattened_dict(cells[row].overrides)
        before = config.to_dict()
        who = {training: getattr(config, training) in common.trainings(config) for training in ("client", "server")}
        config.update_from_flattened_dict({key: rate for key, rate in best.items() if who.get(key.partition(".")[0], True)})
        assert config.to_dict() == before, row
