"""The table of costs: what a method's program does, in units of passes over one batch and of whole models."""

import pytest

from benchmarks import costs


@pytest.mark.parametrize(
    ("method", "p", "b", "down", "up"),
    [
        # One batch of labels, once forward and back; one model each way, down with its static batch-norm statistics.
        pytest.param("fedavg", 0, 1, (1, 1.1), (1, 1), marks=pytest.mark.slow),
        # Two helpers; sigma's batch, and psi's in two views. Both parts down, and of psi what differs, of two helpers too.
        pytest.param("fedmatch", 2, 3, (1, 4.1), (0, 2), marks=pytest.mark.slow),
        # A batch of labels; of the others both experts' outputs, and back through the strong view and, for KL, the plain one.
        pytest.param("fedlabel", 2, 3, (1, 1.1), (1, 1.1), marks=pytest.mark.slow),
        # Three networks label; back for the fine-tuning of the joined one, for the labels and for the pseudo-labels.
        pytest.param("fedtrinet", 3, 3, (1, 1.1), (1, 1.1), marks=pytest.mark.slow),
    ],
)
def test_costs_of(monkeypatch, method, p, b, down, up):
    monkeypatch.setattr(costs, "SETTING", costs.SETTING | {"model.width": 2, "client.optimizer.name": "sgd"})
    one = costs.measure(method)
    assert one["P"] == pytest.approx(p, abs=0.03)  # FedMatch's embedding is one image more, half of 287 one less
    assert one["B"] == pytest.approx(b)
    for key, (least, greatest) in (("R_down", down), ("R_up", up)):
        assert least <= one[key] <= greatest
    assert 0 < one["quartiles"][0] <= one["seconds"] <= one["quartiles"][1]
    assert costs.rows(one)[0][0] == method
