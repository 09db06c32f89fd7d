"""The benchmark of evaluations: what is evaluated, in which order, and what is compared."""

import itertools
import json
import types

import pytest

from benchmarks import evaluation, workloads
from benchmarks.workloads import Workload
from fedjax_ssl.simulation.simulator import Simulator

DEVICES = 4


@pytest.fixture(autouse=True)
def small(monkeypatch):
    model = {"name": "cnn", "width": 2}
    monkeypatch.setitem(workloads.WORKLOADS, "small", Workload({"name": "fl2"}, model, (8, 8, 1), "server", 16, {}, 1))


def test_sizes_take_turns_in_balanced_orders_and_are_compared_within_them(monkeypatch):
    now, ran, takes = types.SimpleNamespace(s=0.0), [], itertools.count()

    def evaluate(self, state):
        size = self._size
        ran.append(size)
        now.s += {25: 2.0, 50: 1.0}[size] * (1 + next(takes) // 4)  # the machine becomes slower
        return {}

    def in_layout(experiment, layout):
        simulator = types.SimpleNamespace(_size=layout.forward_batch_size)
        simulator.evaluate = types.MethodType(evaluate, simulator)
        return types.SimpleNamespace(simulator=simulator)

    monkeypatch.setattr(evaluation, "in_layout", in_layout)
    monkeypatch.setattr(evaluation.time, "perf_counter", lambda: now.s)
    usual, other = evaluation.measure("small", [50], 0.0)
    assert ran == [25, 50, *[25, 50, 50, 25] * 3]  # a turn to warm up, then six
    assert (usual["images"], usual["turns"]) == (DEVICES * 1_000, evaluation.LEAST_TURNS)
    assert usual["of_usual"] == [1.0] * 3
    assert other["of_usual"] == pytest.approx([2.0] * 3)
    assert other["images_per_s"][0] < other["images_per_s"][2] <= DEVICES * 1_000 / 1.0


def test_one_command_evaluates_every_image_in_every_size(monkeypatch, tmp_path, capsys):
    sizes, evaluate, path = [], Simulator.evaluate, tmp_path / "out.json"

    def noted(self, state):
        row = evaluate(self, state)
        sizes.append(row["eval/accuracy"])
        return row

    monkeypatch.setattr(Simulator, "evaluate", noted)
    monkeypatch.setattr("sys.argv", ["x", "--workloads", "small", "--sizes", "50", "--seconds=0", f"--json={path}"])
    evaluation.main()
    written = json.loads(path.read_text())
    assert [one["size"] for one in written["results"]] == [25, 50]
    assert all(one["images_per_s"][1] > 0 for one in written["results"])
    assert len(sizes) == 2 * (1 + evaluation.LEAST_TURNS)
    assert len(set(sizes)) == 1  # the same result of each
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["small", "50"]


@pytest.mark.parametrize(
    ("sizes", "measured", "turns"),
    [(None, [25, 50, 100], 6), ([25, 5, 10, 50, 125, 250, 500], [25, 5, 10, 50, 125, 250, 500], 14)],
)
def test_turns_are_whole_sets_of_orders_of_the_sizes_a_search_tries_and_of_others(monkeypatch, sizes, measured, turns):
    monkeypatch.setattr(Simulator, "evaluate", lambda self, state: {})
    found = evaluation.measure("small", sizes, 0.0)
    assert [one["size"] for one in found] == measured
    assert {one["turns"] for one in found} == {turns}


@pytest.mark.parametrize(("sizes", "line"), [(["0"], "at least 1"), (["64", "96", "125"], "up to 24,000 images")])
def test_sizes_that_cannot_be_measured_are_refused(monkeypatch, capsys, sizes, line):
    monkeypatch.setattr("sys.argv", ["x", "--sizes", *sizes])
    with pytest.raises(SystemExit):
        evaluation.main()
    assert f"argument --sizes: {line}" in capsys.readouterr().err
