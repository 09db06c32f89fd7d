"""Several runs as one program: each equals the run alone, it is traced once, and one that diverges does not end the others."""

import functools
import itertools

import jax
import numpy as np
import pytest

from fedjax_ssl.data.federated import TABLES
from fedjax_ssl.data.sources.builtin import synthetic
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.runs import runs_of
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.simulation import execution
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Simulator
from tests import tiny

IMAGES = synthetic(seed=0)  # those of all runs
SEEDS = 3
# Fast methods, in which nothing flips within a round for these seeds. FedSem keeps its clients' pseudo-labels, in tables that
# are as wide as those of the largest client.
FEDSEM = ("fedsem", "clients")
DIRICHLET = {"data__partition": "dirichlet", "data__alpha": 0.5, "data__min_size": 2}
RATE, MOMENTUM = "client.optimizer.learning_rate", "client.optimizer.momentum"


def config(method, labels_at="", **overrides):
    """Three seeds over two of the devices, so that a slot is left over."""
    quick = {"client__epochs": 0, "client__steps": 3, "server__epochs": 1}
    quick |= {"execution__devices": 2, "execution__strategy": "auto"}
    if "confidence" in tiny.config(method)["method"]:
        quick["method__confidence"] = 0.12  # so that some pass from round 1 on, and clients train
    return tiny.config(method, labels_at=labels_at, **{"seeds": SEEDS, "rounds": 3} | quick | overrides)


def distance(a, b) -> float:
    """Relative Euclidean distance over all leaves."""
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def assert_equal(alone, own, tolerance=1e-5):
    """All that the server and the clients keep, the round and the key."""
    alone, own = (jax.device_get(state._replace(key=jax.random.key_data(state.key))) for state in (alone, own))
    assert jax.tree.structure(alone) == jax.tree.structure(own)
    assert [x.shape for x in jax.tree.leaves(alone)] == [x.shape for x in jax.tree.leaves(own)]
    assert distance(alone.server, own.server) < tolerance
    assert distance(alone.clients, own.clients) < tolerance
    assert alone.round == own.round
    np.testing.assert_array_equal(alone.key, own.key)


def without_times(row):
    return {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}


def assert_same_rows(alone, own):
    assert alone.keys() == own.keys()
    assert without_times(own) == pytest.approx(without_times(alone), rel=1e-4, abs=1e-6)


def alone(experiment, run):
    """The run's own experiment, its clients one after another."""
    settings = experiment.runs[run].settings
    of_run = settings.execution.model_copy(update={"strategy": "scan", "devices": 0})
    return build(settings.model_copy(update={"execution": of_run}), IMAGES)


def devices(experiment) -> int:
    """Devices of a run, and of all runs."""
    return experiment.layout.devices, experiment.layout.devices * experiment.layout.runs_at_once


def slow(*case):
    """A case that another of the same test stands for in the default run; as one value where it is a method."""
    return pytest.param(*([case] if case[-1] in ("server", "clients") else case), marks=pytest.mark.slow)


@pytest.mark.parametrize("method", [slow("fixmatch", "server"), FEDSEM])
def test_seeds_whose_splits_are_alike_equal_the_runs_alone(method):
    experiment = build(config(*method), IMAGES)
    assert [str(run) for run in experiment.runs] == ["seed 0", "seed 1", "seed 2"]
    assert devices(experiment) == (1, 2)
    state, rows = next(experiment.rounds())
    states = experiment.simulator.split(state)
    for number in (0, 2):  # both turns
        expected, row = next(alone(experiment, number).rounds())
        assert_equal(expected, states[number])
        assert_same_rows(row, rows[number])
    assert distance(states[0].server, states[1].server) > 1e-2


