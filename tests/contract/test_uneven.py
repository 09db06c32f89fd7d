"""Every method with uneven clients: dropout, a trace, a deadline that shortens trainings, and a round with nobody."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import engine, tiny

pytestmark = pytest.mark.reliability

IN_CI = (("fl2", "server"),)
DEADLINE = 10.0
SYSTEM = {
    "participation": "available", "trace": "diurnal", "round_s": 100.0, "period_s": 300.0, "window_s": 1.0, "dropout": 0.3,
    "speed": 60.0, "speed_sigma": 1.0, "up": 1e5, "down": 1e5, "bandwidth_sigma": 0.5, "deadline_s": DEADLINE,
    "late": "shortened",
}  # fmt: skip


def uneven(method, labels_at):
    """The experiment in whose second round of three nobody can be reached."""
    system = {f"system__{key}": value for key, value in SYSTEM.items()}
    experiment = tiny.experiment(method, labels_at=labels_at, **tiny.confident(method), **system)
    (tables,) = experiment.problem.tables
    windows = np.float32([[[0, 100], [200, 300]]] * 4 + [[[200, 300], [0, 0]]] * 4)
    profiles = tables["profiles"]._replace(windows=windows)
    return dataclasses.replace(experiment, problem=experiment.problem._replace(tables=({**tables, "profiles": profiles},)))


@pytest.mark.parametrize("case", tiny.params(tiny.WITH_CLIENTS, fast=(), ci=IN_CI))
def test_a_method_keeps_its_promises(case):
    simulator, states, rows = engine.simulate(uneven(*case), "chunked", rounds=3)
    first, second, third = rows
    for row in rows:
        assert row["client/non_finite"] == row["server/non_finite"] == 0
        assert row["sim/seconds"] <= DEADLINE * (1 + 1e-5)
        assert row["client/participants"] <= 5 - row["sim/absent"] - row["sim/dropped"]
    assert [row["sim/absent"] for row in rows] == [1, 5, 0]  # 4 of 8 can be reached, nobody, all: a cohort has 5
    for key in ("client/participants", "comm/bytes_up", "cost/backward_passes"):
        assert first[key] + third[key] > 0
    nothing = ("comm/bytes_up", "comm/bytes_down", "cost/forward_passes", "cost/backward_passes", "perf/client_images")
    assert not any(second[key] for key in (*nothing, "client/participants", "sim/dropped", "sim/seconds"))
    assert not any(key.startswith(("client/", "diagnostics/")) and second[key] for key in second)
    assert jax.tree.all(jax.tree.map(np.array_equal, states[1].clients, states[2].clients))
    if case[1] == "clients":  # the server does not train
        assert jax.tree.all(jax.tree.map(np.array_equal, states[1].server.weights, states[2].server.weights))
    engine.assert_goes_on(simulator, states, rows, 1)
