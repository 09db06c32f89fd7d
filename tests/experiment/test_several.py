"""Several runs as one program: each equals the run alone, it is traced once, and one that diverges does not end the others."""

import itertools

import jax
import numpy as np
import pytest

from fedjax_ssl.data.federated import tables_of
from fedjax_ssl.data.sources.builtin import synthetic
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.expansion import runs_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.methods import METHODS
from fedjax_ssl.simulation import execution
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny
from tests.average import AverageOptions, average
from tests.commands import without_times
from tests.engine import distance, with_outputs

pytestmark = pytest.mark.usefixtures("own_methods")
IMAGES = synthetic(seed=0)  # those of all runs
# FedSem keeps its clients' pseudo-labels, in tables that are as wide as those of the largest client.
FEDSEM = ("fedsem", "clients")
DIRICHLET = {"data__partition": "dirichlet", "data__alpha": 0.5, "data__min_size": 2}
RATE, MOMENTUM = "client.optimizer.learning_rate", "client.optimizer.momentum"


def config(method="average", labels_at="", **overrides):
    """Three seeds over two of the devices, so that a slot is left over; nothing flips within a round for these seeds."""
    quick = {
        "client__epochs": 0,
        "client__steps": 3,
        "server__training__epochs": 1,
        "network": "linear",
        "seeds": 3,
        "rounds": 3,
    }
    quick |= {"execution__devices": 2, "execution__strategy": "auto"}
    return tiny.config(method, labels_at=labels_at, **tiny.confident(method) | quick | overrides)


def varied(key, *numbers, method="average", **overrides):
    return build(config(method, **values(key, *numbers), **overrides), IMAGES)


def assert_equal(alone, own):
    """All that the server and the clients keep, the round and the key; and the rows."""
    (alone, row), (own, found) = alone, own
    alone, own = (jax.device_get(state._replace(key=jax.random.key_data(state.key))) for state in (alone, own))
    assert jax.tree.structure(alone) == jax.tree.structure(own)
    assert [x.shape for x in jax.tree.leaves(alone)] == [x.shape for x in jax.tree.leaves(own)]
    assert distance(alone.server, own.server) < 1e-5
    assert distance(alone.clients, own.clients) < 1e-5
    assert alone.round == own.round
    np.testing.assert_array_equal(alone.key, own.key)
    assert without_times(found) == pytest.approx(without_times(row), rel=1e-4, abs=1e-6)


def alone(experiment, run):
    """The run's own experiment, its clients one after another."""
    settings = experiment.runs[run].settings
    of_run = settings.execution.model_copy(update={"strategy": "scan", "devices": 0})
    return build(settings.model_copy(update={"execution": of_run}), IMAGES)


def after(experiment, rounds):
    """(state, row) after some rounds; of several runs a list of these."""
    state, rows = next(itertools.islice(experiment.rounds(), rounds - 1, None))
    return (state, rows) if len(experiment.runs) == 1 else list(zip(experiment.simulator.split(state), rows, strict=True))


def slow(*case):
    """A case that another of the same test stands for in the default run."""
    return pytest.param(*case, marks=pytest.mark.slow)


def values(key, *numbers, **given):
    """One seed, with several values of a number, or as many seeds as given."""
    return {"seeds": 1, "vary": key, "values": numbers} | given


TWO_OF_FOUR = {"seeds": 2, "execution__devices": 4}
FASTER = (0.01, 0.1, 0.03)


