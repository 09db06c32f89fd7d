"""The fits of the scaling benchmark, what they conclude, and one of its points."""

import json
import types

import numpy as np
import pytest

from benchmarks import scaling
from benchmarks.scaling import Fit

COHORTS = scaling.SERIES["cohort"].values
SMALL = scaling.BASE | {"cohort": 3, "clients": 20, "steps": 2}


def noisy(values, seed, spread=0.02):
    """The values times noise."""
    return np.asarray(values) * np.exp(spread * np.random.default_rng(seed).standard_normal(len(values)))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("fixed", [0.0, 0.05])
def test_the_exponent_of_a_power_law_with_a_fixed_cost_is_found(exponent, fixed):
    exact = [fixed + 2e-3 * x**exponent for x in COHORTS]
    found = scaling.power_and_fixed(COHORTS, exact)
    assert found.exponent == pytest.approx(exponent, abs=0.003)
    assert found.interval == pytest.approx((exponent, exponent), abs=0.006)
    assert found.growth == pytest.approx(exact[-1] / exact[0], rel=1e-3)
    if fixed:  # which is why it is fitted
        assert scaling.power(COHORTS, exact).interval[1] < exponent


def test_an_interval_of_95_percent_holds_the_exponent_as_often():
    law = [0.05 + 2e-3 * x for x in COHORTS]
    held = [
        low <= 1 <= high for low, high in (scaling.power_and_fixed(COHORTS, noisy(law, seed)).interval for seed in range(200))
    ]
    assert 0.9 <= np.mean(held) <= 0.99


def test_the_interval_of_a_slope_is_students():
    rng = np.random.default_rng(0)
    x, y = np.arange(6.0), np.arange(6.0) + rng.standard_normal(6)
    design = np.stack([x, np.ones(6)], axis=1)
    solution, (residual,), *_ = np.linalg.lstsq(design, y)
    deviation = np.sqrt(residual / 4 * np.linalg.inv(design.T @ design)[0, 0])
    assert scaling.slope(x, y) == pytest.approx((solution[0], 2.776445 * deviation))  # t of 4 degrees of freedom, .975
    assert scaling.slope(x[:2], y[:2])[1] is None
    of_logarithms = scaling.power(np.exp(x), np.exp(y))
    assert of_logarithms.interval == pytest.approx((solution[0] - 2.776445 * deviation, solution[0] + 2.776445 * deviation))


def points(x, seconds, sizes):
    at = {"device_peak_bytes": None, "peak_bytes": 1}
    return {x: [{**at, "round_s": s, "round_bytes": size}] for x, s, size in zip(x, seconds, sizes, strict=True)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "law", "expected"),
    [
        ("cohort", lambda x: 0.02 + 2e-3 * x, "linear"),
        ("cohort", lambda x: 0.02 + 1e-4 * x**1.4, "not linear"),
        ("cohort", lambda x: 0.02 + 2e-3 * x**0.6, "not linear"),
        ("cohort", lambda x: 0.5 + 1e-5 * x, "undecided: a wide interval"),  # hardly anything grows
        ("clients", lambda x: 0.5, "flat"),
        ("clients", lambda x: 0.5 * x**0.1, "not flat"),
        ("clients", lambda x: 0.5 * x**-0.02, "not flat"),  # surely a little less, over four powers of ten
        ("clients", lambda x: 0.5 + 1e-6 * x, "not flat"),  # three times as long at the last point alone
    ],
)
def test_a_verdict_may_be_no_and_undecided(name, law, expected, seed):
    x = scaling.SERIES[name].values
    found = scaling.fits(name, points(x, noisy([law(at) for at in x], seed), [1] * len(x)))
    assert found["seconds"]["verdict"] == expected


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (lambda x: 1e9 + 5e4 * x, "flat"),
        (lambda x: 1e7 + 1e5 * x, "at most linear"),
        (lambda x: 1e7 + 1e5 * x**0.5, "at most linear"),
        (lambda x: 1e7 + 1e2 * x**2, "faster than linear"),
    ],
)
def test_a_verdict_on_bytes(law, expected):
    sizes = noisy([law(x) for x in COHORTS], 0, 0.005)
    found = scaling.fits("cohort", points(COHORTS, COHORTS, sizes))
    assert found["round's bytes"]["verdict"] == expected
    assert found["peak bytes"]["verdict"] == "flat"
    assert scaling.verdict_on_bytes(Fit(1.0, (0.5, 2.0), 10.0)) == "undecided: a wide interval"
    assert scaling.verdict_on_bytes(Fit(1.0, None, 10.0)) == "undecided: a wide interval"


