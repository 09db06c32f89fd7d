"""Several runs as one program: each equals the run alone, it is traced once, and one that diverges does not end the others."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from fedjax_ssl.data.federated import TABLES, FederatedData
from fedjax_ssl.data.sources.builtin import synthetic
from fedjax_ssl.experiment import build, many
from fedjax_ssl.simulation import execution
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.many import ManySimulator, Spread, spread_of
from fedjax_ssl.simulation.simulator import Problem, Simulator
from tests import tiny

IMAGES = synthetic(seed=0)  # those of all runs
SEEDS = 3
# Fast methods, in which nothing flips within a round for these seeds: FixMatch and (FL)^2, labels at the server; FedSem, which
# keeps its clients' pseudo-labels, in tables that are as wide as those of the largest client.
METHODS = (("fixmatch", "server"), ("fl2", "server"), ("fedsem", "clients"))
DIRICHLET = {"data__partition": "dirichlet", "data__alpha": 0.5, "data__min_size": 2}


def config(method, labels_at="", **overrides):
    """Three seeds over two of the devices, so that a slot is left over."""
    quick = {
        "client__epochs": 0,
        "client__steps": 3,
        "server__epochs": 1,
        "execution__devices": 2,
        "execution__strategy": "auto",
    }
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


def alone(experiment, run, dataset=IMAGES):
    """The run's own experiment, its clients one after another."""
    execution = dataclasses.replace(experiment.runs[run].settings.execution, strategy="scan", devices=0)
    return build.build(dataclasses.replace(experiment.runs[run].settings, execution=execution), dataset)


@pytest.mark.parametrize("method", METHODS, ids="-".join)
def test_seeds_whose_splits_are_alike_equal_the_runs_alone(method):
    experiment = many.build(config(*method), IMAGES)
    assert [str(run) for run in experiment.runs] == ["seed 0", "seed 1", "seed 2"]
    assert experiment.num_devices == 2
    state, rows = next(experiment.rounds())
    for number, own in enumerate(experiment.states(state)):
        expected, row = next(alone(experiment, number).rounds())
        assert_equal(expected, own)
        assert_same_rows(row, rows[number])
    servers = [own.server for own in experiment.states(state)]
    assert distance(servers[0], servers[1]) > 1e-2


# FedMatch's server keeps all updates, and FedSem's clients something of their own; five clients leave a slot over.
@pytest.mark.parametrize("method", [("fl2", "server"), ("fedsem", "clients"), ("fedmatch", "clients")], ids="-".join)
def test_where_there_are_devices_enough_they_share_the_clients_of_a_run(method):
    experiment = many.build(config(*method, seeds=2, execution__devices=4), IMAGES)
    assert (experiment.layout.strategy, experiment.layout.devices, experiment.num_devices) == ("sharded", 2, 4)
    assert experiment.simulator.spread.mesh.shape == {"runs": 2, "clients": 2}
    rounds = zip(experiment.rounds(), *(alone(experiment, number).rounds() for number in range(2)), strict=True)
    for (state, rows), *both in itertools.islice(rounds, 2):
        for (expected, row), own, found in zip(both, experiment.states(state), rows, strict=True):
            assert_equal(expected, own)
            assert_same_rows(row, found)


def test_each_of_a_runs_devices_has_a_share_of_its_clients_and_of_the_test_set(monkeypatch):
    experiment = many.build(config("fixmatch", seeds=2, execution__devices=4, execution__batch_size=10), IMAGES)
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
    experiment = many.build(config("fixmatch", **{"execution__devices": 0, **given}), IMAGES)
    assert (experiment.layout.devices, experiment.num_devices) == (of_run, all_)
    assert (experiment.layout.strategy == "sharded") == (of_run > 1)


def test_some_of_the_runs_have_the_layout_that_is_usual_for_so_many():
    some = many.build(config("fixmatch", seeds=4, execution__devices=4), IMAGES).only([2, 3])
    assert (some.layout.strategy, some.layout.devices, some.num_devices) == ("sharded", 2, 4)


