"""The benchmark of local steps: what it counts, and one combination of small size."""

import argparse
import dataclasses
import json

import pytest

from benchmarks import round_time
from benchmarks.round_time import Workload

SMALL = Workload({"name": "fl2"}, {"name": "linear"}, (8, 8, 1), "server", 16, {})


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(round_time.WORKLOADS, "small", SMALL)


def test_the_arithmetic_of_a_pass_is_the_networks():
    forward, back = round_time.costs("small", "float32")["flops"]
    assert forward == pytest.approx(2 * 64 * 10, rel=0.1)  # a product with a kernel of 64 x 10
    assert back == pytest.approx(2 * 64 * 10, rel=0.1)  # its transpose: the gradient for the kernel alone


def test_a_share_is_the_passes_arithmetic_over_time_and_ceiling(monkeypatch):
    monkeypatch.setattr(round_time, "costs", lambda *_: {"flops": (10.0, 30.0), "bytes accessed": (1.0, 2.0)})
    case = {"workload": "small", "conv": "hybrid", "loop": "scan", "compiler": "default", "dtype": "float32", "cohort": 2}
    got = round_time.measure(case, 3, 0.0, round_time.Ceilings({"float32": 1e6}, 1e3))
    assert got["rounds"] == round_time.LEAST_ROUNDS
    one = round_time.experiment(case, steps=3)
    first, second = (row for _, (_, row) in zip(range(2), one.rounds(), strict=False))
    forward, back = (second[key] - first[key] for key in ("cost/forward_passes", "cost/backward_passes"))
    assert back >= 2 * 3 * 16  # clients, steps, images
    assert got["matmul_share"] * got["round_s"] * 1e6 == pytest.approx(10 * forward + 30 * back)
    assert got["memory_share"] * got["round_s"] * 1e3 == pytest.approx(forward + 2 * back)
    assert got["images_per_s"] > 0 < got["peak_bytes"]
    assert got["quartiles"][0] <= got["images_per_s"] <= got["quartiles"][1]


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Runs the command on `small`: the results that it writes."""

    def main(*words):
        path = tmp_path / "out.json"
        monkeypatch.setattr("sys.argv", ["round_time.py", "--workloads", "small", "--conv", "im2col", *words, f"--json={path}"])
        round_time.main()
        return json.loads(path.read_text())

    return main


def test_a_line_has_the_rate_and_the_shares_of_measured_ceilings(results, capsys):
    written = results("--loop", "scan", "--compiler", "default", "--fixed", "--seconds", "0", "--steps", "1")
    assert all(rate > 1e6 for rate in (written["ceilings"]["flops"]["float32"], written["ceilings"]["bandwidth"]))
    (one,) = written["results"]
    assert 0 < one["matmul_share"] < 1
    assert one["memory_share"] > 0
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[:7] == ["small", "im2col", "scan", "default", "float32", "2", f"{one['images_per_s']:,.0f}"]


def test_what_has_no_time_left_is_named_and_what_fails_has_its_error(results, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    monkeypatch.setattr(round_time, "ceilings", lambda dtypes: round_time.Ceilings(dict.fromkeys(dtypes, 1e9), 1e9))
    monkeypatch.setattr(round_time, "measure", fails)
    assert [one["left_out"] for one in results("--loop", "scan", "2", "--fixed", "--budget", "0")["results"]] == ["no time"] * 4
    with pytest.raises(SystemExit) as ended:
        results("--loop", "scan", "--fixed")
    assert ended.value.code == 1
    assert "RESOURCE_EXHAUSTED: out of memory" in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(SystemExit):
        results("--loop", "scna")
    assert "got scna, accepted: scan, vmap, unrolled, separate, or" in capsys.readouterr().err


def test_loops_whose_steps_are_written_out_and_the_tuned_layout(monkeypatch):
    usual = {key: round_time.ON_CPU[key] for key in ("conv", "loop", "dtype", "cohort")}
    axes = argparse.Namespace(workloads=["small"], compiler=["lean"], fixed=False, **usual)
    cases = list(round_time.combinations(axes))
    assert [case["loop"] for case in cases if case["conv"] == "grouped"] == ["separate"]  # no loop is around it
    assert len(cases) == sum(map(len, round_time.WORTH_TRYING.values())) + 1
    axes.conv = ["grouped"]
    assert [case["loop"] for case in round_time.combinations(axes)] == ["scan", "vmap", "unrolled", "separate", "tuned"]
    (separate,) = (case for case in cases if (case["loop"], case["conv"]) == ("separate", "grouped"))
    tuned = cases[-1]
    made = round_time.experiment(separate, steps=1).layout
    assert (made.strategy, made.steps, made.compiler, made.conv) == ("separate", "unrolled", "lean", "grouped")
    assert round_time.experiment(cases[0], steps=1).layout.steps == "loop"
    monkeypatch.setattr(round_time, "tune", lambda made: dataclasses.replace(made, num_params=-1))
    assert round_time.experiment(tuned, steps=1).num_params == -1
    rates = [{**case, "images_per_s": rate} for case, rate in zip(cases[:2], (10.0, 20.0), strict=True)]
    assert round_time.of_best({**tuned, "images_per_s": 19.0}, [*rates, cases[2]]) == {"of_best": 0.95}
    assert round_time.of_best({**tuned, "cohort": 3, "images_per_s": 19.0}, rates) == {}