@pytest.mark.parametrize(
    ("method", "given", "devices"),
    [
        (("average",), {}, 1),  # two turns
        (("average",), TWO_OF_FOUR, 2),  # five clients leave a slot over
        slow(("average",), values(RATE, *FASTER), 1),
        slow(("average",), values("method.scale", 0.5, 2.0), 1),
        (("average",), values(RATE, 0.01, 0.1, seeds=2), 1),
        slow(("fixmatch",), {}, 1),
        slow(("fl2",), TWO_OF_FOUR, 2),
        slow(FEDSEM, TWO_OF_FOUR, 2),
        slow(("fedmatch", "clients"), TWO_OF_FOUR, 2),  # its server keeps all updates
        slow(("fixmatch",), values(RATE, *FASTER), 1),
        slow(("fixmatch",), values("method.confidence", 0.12, 0.2), 1),
        # Numbers that zero switches off.
        pytest.param(("fedprox",), values("method.prox_mu", 0.1, 3.0), 1, marks=pytest.mark.slow),
        slow(("fedavg",), values(MOMENTUM, 0.1, 0.9), 1),
        slow(("fedavg",), values("client.optimizer.weight_decay", 0.01, 0.3), 1),
        slow(("fedavg",), values("client.optimizer.clip_norm", 0.05, 0.5), 1),
        slow(("fedavg",), values("server.optimizer.momentum", 0.1, 0.9), 1),
    ],
)
def test_runs_whose_splits_are_alike_equal_those_alone(method, given, devices):
    experiment = build(config(*method, **given), IMAGES)
    assert (experiment.layout.devices, experiment.layout.runs_at_once) == (devices, 2)
    found = after(experiment, 2)  # the server's momentum shows from there on
    for number in (0, len(found) - 1):
        assert_equal(after(alone(experiment, number), 2), found[number])
    assert distance(found[0][0].server, found[1][0].server) > 1e-4


def test_each_of_a_runs_devices_has_a_share_of_its_clients_and_of_the_test_set(monkeypatch):
    experiment = build(config(seeds=2, execution__devices=4, execution__batch_size=10), IMAGES)
    run_chunks, fori_loop, clients, batches = execution._run_chunks, jax.lax.fori_loop, [], []

    def noted(client, shared, cohort, *rest):
        clients.append(len(cohort.real))
        return run_chunks(client, shared, cohort, *rest)

    monkeypatch.setattr(execution, "_run_chunks", noted)
    monkeypatch.setattr(jax.lax, "fori_loop", lambda low, high, *rest: batches.append(high) or fori_loop(low, high, *rest))
    experiment.simulator.trace()
    assert clients == [3]  # of five
    assert len(IMAGES.test_labels) == 500
    numbers = [high for high in batches if isinstance(high, int)]
    assert 25 in numbers
    assert 50 not in numbers


@pytest.mark.parametrize("method", [slow(("fl2",)), pytest.param(FEDSEM, marks=pytest.mark.slow)], ids="-".join)
def test_seeds_whose_largest_clients_differ_equal_the_runs_alone(method):
    experiment = build(config(*method, client__epochs=2, client__steps=0, **DIRICHLET), IMAGES)
    problem, widths = experiment.problem, set()
    for number, tables in enumerate(problem.tables):
        own = alone(experiment, number).problem.data
        widths.add(own.unlabeled.index.shape[1])
        for name in tables_of(problem.data):  # the same rows, with more padding
            narrow = getattr(own, name)
            np.testing.assert_array_equal(narrow.count, tables[name].count)
            np.testing.assert_array_equal(narrow.index, tables[name].index[:, : narrow.index.shape[1]])
            assert not np.any(tables[name].index[:, narrow.index.shape[1] :])
    assert len(widths) > 1
    assert problem.spec.client_rows == max(widths)
    # FedSem's clients shuffle both kinds of examples in one table, where the width shows: the same width then.
    assert [run.name for run in experiment.only([2, 1, 0]).runs] == [run.name for run in experiment.runs[::-1]]
    own = experiment.only([2]) if method == FEDSEM else alone(experiment, 2)
    assert_equal(after(own, 1), after(experiment, 1)[2])


def test_the_method_knows_the_clients_of_all_runs(monkeypatch):
    known = []
    monkeypatch.setattr(AverageOptions, "for_clients", lambda self, *given: known.append(given) or self)
    experiment = build(config(**DIRICHLET), IMAGES)
    counts = [tables["unlabeled"].count for tables in experiment.problem.tables]
    ((given, batch_size),) = known
    assert batch_size == experiment.settings.client.batch_size
    np.testing.assert_array_equal(given[:, 1], np.concatenate(counts))


def test_a_phase_that_varies_is_a_number_of_rounds_in_each_run():
    experiment = varied("method.labeled_rounds", 0.25, 0.5, method="fedsem", labels_at="clients", rounds=4)
    assert experiment.problem.numbers == (1, 2)
    assert [run.name for run in experiment.runs] == ["0-labeled_rounds=0.25", "0-labeled_rounds=0.5"]


