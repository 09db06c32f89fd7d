"""Which layout is chosen by measuring: among which, on what work, what is kept, and that a run goes on as it began."""

import dataclasses
import json
import logging

import jax
import numpy as np
import pytest

from fedjax_ssl.experiment import tuning
from fedjax_ssl.experiment.layout import Layout
from tests import tiny

USUAL = Layout("sharded", 1, 4, "winograd", "loop", "default")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedjax_ssl" / "layouts"


@pytest.fixture
def clock(monkeypatch):
    """Layouts take as long as `seconds` says, in place of being measured; those that were asked for are in `tried`."""

    class Clock:
        def __init__(self):
            self.tried, self.works = [], True

        def seconds(self, layout):
            faster = {"lean": 0.5, "shifted": 0.8, "unrolled": 1.2}
            return np.prod([faster.get(value, 1.0) for value in layout])

    clock = Clock()

    class Timed:
        def __init__(self, piece):
            clock.tried.append(piece.layout)
            if piece.layout.conv == "im2col":
                raise RuntimeError("out of memory\nat length")
            self.seconds, self.works = clock.seconds(piece.layout), clock.works

        def measure(self):
            pass

    monkeypatch.setattr(tuning, "_Timed", Timed)
    return clock


def experiment(**overrides):
    return tiny.experiment(
        "fixmatch", **{"network": "cnn", "execution__strategy": "auto", "cohort_size": 8, "server__epochs": 1, **overrides}
    )


def test_the_fastest_is_found_and_kept_and_what_fails_is_passed_over(clock, cache, caplog):
    begun = experiment()
    assert begun.layout == USUAL
    with caplog.at_level(logging.INFO):
        found = tuning.tuned(begun)
    assert found.layout == USUAL._replace(compiler="lean", conv="shifted")
    assert found.settings == begun.settings
    assert "im2col, loop, lean: out of memory" in caplog.text
    assert [one.compiler for one in clock.tried] == ["default"] + ["lean"] * 7
    (kept,) = cache.glob("*.json")
    content = json.loads(kept.read_text())
    assert Layout(**content["layout"]) == found.layout
    assert [seconds for _, seconds in content["steps"]] == pytest.approx([1.0, 0.5, 0.4])
    tried = len(clock.tried)
    assert tuning.tuned(experiment()).layout == found.layout
    assert len(clock.tried) == tried  # it was kept
    kept.write_text("{")
    assert tuning.tuned(experiment()).layout == found.layout
    assert len(clock.tried) == 2 * tried


@pytest.mark.parametrize(
    "change", [{"client__batch_size": 32}, {"model__width": 5}, {"execution__dtype": "bfloat16"}, {"cohort_size": 7}]
)
def test_other_work_is_measured_anew(change):
    assert tuning.key(experiment()) != tuning.key(experiment(**change))
    assert tuning.key(experiment()) == tuning.key(experiment(seed=1, rounds=9, execution__tune="always"))


def test_what_the_config_says_is_not_changed(clock):
    given = {"execution__compiler": "default", "execution__conv": "winograd", "execution__steps": "loop"}
    assert tuning.tuned(experiment(**given)).layout == USUAL
    assert {one.strategy for one in clock.tried} == {"sharded", "separate"}
    clock.tried.clear()
    assert tuning.tuned(experiment(execution__data="host")).layout.compiler == "lean"
    assert {one.strategy for one in clock.tried} == {"sharded"}


def test_work_in_which_clients_do_nothing_is_no_measure(clock):
    clock.works = False
    assert tuning.tuned(experiment()).layout == USUAL
    assert len(clock.tried) == 1


def test_a_search_that_is_given_up_keeps_nothing(clock, cache):
    assert tuning.tuned(experiment(), give_up=lambda: len(clock.tried) >= 2).layout == USUAL._replace(compiler="lean")
    assert not list(cache.glob("*.json"))


def test_a_run_that_stops_while_tuning_looks_again_when_it_goes_on(clock, tmp_path):
    tuning.for_run(experiment(execution__tune="always"), tmp_path, lambda: True)
    assert not (tmp_path / "layout.json").exists()


def test_what_fails_at_once_is_not_kept_and_rounds_of_a_dispatch_are_measured_together(clock, cache, monkeypatch):
    together = experiment(execution__rounds_per_dispatch=3, rounds=9, eval_every=3, checkpoint_every=3)
    assert tuning.measured(together)[0].rounds % 3 == 0
    clock.works = False
    monkeypatch.setattr(clock, "seconds", lambda layout: float("nan"))
    tuning.tuned(experiment())
    assert not list(cache.glob("*.json"))


def test_a_server_with_many_steps_is_not_written_out():
    assert tuning.has_few_steps(experiment(server__epochs=0, server__steps=8))
    assert not tuning.has_few_steps(experiment(server__epochs=0, server__steps=9))


def test_without_a_cache_it_measures_each_time(clock, monkeypatch):
    monkeypatch.setattr(tuning, "cache_folder", lambda: None)
    for times in (1, 2):
        assert tuning.tuned(experiment()).layout.compiler == "lean"
        assert len(clock.tried) == 8 * times


