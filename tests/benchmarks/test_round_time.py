"""The benchmark of local steps: what it counts, and one combination of small size."""

import json

import pytest

from benchmarks import round_time
from benchmarks.round_time import Workload

SMALL = Workload({"name": "fl2"}, {"name": "linear"}, (8, 8, 1), "server", 16, {})


def test_the_arithmetic_of_a_pass_is_the_networks():
    forward, back = round_time.costs(SMALL, "float32")["flops"]
    assert forward == pytest.approx(2 * 64 * 10, rel=0.1)  # a product with a kernel of 64 x 10
    assert back == pytest.approx(2 * 64 * 10, rel=0.1)  # its transpose: the gradient for the kernel alone


def test_a_share_is_the_passes_arithmetic_over_time_and_ceiling(monkeypatch):
    monkeypatch.setitem(round_time.WORKLOADS, "small", SMALL)
    monkeypatch.setattr(round_time, "costs", lambda *_: {"flops": (10.0, 30.0), "bytes accessed": (1.0, 2.0)})
    case = {"workload": "small", "conv": "hybrid", "loop": "scan", "dtype": "float32", "cohort": 2}
    got = round_time.measure(case, 3, 0.0, round_time.Ceilings({"float32": 1e6}, 1e3))
    assert got["rounds"] == round_time.LEAST_ROUNDS
    one = round_time.experiment(SMALL, conv="hybrid", loop="scan", dtype="float32", cohort=2, steps=3)
    first, second = (row for _, (_, row) in zip(range(2), one.rounds(), strict=False))
    forward, back = (second[key] - first[key] for key in ("cost/forward_passes", "cost/backward_passes"))
    assert back >= 2 * 3 * 16  # clients, steps, images
    assert got["matmul_share"] * got["round_s"] * 1e6 == pytest.approx(10 * forward + 30 * back)
    assert got["memory_share"] * got["round_s"] * 1e3 == pytest.approx(forward + 2 * back)
    assert got["images_per_s"] > 0 < got["peak_bytes"]
    assert got["quartiles"][0] <= got["images_per_s"] <= got["quartiles"][1]


def test_what_has_no_time_left_is_named(monkeypatch, tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["--workloads", "fl2_cnn", "--conv", "banded", "--loop", "scan", "2", "--budget", "0", f"--json={path}"]
    monkeypatch.setattr(round_time, "ceilings", lambda dtypes: round_time.Ceilings(dict.fromkeys(dtypes, 1e9), 1e9))
    monkeypatch.setattr("sys.argv", ["round_time.py", *words])
    round_time.main()
    assert capsys.readouterr().out.count("left out, no time: fl2_cnn banded") == 2
    written = json.loads(path.read_text())
    assert [case["loop"] for case in written["left_out"]] == ["scan", "2"]
    assert written["results"] == []
