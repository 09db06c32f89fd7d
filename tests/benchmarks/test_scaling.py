"""The fits of how time and memory grow, and the points that they are of."""

import numpy as np
import pytest

from benchmarks import scaling

COHORTS = scaling.SERIES["cohort"][1]


def noisy(values, seed, part=0.02):
    return list(np.asarray(values) * np.exp(part * np.random.default_rng(seed).standard_normal(len(values))))


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.4])
def test_an_exponent_is_found_beside_a_fixed_cost(exponent):
    exact = [0.02 + 1e-3 * x**exponent for x in COHORTS]
    fit = scaling.power_law(COHORTS, exact, fixed=True)
    assert fit["exponent"] == pytest.approx(exponent, abs=1e-3)
    assert fit["interval"] == pytest.approx((exponent, exponent), abs=0.01)
    assert scaling.power_law(COHORTS, exact, fixed=False)["interval"][1] < exponent  # which is why the cost is fitted


def test_an_interval_of_95_percent_holds_the_exponent_about_as_often():
    law = [0.05 + 2e-3 * x for x in COHORTS]
    intervals = [scaling.power_law(COHORTS, noisy(law, seed), fixed=True)["interval"] for seed in range(200)]
    assert 0.88 <= np.mean([low <= 1 <= high for low, high in intervals]) <= 1.0


def test_the_interval_of_a_slope_is_students():
    rng = np.random.default_rng(0)
    x, y = np.arange(6.0), np.arange(6.0) + rng.standard_normal(6)
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    half = 2.776445 * np.sqrt(covariance[0, 0])  # t of 4 degrees of freedom, .975
    fit = scaling.power_law(np.exp(x), np.exp(y), fixed=False)
    assert fit == {"exponent": pytest.approx(slope), "interval": pytest.approx((slope - half, slope + half))}
    assert scaling.power_law([1, 2], [1, 2], fixed=False)["interval"] is None


def test_all_processes_count_for_seconds_and_medians_for_bytes():
    sizes = noisy([1e7 + 1e5 * x for x in COHORTS], 0, 0.05)
    seconds = noisy([0.02 + 2e-3 * x for x in COHORTS], 1)
    points = [{"seconds": s, "program_bytes": size, "peak_bytes": 7} for s, size in zip(seconds, sizes, strict=True)]
    once, thrice = (scaling.fits("cohort", {x: n * [of] for x, of in zip(COHORTS, points, strict=True)}) for n in (1, 3))
    assert thrice["program_bytes"] == once["program_bytes"]
    assert np.diff(thrice["seconds"]["interval"]) < 0.6 * np.diff(once["seconds"]["interval"])
    assert "peak_bytes" not in once  # the same for all
    doubling = {10**n: [{"seconds": 2.0**n, "program_bytes": 1, "peak_bytes": 7}] for n in (2, 3, 4)}
    assert scaling.fits("clients", doubling)["seconds"]["exponent"] == pytest.approx(np.log10(2))  # without a fixed cost


def test_a_point_that_fails_is_named_and_the_others_are_fitted(monkeypatch):
    def measure(point, *, on_cpu):
        assert on_cpu
        ran.append(point["devices"])
        ran_well = {"seconds": 2.0 * point["devices"], "program_bytes": 1, "peak_bytes": 1, "device": "1 x cpu"}
        return {"error": "no such device"} if point["devices"] == 4 else ran_well

    ran = []
    monkeypatch.setattr(scaling, "measure", measure)
    found = scaling.series("devices")
    assert sorted(ran) == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert ran != sorted(ran)  # nothing drifts with x
    assert (found["error"], found["x"]) == ("no such device", [1, 2, 4])
    assert found["fits"]["seconds"]["exponent"] == pytest.approx(1.0)
    assert scaling.rows(found)[0][:2] == ["devices: no such device", "1 to 4 devices"]
    assert scaling.rows(found)[0][5] == "flat"


def test_states_and_data_are_where_a_series_says():
    for name, persistent, data in (("clients", False, "device"), ("states", True, "device"), ("hosted", True, "host")):
        config = scaling.config_of(scaling.BASE | scaling.SERIES[name][2])
        assert config["client"]["optimizer"]["persistent"] == persistent
        assert config["execution"]["data"] == data


@pytest.mark.slow
@pytest.mark.parametrize("also", [{}, {"states": 1, "hosted": 1}])
def test_a_point_has_a_rounds_time_and_memory(monkeypatch, also):
    monkeypatch.setattr(scaling, "SECONDS", 0.0)
    got = scaling.measure(scaling.BASE | {"cohort": 2, "clients": 4, "steps": 1, "devices": 1} | also)
    assert got["repeats"] == scaling.LEAST
    assert 0 < got["quartiles"][0] <= got["seconds"] <= got["quartiles"][1]
    assert got["peak_bytes"] > 1e8 > got["program_bytes"] > 1e4


@pytest.mark.slow
def test_memory_of_a_run_is_watched_until_it_ends():
    got = scaling.memory(rounds=400, every_s=0.05)
    rounds, sizes = zip(*got["resident"], strict=True)
    assert list(rounds) == sorted(set(rounds))
    assert rounds[-1] <= 400
    assert min(sizes) > 1e7
    assert len(got["growth"]) == 2
