"""On what work layouts are timed, and which runs take long."""

import dataclasses

import jax
import numpy as np
import pytest

from fedjax_ssl.data.federated import Table
from fedjax_ssl.experiment import build, measurement
from fedjax_ssl.experiment.layout import evaluation_batch_size
from tests import tiny
from tests.tiny import left_open as experiment


def test_it_is_little_work_in_which_every_client_trains():
    whole = experiment(client__epochs=5, client__batch_size=16, method__confidence=0.95, server__pretrain=3)
    settings, data = measurement.piece(whole)
    assert (settings.cohort_size, settings.client.epochs, settings.server.epochs, settings.server.pretrain) == (8, 1, 1, 0)
    assert settings.method["confidence"] == 0.0
    assert measurement.accepting_all(tiny.experiment("fl2").settings)["threshold"] == "fixed"
    given = whole.problem.data
    assert data.server.count == given.server.count  # fewer than two batches
    assert len(data.train.images) < len(given.train.images)  # no more than are used
    assert 24 <= data.unlabeled.count.mean() <= 33  # two batches
    rows = measurement.spread(np.asarray(given.labeled.count + given.unlabeled.count), 8)
    for row, k in enumerate(rows):  # a client's first examples
        n = data.unlabeled.count[row]
        np.testing.assert_array_equal(
            data.train.images[data.unlabeled.index[row, :n]], given.train.images[given.unlabeled.index[k, :n]]
        )
    settings, data = measurement.piece(experiment(client__epochs=0, client__steps=4, server__epochs=0, server__steps=5))
    assert data.unlabeled.index.shape[1] == given.client_data.index.shape[1]  # few steps: all that they are
    assert (settings.client.steps, settings.server.steps) == (4, 5)


@pytest.mark.parametrize(("given", "devices"), [({}, 4), ({"execution__devices": 3}, 3), ({"execution__strategy": "scan"}, 1)])
def test_it_has_a_few_clients_for_each_device_of_the_layout(given, devices):
    settings, data = measurement.piece(experiment(cohort_size=12, data__num_clients=12, **given))
    assert settings.cohort_size == len(data.client_data.count) == 2 * devices


def test_the_first_client_may_have_no_labels():
    whole = experiment(labels_at="clients", data__labeled_fraction=(0.0,) * 4 + (0.5,) * 4)
    settings, data = measurement.piece(whole)
    assert (
        sorted(data.labeled.count > 0) == sorted(np.asarray(whole.problem.data.labeled.count) > 0) == [False] * 4 + [True] * 4
    )
    assert settings.data.num_clients == 8


def test_clients_differ_as_in_the_whole():
    whole = experiment(client__epochs=5, client__batch_size=16)
    data = whole.problem.data
    counts = np.linspace(2, 40, len(data.unlabeled.count)).astype(np.int32)
    skewed = data._replace(unlabeled=data.unlabeled._replace(count=counts))
    skewed = dataclasses.replace(whole, problem=whole.problem._replace(data=skewed))
    _, cut = measurement.piece(skewed)
    assert np.all(np.diff(cut.unlabeled.count) <= 0)
    assert cut.unlabeled.count[0] > 3 * cut.unlabeled.count[-1] > 0
    assert measurement.skew(skewed.problem.data) != measurement.skew(data)