def test_a_run_has_no_more_devices_than_there_are():
    experiment = many.build(config("fixmatch", seeds=2, execution__devices=4), IMAGES)
    with pytest.raises(ValueError, match="num_devices: got 1, accepted: at least 2, the devices of one run"):
        experiment.in_layout(experiment.layout, 1)


@pytest.mark.parametrize(("vmapped", "chunk"), [(True, 0), (False, 2)])
def test_runs_that_devices_share_may_also_be_vmapped_and_their_clients_go_in_chunks(vmapped, chunk):
    experiment = many.build(config("fl2", seeds=2, execution__devices=4), IMAGES)
    states = []
    for spread, at_once in ((experiment.simulator.spread, 1), (spread_of(2, 2, 2)._replace(vmapped=vmapped), chunk)):
        simulator = ManySimulator(experiment.problem, spread, Execution(at_once, share=2), 250)
        states.append(simulator.round(simulator.initialize()[0], ["a", "b"])[0])
    for one, other in zip(*map(experiment.states, states), strict=True):
        assert_equal(one, other)


def test_what_the_server_alone_trains_has_no_clients_to_share():
    experiment = many.build(tiny.config("freematch_central", seeds=2, execution__strategy="auto"), IMAGES)
    assert (experiment.layout.devices, experiment.num_devices) == (1, 2)


@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize("method", METHODS, ids="-".join)
def test_seeds_whose_largest_clients_differ_equal_the_runs_alone_on_tables_of_their_width(method, vmapped):
    experiment = many.build(config(*method, client__epochs=2, client__steps=0, **DIRICHLET), IMAGES)
    problem, simulator = experiment.problem, experiment.simulator
    widths = set()
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
    if vmapped:
        simulator = ManySimulator(problem, Spread(None, True), Execution(0), 250)
    state, _ = simulator.round(simulator.initialize()[0], ["a", "b", "c"])
    accuracies = simulator.evaluate(state)
    for number, own in enumerate(experiment.states(state)):
        data = FederatedData(problem.train, problem.test, **problem.tables[number])
        single = Simulator(Problem(problem.method(None), data, problem.spec, problem.cohort_size), Execution(1), 250)
        expected, _ = single.round(single.initialize(problem.seeds[number])[0])
        assert_equal(expected, own)
        assert single.evaluate(expected) == pytest.approx(accuracies[number], rel=1e-4)
        if method[0] != "fedsem":  # its clients shuffle both kinds of examples in one table, where the width shows
            assert_equal(next(alone(experiment, number).rounds())[0], own)


def test_the_method_knows_the_clients_of_all_runs(monkeypatch):
    experiment, known = many.build(config("fixmatch", **DIRICHLET), IMAGES), []
    monkeypatch.setattr(build.Plan, "method", lambda self, counts: known.append(counts))
    experiment.problem.method(None)
    counts = [tables["unlabeled"].count for tables in experiment.problem.tables]
    np.testing.assert_array_equal(known[0][:, 1], np.concatenate(counts))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("client.optimizer.learning_rate", (0.01, 0.1, 0.03)),
        ("method.confidence", (0.12, 0.2)),
        ("data.alpha", (0.5, 100.0)),  # of the split, which no program reads
    ],
)
def test_values_of_a_number_equal_the_runs_with_each(key, values):
    given = config("fixmatch", seeds=1, vary=key, values=values, **(DIRICHLET if key == "data.alpha" else {}))
    experiment = many.build(given, IMAGES)
    state, rows = next(experiment.rounds())
    found = experiment.states(state)
    assert distance(found[0].server, found[1].server) > 1e-4
    if key == "data.alpha":
        sizes = [np.std(tables["unlabeled"].count) for tables in experiment.problem.tables]
        assert sizes[0] > 2 * sizes[1]
        return
    for number, value in enumerate(values):
        single = alone(experiment, number)
        own = single.settings
        assert value == (own.method["confidence"] if key == "method.confidence" else own.client.optimizer.learning_rate)
        expected, row = next(single.rounds())
        assert_equal(expected, found[number])
        assert_same_rows(row, rows[number])