def test_all_processes_of_a_point_count():
    x = np.array([100, 1_000, 10_000])
    slow_at_the_last = [(1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 2.0)]
    alone = points(x, [1.0] * 3, [1] * 3)
    at = {x: [alone[x][0] | {"round_s": s} for s in seconds] for x, seconds in zip(x.tolist(), slow_at_the_last, strict=True)}
    found = scaling.fits("clients", at)["seconds"]
    logs, seconds = np.log(np.repeat(x, 3)), np.log(np.ravel(slow_at_the_last))
    assert found["exponent"] == pytest.approx(np.cov(logs, seconds)[0, 1] / np.var(logs, ddof=1))  # and not 0, the medians'
    assert found["exponent"] > 0.04
    assert found["verdict"] == "undecided: a wide interval"
    assert scaling.fits("clients", alone)["seconds"]["exponent"] == pytest.approx(0)


def test_the_same_bytes_in_each_process_are_no_surer_than_in_one():
    sizes = noisy([1e7 + 1e5 * x for x in COHORTS], 0, 0.05)
    once = points(COHORTS, COHORTS, sizes)
    thrice = {x: 3 * of_x for x, of_x in once.items()}
    found = scaling.fits("cohort", thrice)["round's bytes"]
    assert found == scaling.fits("cohort", once)["round's bytes"]
    low, high = found["interval"]
    assert high - low > 0.05


def test_bytes_that_are_all_equal_have_no_exponent():
    found = scaling.fits("cohort", points(COHORTS, COHORTS, [3_779_368] * len(COHORTS)))["round's bytes"]
    assert found == {"exponent": 0.0, "interval": None, "growth": 1.0, "verdict": "flat"}


def test_a_points_peak_is_the_median_of_its_processes_whichever_took_the_median_time():
    at = points(COHORTS, COHORTS, [1] * len(COHORTS))
    for x, of_x in at.items():
        (point,) = of_x
        of_x[:] = [
            {**point, "peak_bytes": 3 * x**2, "round_s": 2 * x},
            {**point, "peak_bytes": 9e9},
            {**point, "peak_bytes": 1},
        ]
    assert scaling.fits("cohort", at)["peak bytes"]["exponent"] == pytest.approx(2)


def test_the_devices_peak_counts_where_it_tells_one():
    at = points(COHORTS, COHORTS, [1] * len(COHORTS))
    for x, (point,) in at.items():
        point["device_peak_bytes"] = 3 * x**2
    assert scaling.fits("cohort", at)["peak bytes"]["exponent"] == pytest.approx(2)


def test_a_point_has_a_rounds_time_and_memory(monkeypatch):
    monkeypatch.setattr(scaling, "LEAST_S", 0.0)
    got, states, hosted = (scaling.measure(SMALL | also) for also in ({}, {"states": 1}, {"states": 1, "hosted": 1}))
    assert (got["rounds"], got["strategy"]) == (scaling.LEAST_ROUNDS, "scan")
    for one in (got, states, hosted):
        assert 0 < one["quartiles_s"][0] <= one["round_s"] <= one["quartiles_s"][1]
        assert one["peak_bytes"] > 1e8 > one["round_bytes"] > 1e4
    assert states["round_bytes"] > got["round_bytes"]  # clients' momentum


