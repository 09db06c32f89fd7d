"""The fits of how time and memory grow, and the points that they are of."""

import pytest

from benchmarks import scaling

COHORTS = scaling.SERIES["cohort"][1]


def test_an_exponent_is_found_beside_a_fixed_cost():
    exact = [0.02 + 1e-3 * x**1.4 for x in COHORTS]
    fit = scaling.power_law(COHORTS, exact, fixed=True)
    assert fit == {"exponent": pytest.approx(1.4, abs=1e-3), "interval": pytest.approx((1.4, 1.4), abs=0.01)}
    assert scaling.power_law(COHORTS, exact, fixed=False)["interval"][1] < 1.4  # which is why the cost is fitted


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