@pytest.mark.parametrize(
    ("method", "key", "values"),
    [
        ("fedprox", "method.prox_mu", (0.1, 3.0)),
        ("fedavg", "client.optimizer.momentum", (0.1, 0.9)),
        ("fedavg", "client.optimizer.weight_decay", (0.01, 0.3)),
        ("fedavg", "client.optimizer.clip_norm", (0.05, 0.5)),
        ("fedavg", "server.momentum", (0.1, 0.9)),
    ],
)
def test_values_of_what_zero_switches_off_equal_the_runs_with_each(method, key, values):
    given = config(method, network="linear", seeds=1, vary=key, values=values)
    experiment = many.build(given, IMAGES)

    def second(experiment):  # the server's momentum shows from there on
        return list(itertools.islice(experiment.rounds(), 2))[-1][0]

    found = experiment.states(second(experiment))
    assert distance(found[0].server, found[1].server) > 1e-4
    for number in range(2):
        assert_equal(second(alone(experiment, number)), found[number])


def test_a_number_by_which_the_program_is_chosen_is_refused_in_one_line():
    key = "method.fairness_weight"
    given = tiny.config("freematch_central", seeds=1, vary=key, values=(0.1, 0.2), execution__strategy="auto")
    with pytest.raises(ValueError, match=f"vary: got '{key}', by which the program of method.name=freematch_central is chosen"):
        many.build(given, IMAGES)


@pytest.mark.parametrize("varied", [False, True])
def test_the_client_is_traced_once(varied):
    several = {"seeds": 1, "vary": "client.optimizer.learning_rate", "values": (0.1, 0.2, 0.3)} if varied else {}
    experiment = many.build(config("fixmatch", **several), IMAGES)
    traces = []

    def method(number):
        own = experiment.problem.method(number)

        def counted(*args):
            traces.append(1)
            return own.client_update(*args)

        return own._replace(client_update=counted)

    simulator = ManySimulator(experiment.problem._replace(method=method), Spread(None, False), Execution(1), 250)
    simulator.trace()
    simulator.template()
    state, _ = simulator.initialize()
    compiled = set()
    for _ in range(3):
        state, _ = simulator.round(state, ["a", "b", "c"])
        compiled.add(simulator.compile_s)
    assert len(traces) == 1
    assert len(compiled) == 1


def test_a_run_that_diverges_is_named_and_the_others_go_on():
    key = "client.optimizer.learning_rate"
    experiment = many.build(config("fixmatch", seeds=1, vary=key, values=(0.03, 1e37), method__confidence=0.0), IMAGES)
    rows = [rows for _, rows in experiment.rounds()]
    assert [row[0]["round"] for row in rows] == [1, 2, 3]
    for number, (good, bad) in enumerate(rows, start=1):
        assert "eval/accuracy" not in good or good["eval/accuracy"] > 0
        assert np.isfinite(good["client/loss"])
        assert bad.keys() == {"round", "diverged"}
        assert bad["round"] == number
        assert bad["diverged"].startswith("round 1: all 5 clients returned NaN or infinity")
    single = [row for _, row in alone(experiment, 0).rounds()]
    assert [without_times(row) for row in single] == [pytest.approx(without_times(good), rel=1e-2) for good, _ in rows]


def test_rounds_end_once_all_runs_have_diverged(caplog):
    key = "client.optimizer.learning_rate"
    experiment = many.build(config("fixmatch", seeds=1, vary=key, values=(1e36, 1e37), method__confidence=0.0), IMAGES)
    rows = [rows for _, rows in experiment.rounds()]
    assert len(rows) == 1
    assert all("diverged" in row for row in rows[0])
    assert "learning_rate=1e+37, round 1: client(s)" in caplog.text
