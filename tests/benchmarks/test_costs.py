"""The table of costs: what a method's program does, in units of passes over one batch and of whole models."""

import pytest

from benchmarks import costs


@pytest.mark.parametrize(
    ("method", "p", "b", "down", "up"),
    [
        # One batch of labels, once forward and back; one model each way.
        ("fedavg", 0, 1, 1, 1),
        # Two helpers and the plain view; sigma's batch and psi's. Both parts down, and of psi what differs, of two helpers too.
        ("fedmatch", 3, 2, None, None),
    ],
)
def test_costs_of(monkeypatch, method, p, b, down, up):
    monkeypatch.setattr(costs, "SETTING", costs.SETTING | {"model.width": 2, "client.optimizer.name": "sgd"})
    line = costs.measure(method)
    assert line["P"] == pytest.approx(p, abs=0.01)  # FedMatch's embedding is one image more
    assert line["B"] == pytest.approx(b)
    if down is not None:
        assert (line["R_down"], line["R_up"]) == (down, up)
    else:
        assert 1 < line["R_down"] <= 4
        assert 0 < line["R_up"] <= 2
    assert line["round_s"] > 0
