"""Runs from Python without files: their metrics as arrays, tables and curves."""

import dataclasses
import importlib.util

import jax
import matplotlib
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.divergence import REASON
from tests import tiny
from tests.commands import without_times

matplotlib.use("agg")
pytestmark = pytest.mark.usefixtures("own_methods")
SPLIT = {"data__name": "digits", "data__num_labels": 40, "rounds": 4, "eval_every": 2}


def config(**keys):
    return tiny.config("average", network="linear", **SPLIT | keys)


@pytest.fixture(scope="module")
def seeds(own_methods):
    return fedjax_ssl.run(config(seeds=2, vary="method.scale", values=(0.5, 2.0)))


def test_a_history_has_the_rows_of_the_rounds_and_their_last_state():
    history = fedjax_ssl.run(config())
    *_, (state, last) = build(config()).rounds()
    assert [row["round"] for (row,) in history.rows] == [1, 2, 3, 4]
    assert without_times(history.rows[-1][0]) == without_times(last)
    assert int(history.state.round) == int(state.round) == 4
    assert np.isnan(history["eval/accuracy"]).tolist() == [True, False, True, False]
    assert history["eval/accuracy"][-1] == last["eval/accuracy"] == history.last()[0]
    with pytest.raises(KeyError, match=r"got 'eval/acuracy'.*did you mean 'eval/accuracy'"):
        history["eval/acuracy"]


@pytest.mark.parametrize("has_pandas", [True, False])
def test_a_table_has_a_row_for_each_round_and_run(seeds, has_pandas, monkeypatch):
    if has_pandas:
        pytest.importorskip("pandas")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    table = seeds.table()
    assert isinstance(table, dict) != has_pandas
    columns = {name: np.asarray(table[name]) for name in ("round", "seed", "scale", "client/loss")}
    assert columns["round"].tolist() == np.repeat([1, 2, 3, 4], 4).tolist()
    assert columns["seed"].tolist() == [0, 0, 1, 1] * 4
    assert columns["scale"].tolist() == [0.5, 2.0] * 8
    expected = [row["client/loss"] for rows in seeds.rows for row in rows]
    assert columns["client/loss"].tolist() == expected


def test_a_plot_has_a_line_for_each_value_the_mean_over_its_seeds(seeds):
    axes = seeds.plot("client/loss")
    loss = seeds["client/loss"]
    for line, own in zip(axes.lines, (loss[:, [0, 2]], loss[:, [1, 3]]), strict=True):
        np.testing.assert_allclose(line.get_ydata(), own.mean(1))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["scale=0.5", "scale=2"]
    assert len(axes.collections) == 2
    assert [line.get_xdata().tolist() for line in seeds.plot().lines] == [[2, 4]] * 2  # of evaluated rounds


def test_a_history_begins_at_the_weights_of_another_run():
    trained, still = (
        tiny.config("fedavg", network="linear", labels_at="clients", rounds=1, client__optimizer__learning_rate=rate)
        for rate in (0.1, 1e-12)
    )
    before = fedjax_ssl.run(trained)
    after = fedjax_ssl.run(still, start=(before.experiment, before.state))
    kernels = [jax.tree.leaves(one.state.server.weights.params)[-1] for one in (before, after)]
    np.testing.assert_allclose(*kernels, atol=1e-6)


def test_experiments_are_compared_by_the_mean_of_their_last_values(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = fedjax_ssl.compare({"one": config(), "two": config(seeds=2)})
    table, last = found.table(), found["two"]["eval/accuracy"][-1]
    assert table["name"].tolist() == ["one", "two"]
    assert table["runs"].tolist() == [1, 2]
    np.testing.assert_allclose(table["eval/accuracy"], [found["one"]["eval/accuracy"][-1], last.mean()])
    np.testing.assert_allclose(table["sd"], [np.nan, last.std(ddof=1)])
    assert len(found.plot().lines) == 2
    rows = (*found["two"].rows, (found["two"].rows[-1][0], {"round": 5, REASON: "NaN"}))
    diverged = dataclasses.replace(found["two"], rows=rows)
    assert np.isnan(diverged.last()).tolist() == [False, True]
    with pytest.raises(ValueError, match=r"^two: client.epochs, client.steps: got 0 and 0"):
        fedjax_ssl.compare({"one": config(), "two": config(client__epochs=0, client__steps=0)})
    with pytest.raises(ValueError, match="configs: got average, average, accepted: a dict from names"):
        fedjax_ssl.compare([config(), config()])


def test_a_live_curve_outside_of_a_notebook_is_one_line():
    with pytest.raises(ValueError, match="live: got 'eval/accuracy' outside of a notebook"):
        fedjax_ssl.run(config(), live="eval/accuracy")