def test_it_is_measured_on_little_work_in_which_every_client_trains():
    whole = experiment(client__epochs=5, client__batch_size=16, method__confidence=0.95, server__pretrain=3)
    settings, data = tuning.measured(whole)
    assert (settings.cohort_size, settings.client.epochs, settings.server.epochs, settings.server.pretrain) == (8, 1, 1, 0)
    assert settings.method["confidence"] == 0.0
    assert data.unlabeled.index.shape == (8, 32)
    assert data.server.count == whole.problem.data.server.count  # fewer than two batches
    assert len(data.train.images) < len(whole.problem.data.train.images)  # no more than are used
    largest, pool = np.argsort(-whole.problem.data.unlabeled.count, kind="stable")[:8], whole.problem.data.train
    index = whole.problem.data.unlabeled.index[largest, :32]
    np.testing.assert_array_equal(data.train.images[data.unlabeled.index], pool.images[index])
    np.testing.assert_array_equal(data.train.labels[data.unlabeled.index], pool.labels[index])
    whole.problem.data.unlabeled.count[:3] = (5, 6, 7)
    settings, data = tuning.measured(experiment(client__epochs=0, client__steps=4, cohort_size=5))
    assert data.unlabeled.index.shape == (5, whole.problem.data.held.index.shape[1])  # few steps: all that they are
    assert settings.client.steps == 4


def test_a_real_search_runs_rounds_and_finds_a_layout_that_trains_alike():
    few = {"client__epochs": 0, "client__steps": 1, "server__epochs": 0, "server__steps": 1, "server__pretrain": 0}
    begun = experiment(cohort_size=2, data__num_clients=4, **few)
    found = list(tuning.search(experiment(cohort_size=2, execution__conv="winograd", **few), lambda: False))
    assert found[0][0] == begun.layout
    assert all(seconds > 0 for _, seconds in found)
    changes = tuning.moves(begun.settings, begun.layout, convolves=True, few_steps=True)
    assert {"compiler": "lean"} in changes
    separate = begun.layout._replace(**changes[-1])
    assert (separate.strategy, separate.steps, separate.conv) == ("separate", "unrolled", "grouped")
    (state, row), (other, same) = (next(tuning.in_layout(begun, one).rounds()) for one in (begun.layout, separate))
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.server.weights)]) for s in (state, other))
    assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(a)
    assert row["comm/bytes_up"] == same["comm/bytes_up"] > 0


def test_long_runs_are_those_with_much_to_compute():
    assert not tuning.is_long(experiment())
    assert tuning.is_long(experiment(rounds=10**7))
    assert tuning.is_long(tiny.experiment("supervised", network="cnn", rounds=10**8))
    assert not tuning.is_long(tiny.experiment("supervised", network="cnn"))


@pytest.mark.parametrize(
    ("method", "labels_at", "settings", "examples"),
    [
        ("fixmatch", "server", {"client__epochs": 3, "method__unlabeled_batch_size": 8}, 3 * 24),
        ("fixmatch", "server", {"client__epochs": 3, "method__unlabeled_batch_size": 0, "client__batch_size": 5}, 3 * 25),
        ("fixmatch", "server", {"client__epochs": 0, "client__steps": 2, "method__unlabeled_batch_size": 8}, 2 * 8),
        ("fixmatch", "clients", {"client__epochs": 3, "client__batch_size": 5, "method__unlabeled_batch_size": 7}, 3 * 2 * 12),
        ("fedsem", "clients", {"client__epochs": 3, "client__batch_size": 5}, 3 * 30),
    ],
)
def test_the_examples_of_a_round_are_counted_as_its_steps_go_through_them(method, labels_at, settings, examples):
    one = tiny.experiment(method, labels_at=labels_at, cohort_size=4, **settings)
    data = one.problem.data
    labeled = (np.zeros if labels_at == "server" else np.ones)(data.labeled.count.shape, int) * 6
    unlabeled = np.full(data.unlabeled.count.shape, 24)
    counted = data._replace(labeled=data.labeled._replace(count=labeled), unlabeled=data.unlabeled._replace(count=unlabeled))
    counted = dataclasses.replace(one, problem=one.problem._replace(data=counted))
    assert tuning._examples(counted) == 4 * examples


def test_a_run_goes_on_in_the_layout_it_began_in(clock, tmp_path, caplog):
    def run(**overrides):
        return tuning.for_run(experiment(**overrides), tmp_path, lambda: False).layout

    assert run(execution__tune="never") == run() == USUAL  # short
    assert not clock.tried
    (tmp_path / "layout.json").unlink()
    lean = run(execution__tune="always")
    assert lean.compiler == "lean"
    assert run(execution__tune="never") == lean  # as noted
    noted = tmp_path / "layout.json"
    noted.write_text(json.dumps({"layout": lean._replace(devices=5)._asdict(), "platform": "cpu"}))
    assert run() == USUAL
    assert "layout.json: got 5 devices, there are 4 of cpu here" in caplog.text
    noted.write_text(json.dumps({"layout": lean._asdict(), "platform": "gpu"}))
    assert run() == USUAL
    noted.unlink()
    (tmp_path / "metrics.jsonl").touch()  # begun without a note
    assert run(execution__tune="always") == USUAL
    noted.write_text("{")
    assert run() == USUAL
    assert "layout.json: cannot be read: going on in a layout that may differ" in caplog.text
    assert json.loads(noted.read_text())["layout"] == USUAL._asdict()