def test_states_of_clients_are_kept_where_a_series_says_so():
    for also, kept, data in (
        ({}, False, "device"),
        ({"states": 1}, True, "device"),
        ({"states": 1, "hosted": 1}, True, "host"),
    ):
        experiment = scaling.experiment_of(SMALL | also)
        assert (experiment.settings.client.optimizer.persistent, experiment.settings.execution.data) == (kept, data)


def test_memory_of_a_whole_run_is_read_every_so_many_rounds(monkeypatch):
    monkeypatch.setattr(scaling, "EVERY", 2)
    monkeypatch.setattr(scaling, "EVALUATED", 2)
    monkeypatch.setattr(scaling, "BASE", SMALL)
    resident = scaling.measure_memory(6)["resident"]
    assert [number for number, _ in resident] == [2, 4, 6]
    assert all(size > 1e7 for _, size in resident)


def test_a_point_that_fails_is_named_and_the_others_are_kept(monkeypatch, tmp_path, capsys):
    def worker(point, *, rounds=0, on_cpu=False):
        if point["devices"] == 4:
            return {"error": "no such device"}
        at = {"quartiles_s": [0.9, 1.1], "device_peak_bytes": None, "build_s": 1.0, "compile_s": 2.0}
        ran.append(point["devices"])
        seconds = point["devices"] * (1.0, 1.2, 0.8)[ran.count(point["devices"]) - 1]
        return {"round_s": seconds, "peak_bytes": 1e9, "round_bytes": 1e6, **at}

    path, ran = tmp_path / "out.json", []
    monkeypatch.setattr(scaling, "worker", worker)
    monkeypatch.setattr("sys.argv", ["scaling.py", "--only", "devices", f"--json={path}"])
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["devices", "4", "no", "such", "device"]
    assert lines[-1].startswith("devices  seconds: exponent 1.000 (")
    assert lines[-1].endswith("), 2 times from first to last of 2")
    assert lines[-3].split()[:6] == ["devices", "2", "2000.00", "1600.00", "-", "2400.00"]
    (written,) = json.loads(path.read_text())["results"]
    assert written["fits"]["seconds"]["exponent"] == pytest.approx(1.0)
    assert written["points"][2] == [{"error": "no such device"}] * 3
    assert [point["round_s"] for point in written["points"][0]] == [1.0, 1.2, 0.8]  # all processes, of which the line has 1.0


def test_virtual_devices_are_a_cpus_and_nothing_else_is_asked_for(monkeypatch):
    asked = []

    def run(command, *, env, **_):
        point = json.loads(command[-1].partition("=")[2])["point"]
        asked.append((point["devices"], env.get("JAX_PLATFORMS"), env["XLA_FLAGS"].split("=")[-1]))
        return types.SimpleNamespace(returncode=1, stderr="no\n")

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(scaling.subprocess, "run", run)
    scaling.series("steps")
    assert asked == [(1, None, "1")] * 3 * len(scaling.SERIES["steps"].values)
    asked.clear()
    scaling.series("devices", 5)
    assert sorted(asked) == [(n, "cpu", str(n)) for n in (1, 2, 4) for _ in range(5)]
    assert asked != sorted(asked)  # nothing drifts with x


@pytest.mark.parametrize(("a_round", "verdict"), [(3, "flat"), (-50, "flat"), (300, "not flat")])
def test_the_growth_of_memory_leaves_the_first_rounds_out(monkeypatch, capsys, a_round, verdict):
    resident = [[500, 9e9], [1000, 8e9], *([n, 1e8 + a_round * n] for n in range(1500, 4000, 500))]
    monkeypatch.setattr(scaling, "worker", lambda point, rounds=0: {"resident": resident})
    got = scaling.memory()
    assert got["growth"] == pytest.approx((a_round, 0.0), abs=1e-6)
    assert got["flat"] == (verdict == "flat")  # 300 bytes are 3 MB of 100 in 10,000 rounds
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"rounds   growth: {a_round:.1f} ± 0.0 bytes a round")
    assert last.endswith(f"10,000: {verdict}")
