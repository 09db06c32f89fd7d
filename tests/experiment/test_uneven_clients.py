"""The keys of `system`: what a config makes of them, what they refuse, and what a run with none of them is."""

import numpy as np
import pytest

from configs import digits
from fedjax_ssl.experiment import estimate
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.divergence import divergence
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.runs import provenance
from fedjax_ssl.simulation.round import FAULT
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny, toy

pytestmark = pytest.mark.reliability

RATES = "client,examples_per_s,up_bytes_per_s,down_bytes_per_s\n" + "".join(
    f"{k},{k + 1},{10 * k + 10},1e3\n" for k in range(8)
)


def experiment(**system):
    return tiny.experiment("fedavg", network="linear", **{f"system__{key}": value for key, value in system.items()})


def lowered(experiment):
    """The text of a round's program."""
    simulator = Simulator(experiment.problem, toy.EXECUTIONS["chunked"])
    state, _ = simulator._initialize.eval_shape(simulator._inputs, simulator._key, simulator._pools)
    with simulator._round._tracing():
        return simulator._round._jitted.lower(state, simulator._inputs, simulator._pools).as_text()


@pytest.mark.ci
def test_without_uneven_clients_the_program_is_the_same_and_with_them_another():
    even = experiment()
    assert even.problem.system is None
    unused = experiment(round_s=1.0, period_s=1e9, window_s=5.0, late="shortened", speed_sigma=1.0, bandwidth_sigma=1.0)
    texts = [lowered(one) for one in (even, unused, experiment(dropout=0.3))]
    assert texts[0] == texts[1] != texts[2]


def test_keys_become_rules_and_profiles(tmp_path):
    (tmp_path / "rates.csv").write_text(RATES)
    (tmp_path / "trace.csv").write_text("client,start,end\n3,0,10\n")
    files = {"file": str(tmp_path / "rates.csv"), "trace": str(tmp_path / "trace.csv")}
    made = experiment(**files, participation="available", period_s=90.0, deadline_s=5.0, late="shortened")
    rules, profiles = made.problem.system, made.problem.tables[0]["profiles"]
    assert rules[:7] == ("available", 600.0, 90.0, 0.0, 5.0, True, True)
    late = experiment(**files | {"trace": ""}, participation="async", concurrency=15, staleness=2.0).problem.system
    assert (late.is_async, late.concurrency, late.staleness) == (True, 15, 2.0)
    for key, value in {"trace": "diurnal", "deadline_s": 2.5, "dropout": 0.3}.items():
        with pytest.raises(
            ValueError, match=rf"^system.participation: got async with system.{key}={value}, accepted: without$"
        ):
            experiment(participation="async", speed=5.0, **{key: value})
    assert profiles.speed.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert profiles.up.tolist() == [10, 20, 30, 40, 50, 60, 70, 80]
    assert profiles.windows.tolist() == [[[0, 10]] if k == 3 else [[0, 0]] for k in range(8)]
    # Other devices are other data: a run does not go on with them.
    digests = provenance.data_digests(made)
    (tmp_path / "rates.csv").write_text(RATES.replace("1e3", "2e3"))
    assert provenance.data_digests(experiment(**files, participation="available", period_s=90.0)) != digests


def test_each_seed_has_devices_of_its_own_that_its_run_alone_has_too():
    config = digits.get_config("fedavg")
    config.system.update(speed=50.0, speed_sigma=1.0, trace="diurnal")
    both, alone = (build({**config.to_dict(), "seeds": seeds, "seed": seed}) for seeds, seed in ((2, 0), (1, 1)))
    first, second = (tables["profiles"] for tables in both.problem.tables)
    np.testing.assert_array_equal(second.speed, alone.problem.tables[0]["profiles"].speed)
    np.testing.assert_array_equal(second.windows, alone.problem.tables[0]["profiles"].windows)
    assert not np.array_equal(first.speed, second.speed)
    assert np.isinf(first.up).all()


@pytest.mark.ci
def test_an_estimate_is_of_all_that_clients_would_do():
    even, uneven = experiment(), experiment(dropout=1.0, speed=1.0, deadline_s=1.0, late="shortened")
    assert estimate.counted(uneven) == estimate.counted(even)
    assert estimate.traffic(uneven) == estimate.traffic(even)


def test_a_method_without_clients_has_none_that_are_uneven():
    assert tiny.experiment("supervised", system__dropout=0.3).problem.system is None


def test_a_run_has_diverged_when_all_clients_that_were_heard_of_returned_nan():
    settings = Settings.from_dict({"cohort_size": 5})
    row = {"server/non_finite": 0, "client/non_finite": 2, "sim/dropped": 2, "sim/absent": 1, FAULT: {3: 1, 4: 1}}
    assert "all 2 clients returned NaN" in divergence(7, row, settings)
    assert not divergence(7, row | {"sim/absent": 0}, settings)
    assert not divergence(7, row | {"client/non_finite": 0, "sim/absent": 3, FAULT: {}}, settings)
    assert not divergence(7, row | {"client/non_finite": 1, "sim/absent": 2, FAULT: {3: 1}}, settings)
    alone = row | {"client/non_finite": 1, "sim/dropped": 0, "sim/absent": 0, FAULT: {3: 1}}
    assert "the client returned NaN" in divergence(7, alone, Settings.from_dict({"cohort_size": 1}))