def test_tables_are_cut_in_proportion():
    table = Table(np.arange(400).reshape(4, 100), np.array([100, 50, 10, 0], np.int32))
    cut = measurement._cut(table, np.array([0, 1, 2, 3]), 20)
    np.testing.assert_array_equal(cut.count, [50, 25, 5, 0])
    assert cut.index.shape == (4, 50)
    np.testing.assert_array_equal(measurement._cut(table, np.array([0, 3]), 5).count, [10, 0])
    few, one_large = table._replace(count=table.count // 50), table._replace(count=np.array([100, 1, 1, 1]))
    np.testing.assert_array_equal(measurement._cut(few, np.arange(4), 20).count, [2, 1, 0, 0])
    np.testing.assert_array_equal(measurement._cut(one_large, np.arange(4), 2).count, [8, 1, 1, 1])
    assert measurement._cut(table, np.array([0, 1]), None).index.shape == (2, 100)


def test_clients_are_spread_over_those_there_are():
    np.testing.assert_array_equal(measurement.spread(np.array([1, 5, 3, 2, 4, 0]), 3), [4, 3, 5])
    np.testing.assert_array_equal(measurement.spread(np.array([1, 5, 3]), 3), [1, 2, 0])


@pytest.mark.parametrize("case", [*tiny.CASES, ("fedsiam_d", "rectangle")], ids="-".join)
def test_every_methods_piece_is_a_valid_experiment(case):
    method, place = case
    rectangle = {"method__curve": "rectangle", "method__pi_rounds": 0, "method__end_round": 4}
    given = {"labels_at": "clients", **rectangle} if place == "rectangle" else {"labels_at": place}
    whole = tiny.experiment(method, client__epochs=20, **given)
    settings, data = measurement.piece(whole)
    spec = whole.problem.spec._replace(num_clients=settings.data.num_clients)
    piece = build.assembled(settings, whole.views, spec, data)
    assert piece.settings.rounds == whole.settings.rounds
    assert np.all(piece.problem.data.labeled.count + piece.problem.data.unlabeled.count > 0)


@pytest.mark.parametrize("data", ["device", "host"])
@pytest.mark.parametrize("method", ["fedsem", "fedtrinet"])
def test_of_methods_with_phases_the_last_is_measured(method, data):
    whole = tiny.experiment(method, rounds=10_000, cohort_size=8, method__labeled_rounds=9_000, execution__data=data)
    timed = measurement.Timed(whole, evaluates=False)
    assert timed.works
    labeled = np.asarray(timed._state.clients.pseudo) >= 0
    assert labeled.sum() == whole.problem.data.unlabeled.count.sum()


@pytest.mark.parametrize("together", [1, 2])
def test_rounds_are_the_last_tenth_of_the_run_again_and_again(monkeypatch, together):
    several = {"execution__rounds_per_dispatch": together, "eval_every": 2, "checkpoint_every": 2}
    whole = tiny.experiment("fixmatch", network="linear", rounds=60, **several)
    numbers, dispatch = [], type(whole.simulator).dispatch
    monkeypatch.setattr(
        type(whole.simulator), "dispatch", lambda self, state: numbers.append(int(state.round)) or dispatch(self, state)
    )
    measurement.Timed(whole, evaluates=False)
    last = list(range(54, 60, together))
    assert len(numbers) > 2 * len(last)
    assert numbers == [last[i % len(last)] for i in range(len(numbers))]


@pytest.mark.parametrize(("given", "devices"), [({}, 4), ({"cohort_size": 3}, 3), ({"execution__strategy": "scan"}, 1)])
def test_a_devices_share_of_an_evaluation_is_whole_batches_of_every_size_that_is_tried(monkeypatch, given, devices):
    whole = experiment(**given)
    pool = type(whole.problem.data.test)(np.zeros((50_000, 8, 8, 1), np.uint8), np.zeros(50_000, np.int32))
    whole = dataclasses.replace(whole, problem=whole.problem._replace(data=whole.problem.data._replace(test=pool)))
    images = len(measurement.piece(whole)[1].test.labels)
    assert images == devices * measurement.images_a_device()
    linear = dataclasses.replace(whole.settings, model={**whole.settings.model, "name": "linear"})
    for platform, settings, tried in (
        ("cpu", whole.settings, (50, 100)),
        ("cpu", linear, (1_000,)),
        ("gpu", whole.settings, (1_000, 4_000)),
        ("tpu", linear, (1_000, 4_000)),
    ):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert measurement.forward_sizes(settings) == tried
        for size in (*tried, evaluation_batch_size(platform, settings)):
            assert measurement.images_a_device() % size == 0


def test_a_server_with_many_steps_is_not_written_out():
    assert measurement.has_few_steps(experiment(server__epochs=0, server__steps=8))
    assert not measurement.has_few_steps(experiment(server__epochs=0, server__steps=9))


def test_what_is_measured_can_be_run_and_evaluated():
    whole = tiny.experiment("fixmatch", cohort_size=2, method__confidence=0.0)
    rounds, evaluation = (measurement.Timed(whole, evaluates=evaluates) for evaluates in (False, True))
    assert 0 < rounds.seconds < 100
    assert 0 < evaluation.seconds < 100
    assert rounds.works
    assert whole.simulator.compile_s > 0


@pytest.fixture
def fake(monkeypatch):
    """Makes what takes so many seconds on a machine that becomes slower, and in the sixth run very slow; `ran` is who did."""
    monkeypatch.setattr(measurement, "TURNS_S", 0.0)

    class Fake(measurement.Timed):
        ran = ""

        def __init__(self, name, seconds):
            self.name, self._seconds, self._dispatched = name, seconds, 7

        def once(self):
            assert self._dispatched == Fake.ran.count(self.name)  # both begin with the same round
            self._dispatched += 1
            Fake.ran += self.name
            return self._seconds * (1 + 0.05 * len(Fake.ran)) * (3 if len(Fake.ran) == 6 else 1)

    return Fake


@pytest.mark.parametrize(("other", "ran"), [(0.5, "bccb" * 3), (1.0, "bccb" * 3), (1.2, "bccb" * 3), (1.4, "bccb")])
def test_two_layouts_are_compared_within_turns_whatever_else_slows_the_machine_down(fake, other, ran):
    assert fake("b", 1.0).times(fake("c", other), lambda: False, least_turns=1) == pytest.approx(1 / other, rel=1e-6)
    assert fake.ran == ran


def test_a_candidate_that_is_clearly_slower_has_as_many_turns_as_are_asked_for(fake, monkeypatch):
    monkeypatch.setattr(measurement, "TURNS_S", 3.0)
    assert fake("b", 1.0).times(fake("c", 1.4), lambda: False, least_turns=3) == pytest.approx(1 / 1.4)
    assert fake.ran == "bccb" * 3


def test_a_comparison_for_which_there_is_no_time_is_one_turn(fake):
    assert fake("b", 1.1).times(fake("c", 1.0), lambda: True, least_turns=3) == pytest.approx(1.1)
    assert fake.ran == "bccb"


@pytest.fixture
def clock(monkeypatch):
    """A clock that `tick` moves on."""

    class Clock:
        now = 0.0

        def tick(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.mark.parametrize(("seconds", "runs"), [(0.01, 50), (0.2, 3), (0.5, 2), (2.0, 2), (3.0, 1), (14.0, 1)])
def test_alone_a_layout_runs_for_half_a_second_and_twice_unless_it_takes_seconds(clock, monkeypatch, seconds, runs):
    ran = []

    def run(self):
        ran.append(1)
        clock.tick(seconds)
        return {}

    monkeypatch.setattr(measurement.Timed, "_run", run)
    timed = measurement.Timed(experiment(), evaluates=False)
    assert len(ran) == pytest.approx(1 + runs, abs=1 if seconds < 0.1 else 0)
    assert timed.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "least", "turns"),
    [(0.01, 1, 75), (0.5, 1, 3), (1.0, 1, 3), (2.0, 1, 3), (3.0, 1, 2), (5.0, 1, 1), (14.0, 1, 1), (14.0, 3, 3), (1.0, 3, 3)],
)
def test_turns_are_three_for_three_seconds_and_fewer_where_these_take_long(clock, fake, monkeypatch, seconds, least, turns):
    monkeypatch.setattr(measurement, "TURNS_S", 3.0)
    monkeypatch.setattr(fake, "once", lambda self: setattr(fake, "ran", fake.ran + "x") or clock.tick(seconds) or 1.0)
    fake("b", 1.0).times(fake("c", 1.0), lambda: False, least_turns=least)
    assert len(fake.ran) == pytest.approx(4 * turns, abs=4 if seconds < 0.1 else 0)


