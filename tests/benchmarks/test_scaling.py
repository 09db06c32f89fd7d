"""The fits of the scaling benchmark, and one of its points."""

import json

import numpy as np
import pytest

from benchmarks import scaling


def test_the_exponent_is_a_power_laws_and_marginal_leaves_the_fixed_cost_out():
    x = (10, 30, 100, 300, 1000)
    found = scaling.exponents(x, [2e-3 * at**1.5 for at in x])
    assert found["exponent"] == pytest.approx((1.5, 0), abs=1e-6)
    with_a_fixed_cost = scaling.exponents(x, [0.5 + 2e-3 * at for at in x])
    assert with_a_fixed_cost["exponent"][0] < 0.8
    assert with_a_fixed_cost["marginal"] == pytest.approx((1, 0), abs=1e-6)
    flat = scaling.exponents(x, [0.5, 0.49, 0.5, 0.48, 0.5])
    assert abs(flat["exponent"][0]) < flat["exponent"][1] < 0.03
    assert "marginal" not in flat  # not all is beyond the first


def test_the_interval_is_students():
    rng = np.random.default_rng(0)
    x, y = np.arange(6.0), np.arange(6.0) + rng.standard_normal(6)
    design = np.stack([x, np.ones(6)], axis=1)
    solution, (residual,), *_ = np.linalg.lstsq(design, y)
    deviation = np.sqrt(residual / 4 * np.linalg.inv(design.T @ design)[0, 0])
    assert scaling.slope(x, y) == pytest.approx((solution[0], 2.776445 * deviation))  # t of 4 degrees of freedom, .975
    assert scaling.slope(x[:2], y[:2])[1] is None


def test_a_point_has_a_rounds_time_and_memory(monkeypatch):
    monkeypatch.setattr(scaling, "LEAST_S", 0.0)
    got = scaling.measure({"cohort": 3, "clients": 20, "steps": 2, "devices": 1})
    assert (got["rounds"], got["strategy"]) == (scaling.LEAST_ROUNDS, "scan")
    assert 0 < got["quartiles_s"][0] <= got["round_s"] <= got["quartiles_s"][1]
    assert got["peak_bytes"] > 1e8


def test_memory_is_read_every_so_many_rounds(monkeypatch):
    monkeypatch.setattr(scaling, "EVERY", 2)
    resident = scaling.measure({"cohort": 3, "clients": 20, "steps": 2, "devices": 1}, rounds=6)["resident"]
    assert [number for number, _ in resident] == [2, 4, 6]
    assert all(size > 1e7 for _, size in resident)


def test_a_point_that_fails_is_named_and_the_others_are_kept(monkeypatch, tmp_path, capsys):
    def worker(point, rounds=0):
        if point["devices"] == 4:
            return {"error": "no such device"}
        at = {"quartiles_s": [0.9, 1.1], "peak_bytes": 1e9, "build_s": 1.0, "compile_s": 2.0}
        return {"round_s": float(point["devices"]), **at}

    path = tmp_path / "out.json"
    monkeypatch.setattr(scaling, "worker", worker)
    monkeypatch.setattr("sys.argv", ["scaling.py", "--only", "devices", f"--json={path}"])
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["devices", "4", "no", "such", "device"]
    assert lines[-1] == "devices  exponent: 1.00 ± ?"
    (written,) = json.loads(path.read_text())["results"]
    assert (written["exponent"], written["points"][2]) == ([1.0, None], {"error": "no such device"})


def test_the_growth_of_memory_leaves_the_first_rounds_out(monkeypatch, capsys):
    resident = [[500, 9e9], [1000, 8e9], *([n, 1e8 + 3 * n] for n in range(1500, 4000, 500))]
    monkeypatch.setattr(scaling, "worker", lambda point, rounds=0: {"resident": resident})
    assert scaling.memory()["growth"] == pytest.approx((3.0, 0.0), abs=1e-6)
    assert "growth: 3.0 ± 0.0 bytes a round" in capsys.readouterr().out