@pytest.mark.slow
def test_some_of_the_runs_have_a_method_of_their_own_number():
    """Its predictions are those that were evaluated, and its tiny network's method is of the same number."""
    experiment = varied("method.l1_thres", 1e-5, 0.5, method="fedmatch", rounds=1, eval_every=1)
    state, rows = next(experiment.rounds())
    test, found = experiment.problem.test, []
    for number, row in enumerate(rows):
        one, own = experiment.only([number]), experiment.simulator.split(state)[number]
        logits = one.predict(own, np.asarray(test.images))
        found.append(float(-jax.nn.log_softmax(logits)[np.arange(len(logits)), test.labels].mean()))
        assert found[-1] == pytest.approx(row["eval/loss"], rel=1e-5)
    assert abs(found[0] - found[1]) > 1e-2
    assert experiment.only([1]).problem.first_number == 0.5


def test_the_split_may_vary():
    tables = varied("data.alpha", 0.5, 100.0, **DIRICHLET).problem.tables
    skewed, even = (np.std(of_run["unlabeled"].count) for of_run in tables)
    assert skewed > 2 * even


def test_a_number_by_which_the_program_is_chosen_is_refused_in_one_line(monkeypatch):
    def choosing(*, task, client, server, options=AverageOptions()):
        return average(task=task, client=client, server=server, options=options if options.scale > 1 else AverageOptions())

    monkeypatch.setitem(METHODS, "choosing", choosing)
    message = "vary: got 'method.scale', by which the program of method.name=choosing is chosen"
    with pytest.raises(ValueError, match=message) as refused:
        varied("method.scale", 0.5, 2.0, method="choosing")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("given", [{}, {"seeds": 1, "vary": RATE, "values": (0.1, 0.2, 0.3)}], ids=["seeds", "values"])
def test_the_client_is_traced_once(given):
    problem, traces = build(config(**given), IMAGES).problem, []

    def method(number):
        return with_outputs(problem.method(number), lambda output: traces.append(1) or output)

    simulator = Simulator(problem._replace(method=method), Execution(1))
    simulator.trace()
    simulator.template()
    state, compiled = simulator.initialize(), set()
    for _ in range(3):
        state, _ = simulator.dispatch(state, ["a", "b", "c"])
        compiled.add(simulator.compile_s)
    assert len(traces) == 1
    assert len(compiled) == 1


def test_a_run_that_diverges_is_named_and_the_others_go_on():
    experiment = varied(RATE, 0.03, 1e37)
    rows = [rows for _, rows in experiment.rounds()]
    assert [row[0]["round"] for row in rows] == [1, 2, 3]
    for number, (good, bad) in enumerate(rows, start=1):
        assert good["eval/accuracy"] > 0 if number in (2, 3) else "eval/accuracy" not in good
        assert np.isfinite(good["client/loss"])
        assert bad.keys() == {"round", "diverged"}
        assert bad["round"] == number
        assert bad["diverged"].startswith("round 1: all 5 clients returned NaN or infinity")
    single = [row for _, row in alone(experiment, 0).rounds()]
    assert [without_times(row) for row in single] == [pytest.approx(without_times(good), rel=1e-4) for good, _ in rows]


def test_rounds_end_once_all_runs_have_diverged(caplog):
    rows = [rows for _, rows in varied(RATE, 1e37, 2e37).rounds()]
    assert len(rows) == 1
    assert all("diverged" in row for row in rows[0])
    assert "learning_rate=2e+37, round 1: client " in caplog.text


def test_the_runs_have_the_settings_that_they_have_alone():
    seeds = runs_of(Settings.from_dict(config(seed=5)))
    assert [run.settings for run in seeds] == [Settings.from_dict(config(seeds=1, seed=seed)) for seed in (5, 6, 7)]
    assert [(run.name, str(run)) for run in seeds] == [(number, f"seed {number}") for number in "567"]
    both = runs_of(Settings.from_dict(config(**values("method.scale", 0.5, 1, seeds=2))))
    each = [config(seeds=1, seed=seed, method__scale=value) for seed in (0, 1) for value in (0.5, 1.0)]
    assert [run.settings for run in both] == [Settings.from_dict(one) for one in each]
    assert [run.name for run in both] == ["0-scale=0.5", "0-scale=1.0", "1-scale=0.5", "1-scale=1.0"]
    assert str(both[2]) == "seed 1, scale=0.5"
    (one,) = runs_of(Settings.from_dict(config(seeds=1)))
    assert (one.name, str(one), one.number) == ("", "seed 0", None)