def test_a_candidate_that_was_clearly_slower_in_one_turn_has_as_many_as_others(clock, fake, monkeypatch):
    def once(self):
        fake.ran += self.name
        clock.tick(0.25)
        return 1.4 if fake.ran in ("bc", "bcc") else 1.0

    monkeypatch.setattr(measurement, "TURNS_S", 5.0)
    monkeypatch.setattr(fake, "once", once)
    assert fake("b", 1.0).times(fake("c", 1.0), lambda: False, least_turns=3) == 1.0
    assert fake.ran == "bccb" * 5


def test_rounds_of_a_dispatch_are_measured_together():
    together = experiment(execution__rounds_per_dispatch=3, rounds=9, eval_every=3, checkpoint_every=3)
    assert measurement.piece(together)[0].rounds % 3 == 0
    one = experiment(rounds=900)
    settings, data = measurement.piece(one)
    piece = dataclasses.replace(one, settings=settings, problem=one.problem._replace(data=data, cohort_size=8))
    several = dataclasses.replace(one, settings=dataclasses.replace(together.settings, rounds=900))
    share = measurement._examples(piece) / measurement._examples(one)
    assert measurement.run_s(one, piece, 2.0) == pytest.approx(900 * 2.0 / share)
    assert measurement.run_s(several, piece, 3 * 2.0) == pytest.approx(900 * 2.0 / share)


def test_long_runs_are_those_with_much_to_compute():
    assert not measurement.may_be_long(experiment())
    assert measurement.may_be_long(experiment(rounds=10**6))
    assert measurement.may_be_long(tiny.experiment("supervised", network="cnn", rounds=10**7))
    assert not measurement.may_be_long(tiny.experiment("supervised", network="cnn"))


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
    assert measurement._examples(counted) == 4 * examples