# FedMatch's server keeps all updates, and FedSem's clients something of their own; five clients leave a slot over.
@pytest.mark.parametrize("method", [slow("fl2", "server"), ("fedsem", "clients"), slow("fedmatch", "clients")])
def test_where_there_are_devices_enough_they_share_the_clients_of_a_run(method):
    experiment = build(config(*method, seeds=2, execution__devices=4), IMAGES)
    assert (experiment.layout.strategy, *devices(experiment)) == ("sharded", 2, 4)
    rounds = zip(experiment.rounds(), *(alone(experiment, number).rounds() for number in range(2)), strict=True)
    for (state, rows), *both in itertools.islice(rounds, 2):
        for (expected, row), own, found in zip(both, experiment.simulator.split(state), rows, strict=True):
            assert_equal(expected, own)
            assert_same_rows(row, found)


def test_each_of_a_runs_devices_has_a_share_of_its_clients_and_of_the_test_set(monkeypatch):
    experiment = build(config("fixmatch", seeds=2, execution__devices=4, execution__batch_size=10), IMAGES)
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


@pytest.mark.parametrize(
    ("given", "of_run", "all_"),
    [
        ({"seeds": 2}, 2, 4),
        ({"seeds": 3}, 1, 3),
        ({"seeds": 5}, 1, 3),  # two turns
        ({"seeds": 2, "cohort_size": 1}, 1, 2),
        ({"seeds": 2, "execution__strategy": "scan"}, 1, 2),
        ({"seeds": 2, "execution__devices": 2}, 1, 2),
    ],
)
def test_devices_are_those_that_save_a_turn(given, of_run, all_):
    experiment = build(config("fixmatch", **{"execution__devices": 0, **given}), IMAGES)
    assert devices(experiment) == (of_run, all_)
    assert (experiment.layout.strategy == "sharded") == (of_run > 1)


def test_some_of_the_runs_are_an_experiment_of_the_same_layout_on_the_same_tables():
    experiment = build(config("fixmatch", seeds=4, execution__devices=4, **DIRICHLET), IMAGES)
    some = experiment.only([2, 3])
    assert some.layout == experiment.layout
    assert (some.problem.seeds, some.problem.tables) == ((2, 3), experiment.problem.tables[2:])
    _, rows = next(experiment.rounds())
    _, (third, fourth) = next(some.rounds())
    assert without_times(third) == pytest.approx(without_times(rows[2]))
    assert without_times(fourth) == pytest.approx(without_times(rows[3]))
    assert experiment.only(range(4)) is experiment


@pytest.mark.parametrize(("vmap_runs", "chunk"), [slow(True, 0), (False, 2)])
def test_runs_that_devices_share_may_also_be_vmapped_and_their_clients_go_in_chunks(vmap_runs, chunk):
    experiment = build(config("fl2", seeds=2, execution__devices=4), IMAGES)
    states = []
    for way in (experiment.layout.execution(experiment.settings), Execution(chunk, devices=2, vmap_runs=vmap_runs)):
        simulator = Simulator(experiment.problem, way)
        states.append(simulator.split(simulator.dispatch(simulator.initialize(), ["a", "b"])[0]))
    for one, other in zip(*states, strict=True):
        assert_equal(one, other)


def test_what_the_server_alone_trains_has_no_clients_to_share():
    experiment = build(tiny.config("freematch_central", seeds=2, execution__strategy="auto"), IMAGES)
    assert devices(experiment) == (1, 2)


@pytest.mark.parametrize("method", [slow("fl2", "server"), FEDSEM])
def test_seeds_whose_largest_clients_differ_equal_the_runs_alone(method):
    experiment = build(config(*method, client__epochs=2, client__steps=0, **DIRICHLET), IMAGES)
    problem, widths = experiment.problem, set()
    for number, tables in enumerate(problem.tables):
        own = alone(experiment, number).problem.data
        widths.add(own.unlabeled.index.shape[1])
        for name in TABLES:  # the same rows, with more padding
            narrow = getattr(own, name)
            np.testing.assert_array_equal(narrow.count, tables[name].count)
            np.testing.assert_array_equal(narrow.index, tables[name].index[:, : narrow.index.shape[1]])
            assert not np.any(tables[name].index[:, narrow.index.shape[1] :])
    assert len(widths) > 1
    assert problem.spec.client_rows == max(widths)
    state, rows = next(experiment.rounds())
    states = experiment.simulator.split(state)
    for number in (0, 2):
        # FedSem's clients shuffle both kinds of examples in one table, where the width shows: the same width then.
        own = experiment.only([number]) if method == FEDSEM else alone(experiment, number)
        expected, row = next(own.rounds())
        assert_equal(expected, states[number])
        assert_same_rows(row, rows[number])


def test_the_method_knows_the_clients_of_all_runs(monkeypatch):
    known, options = [], type(Settings.from_dict(config("fixmatch")).method_options())
    monkeypatch.setattr(options, "for_run", lambda self, *given: known.append(given) or self)
    experiment = build(config("fixmatch", **DIRICHLET), IMAGES)
    counts = [tables["unlabeled"].count for tables in experiment.problem.tables]
    (rounds, given, batch_size), *_ = known
    assert (rounds, batch_size) == (3, experiment.settings.client.batch_size)
    np.testing.assert_array_equal(given[:, 1], np.concatenate(counts))


def test_the_split_may_vary():
    given = config("fixmatch", seeds=1, vary="data.alpha", values=(0.5, 100.0), **DIRICHLET)
    sizes = [np.std(tables["unlabeled"].count) for tables in build(given, IMAGES).problem.tables]
    assert sizes[0] > 2 * sizes[1]


@pytest.mark.parametrize(
    ("method", "key", "values"),
    [
        ("fixmatch", RATE, (0.01, 0.1, 0.03)),
        ("fixmatch", "method.confidence", (0.12, 0.2)),
        # What zero switches off.
        ("fedprox", "method.prox_mu", (0.1, 3.0)),
        slow("fedavg", MOMENTUM, (0.1, 0.9)),
        slow("fedavg", "client.optimizer.weight_decay", (0.01, 0.3)),
        slow("fedavg", "client.optimizer.clip_norm", (0.05, 0.5)),
        slow("fedavg", "server.momentum", (0.1, 0.9)),
    ],
)
def test_values_of_a_number_equal_the_runs_with_each(method, key, values):
    experiment = build(config(method, network="linear", seeds=1, vary=key, values=values), IMAGES)

    def second(experiment):  # the server's momentum shows from there on
        return list(itertools.islice(experiment.rounds(), 2))[-1]

    state, rows = second(experiment)
    found = experiment.simulator.split(state)
    assert distance(found[0].server, found[1].server) > 1e-4
    for number, value in enumerate(values[-2:], start=len(values) - 2):
        single = alone(experiment, number)
        assert functools.reduce(dict.get, key.split("."), single.settings.to_dict()) == value
        expected, row = second(single)
        assert_equal(expected, found[number])
        assert_same_rows(row, rows[number])


def test_a_number_by_which_the_program_is_chosen_is_refused_in_one_line():
    key = "method.fairness_weight"
    given = tiny.config("freematch_central", seeds=1, vary=key, values=(0.1, 0.2), execution__strategy="auto")
    with pytest.raises(ValueError, match=f"vary: got '{key}', by which the program of method.name=freematch_central is chosen"):
        build(given, IMAGES)


@pytest.mark.parametrize("varied", [False, True])
def test_the_client_is_traced_once(varied):
    several = {"seeds": 1, "vary": RATE, "values": (0.1, 0.2, 0.3)} if varied else {}
    problem, traces = build(config("fixmatch", **several), IMAGES).problem, []

    def method(number):
        own = problem.method(number)

        def counted(*args):
            traces.append(1)
            return own.client_update(*args)

        return own._replace(client_update=counted)

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
    experiment = build(config("fixmatch", seeds=1, vary=RATE, values=(0.03, 1e37), method__confidence=0.0), IMAGES)
    rows = [rows for _, rows in experiment.rounds()]
    assert [row[0]["round"] for row in rows] == [1, 2, 3]
    for number, (good, bad) in enumerate(rows, start=1):
        assert good["eval/accuracy"] > 0 if number in (2, 3) else "eval/accuracy" not in good
        assert np.isfinite(good["client/loss"])
        assert bad.keys() == {"round", "diverged"}
        assert bad["round"] == number
        assert bad["diverged"].startswith("round 1: all 5 clients returned NaN or infinity")
    single = [row for _, row in alone(experiment, 0).rounds()]
    assert [without_times(row) for row in single] == [pytest.approx(without_times(good), rel=1e-2) for good, _ in rows]


def test_rounds_end_once_all_runs_have_diverged(caplog):
    experiment = build(config("fixmatch", seeds=1, vary=RATE, values=(1e36, 1e37), method__confidence=0.0), IMAGES)
    rows = [rows for _, rows in experiment.rounds()]
    assert len(rows) == 1
    assert all("diverged" in row for row in rows[0])
    assert "learning_rate=1e+37, round 1: client " in caplog.text


def test_the_runs_have_the_settings_that_they_have_alone():
    seeds = runs_of(Settings.from_dict(config("fixmatch", seeds=3, seed=5)))
    assert [run.settings for run in seeds] == [Settings.from_dict(config("fixmatch", seeds=1, seed=seed)) for seed in (5, 6, 7)]
    assert [run.name for run in seeds] == ["5", "6", "7"]
    values = runs_of(Settings.from_dict(config("fixmatch", seeds=1, vary="method.confidence", values=(0.5, 1))))
    each = [config("fixmatch", seeds=1, method__confidence=value) for value in (0.5, 1.0)]
    assert [run.settings for run in values] == [Settings.from_dict(one) for one in each]
    assert [run.name for run in values] == ["0-confidence=0.5", "0-confidence=1.0"]
    (one,) = runs_of(Settings.from_dict(config("fixmatch", seeds=1)))
    assert (one.name, str(one), one.number) == ("", "seed 0", None)


WRONG = [
    ({"seeds": 0}, "seeds: got 0, accepted"),
    ({"seeds": 2, "vary": RATE, "values": (0.1, 0.2)}, "seeds: got 2 with vary and values, accepted: 1"),
    ({"values": (0.1, 0.2)}, "vary: got '' with 2 values"),
    ({"vary": RATE}, r"values: got \(\) with vary=client.optimizer.learning_rate, accepted: two numbers or more"),
    ({"vary": RATE, "values": (0.1,)}, "values: got .* accepted: two numbers or more, each once"),
    ({"vary": RATE, "values": (0.1, 0.1)}, "values: got .* accepted: two numbers or more, each once"),
    ({"vary": RATE, "values": (0.1, -1.0)}, "client.optimizer.learning_rate: got -1.0, accepted"),
    ({"vary": "method.confidence", "values": (0.1, 2.0)}, "method.confidence: got 2.0, accepted"),
    ({"vary": "client.optimizer.learning_rat", "values": (0.1, 0.2)}, f"accepted: .*did you mean '{RATE}'"),
    (
        {"vary": "client.epochs", "values": (1.0, 2.0)},
        "vary: got 'client.epochs', which is a int, accepted: the key of a float",
    ),
    ({"vary": "rounds", "values": (1.0, 2.0)}, "vary: got 'rounds', accepted: the key of a float in client, server, method, d"),
    ({"seeds": 2, "execution__data": "host"}, "execution.data: got host with 2 runs, accepted: device"),
    ({"seeds": 2, "execution__devices": 9}, "execution.devices: got 9, accepted: at most 4"),
    ({"seeds": 2, "data__name": "synthetic"}, "seeds: got 2 with data.name=synthetic, which the seed draws, accepted: 1"),
    (
        {"vary": MOMENTUM, "values": (0.1, 0.0)},
        rf"got \(0.1, 0.0\) with vary={MOMENTUM}, accepted: numbers > 0, as without m",
    ),
    ({"vary": MOMENTUM, "values": (0.1, -0.2)}, f"{MOMENTUM}: got -0.2, accepted"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_cannot_be_several_runs_is_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        build(config("fixmatch", **{"seeds": 1, "data__name": "digits"} | given))
    assert "\n" not in str(error.value)
