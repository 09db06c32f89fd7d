"""Uneven clients with a method of one number, beside NumPy: who is there, drops out or is late, and how long it all takes."""

import functools
import math
import types
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data import batching
from fedjax_ssl.data.profiles import Profiles
from fedjax_ssl.local import train
from fedjax_ssl.local.client import client_metrics
from fedjax_ssl.local.counters import count_outputs
from fedjax_ssl.method import ClientOutput, DataSpec
from fedjax_ssl.metrics import mean
from fedjax_ssl.simulation import cohort, rng, source, system
from fedjax_ssl.simulation.round import RunState
from fedjax_ssl.simulation.simulator import Simulator
from fedjax_ssl.simulation.system import System
from tests import engine, toy

pytestmark = pytest.mark.reliability

RATE, EPOCHS, SEED = 0.1, 2, 5
ROUNDS = 6
RULES = System(round_s=100.0, period_s=400.0, dropout=0.3, deadline_s=20.0, is_timed=True)
SPEED, UP, DOWN = np.float32([[1, 2, 3, 1, 2, 0.5, 50], [4, 2, 1, 4, 4, 4, 4], [4, 4, 4, 2, 1, 4, 4]])
WINDOWS = np.float32([[[0, 400]], [[0, 200]], [[100, 400]], [[0, 400]], [[300, 600]], [[0, 400]], [[0, 400]]])
PROFILES = Profiles(SPEED, UP, DOWN, WINDOWS)


def walker():
    """Each client walks from the broadcast number towards its pixels, one pixel a step, by `local.train`."""
    made = toy.method()

    def client_update(shared, per_client, state, client_data, key):
        def step(w, batch, key):
            pixel = client_data.unlabeled.take(batch.positions).reshape(-1).astype(jnp.float32)
            grad = jax.grad(lambda w: jnp.sum((count_outputs((w - pixel)[:, None])) ** 2) / 2)(w)
            return w - RATE * grad, {"loss": mean(jnp.abs(w - pixel), batch.mask)}

        schedule = batching.shuffled(key, client_data.unlabeled.mask, 1, epochs=EPOCHS)
        trained = train(shared["w"], step, schedule, key)
        update = {"w": shared["w"] - trained.carry}
        weight = client_data.unlabeled.count.astype(jnp.float32)
        return ClientOutput(update, weight, state + 1, client_metrics(trained, down=shared, up=update))

    return made._replace(client_update=client_update)


def problem_of(rules=RULES, profiles=PROFILES, **options):
    problem = toy.problem(7, made=walker(), seeds=options.pop("seeds", (SEED,)), **options)
    tables = tuple({**own, "profiles": profiles} for own in problem.tables)
    return problem._replace(tables=tables, system=rules)


def reached(number, rules, windows):
    """Which clients can be reached in a round."""
    time = (number * rules.round_s) % rules.period_s
    return [any(b <= time < e or b <= time + rules.period_s < e for b, e in own) for own in windows]


def stays(key, number, client, dropout):
    key = jax.random.fold_in(rng.stream(key, "dropout"), number)
    return float(jax.random.uniform(jax.random.fold_in(key, client))) >= dropout


@functools.cache
def expected(rules=RULES, seed=SEED):
    """What a loop over rounds and clients makes of it: the rows, the number after the rounds, and the clients' counts."""
    key, w, taken, rows = jax.random.key(seed), 0.0, np.zeros(7, int), []
    missing = rules.deadline_s if rules.deadline_s < math.inf else 0.0
    for number in range(ROUNDS):
        row = dict.fromkeys(("sim/dropped", "sim/absent", "client/participants", "comm/bytes_up", "comm/bytes_down"), 0)
        row |= {"cost/forward_passes": 0, "cost/backward_passes": 0, "perf/client_images": 0}
        waited, updates, weights, gaps = [0.0], [], [], []
        for k, there in enumerate(reached(number, rules, WINDOWS)):
            row["sim/absent"] += not there
            row["comm/bytes_down"] += 4 * there
            steps = EPOCHS * toy.SIZES[k]
            both_ways = 4 / DOWN[k] + 4 / UP[k]
            if rules.shortens:
                steps = min(steps, max(0, math.floor((rules.deadline_s - both_ways) * SPEED[k] / 3 + 1e-6)))
            seconds, works = both_ways + 3 * steps / SPEED[k], there and stays(key, number, k, rules.dropout)
            for name in ("cost/forward_passes", "cost/backward_passes", "perf/client_images"):
                row[name] += steps * works
            if not works or seconds > rules.deadline_s:
                row["sim/dropped"] += there
                waited.append(missing)
                continue
            local = w
            for _ in range(steps):
                gaps.append(abs(local - 10 * (k + 1)))
                local -= RATE * (local - 10 * (k + 1))  # all pixels of a client are alike
            row["comm/bytes_up"] += 4
            row["client/participants"] += 1
            waited.append(seconds)
            taken[k] += 1
            updates.append(local)
            weights.append(toy.SIZES[k])
        w = np.average(updates, weights=weights) if updates else w
        rows.append(row | {"sim/seconds": max(waited)} | ({"client/loss": np.mean(gaps)} if gaps else {}))
    return rows, w, taken


def assert_as_expected(state, rows, rules=RULES, seed=SEED):
    wanted, w, taken = expected(rules, seed)
    for row, one in zip(rows, wanted, strict=True):
        assert {key: row[key] for key in one} == pytest.approx(one, rel=1e-5)
        assert row["client/non_finite"] == 0
    np.testing.assert_allclose(state.server["w"], w, rtol=1e-5)
    np.testing.assert_array_equal(state.clients, taken)


SHORTENED, WAITING = RULES._replace(shortens=True), RULES._replace(deadline_s=math.inf)


def test_the_example_has_every_case():
    columns = [
        {key: [row[key] for row in expected(rules)[0]] for key in expected()[0][0]} for rules in (RULES, SHORTENED, WAITING)
    ]
    dropped, shortened, waiting = columns
    assert set(dropped["sim/absent"]) == {0, 1, 2}
    assert sum(waiting["sim/dropped"]) > 3  # which drop out
    assert sum(dropped["sim/dropped"]) > sum(shortened["sim/dropped"]) == sum(waiting["sim/dropped"])
    assert sum(shortened["cost/backward_passes"]) < sum(waiting["cost/backward_passes"])
    assert max(waiting["sim/seconds"]) > RULES.deadline_s > min(waiting["sim/seconds"])


WAYS = [*((name, False) for name in toy.EXECUTIONS), ("vmap", True), ("sharded", True)]
FAST = (("chunked", False, SHORTENED), ("vmap", True, RULES))
CI = (("sharded_chunked", False, RULES), ("sharded", True, WAITING), ("scan", False, SHORTENED))


def marked(case):
    """The mark of a way to run clients and of rules."""
    return () if case in FAST else pytest.mark.ci if case in CI else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "on_host", "rules"),
    [
        pytest.param(
            *way,
            rules,
            id=f"{way[0]}-{'host' if way[1] else 'device'}-{words}",
            marks=marked((*way, rules)),
        )
        for way in WAYS
        for words, rules in {"dropped": RULES, "shortened": SHORTENED, "waiting": WAITING}.items()
    ],
)
def test_rounds_of_uneven_clients_are_what_a_python_loop_computes(name, on_host, rules):
    _, state, rows = toy.run(problem_of(rules, on_host=on_host), toy.EXECUTIONS[name], ROUNDS)
    assert_as_expected(state, rows, rules)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "sharded_chunked"])
def test_two_seeds_and_six_rounds_in_one_call_are_the_same(name):
    problem = problem_of(SHORTENED, seeds=(SEED, SEED + 1))
    simulator = Simulator(problem, toy.EXECUTIONS[name]._replace(rounds=ROUNDS))
    state, found = simulator.dispatch(simulator.initialize(), ["first", "second"])
    for run, (own, seed) in enumerate(zip(simulator.split(state), problem.seeds, strict=True)):
        assert_as_expected(own, [rows[run] for rows in found], SHORTENED, seed)


@pytest.mark.ci
def test_a_round_that_is_recorded_says_how_long_each_client_took():
    simulator = Simulator(problem_of(WAITING), toy.EXECUTIONS["chunked"])
    _, ((row,),) = simulator.dispatch(simulator.initialize(), record=True)
    waited = row["clients"]["client/seconds"]
    assert waited.shape == (7,)
    assert max(waited) == row["sim/seconds"]
    assert sum(waited == 0) == row["sim/dropped"] + row["sim/absent"] > 0


@pytest.mark.parametrize(
    ("participation", "seconds"), [pytest.param("uniform", 20.0, marks=pytest.mark.ci), ("available", 0.0)]
)
def test_a_round_with_nobody_is_a_round(participation, seconds, caplog):
    nobody = PROFILES._replace(windows=np.zeros_like(WINDOWS))
    _, state, rows = toy.run(problem_of(RULES._replace(participation=participation), nobody), toy.EXECUTIONS["scan"], 2)
    assert (float(state.server["w"]), int(state.clients.sum()), int(state.round)) == (0, 0, 2)
    for row in rows:
        assert (row["sim/absent"], row["sim/dropped"], row["client/participants"]) == (7, 0, 0)
        assert not any(value for key, value in row.items() if key.startswith(("comm/", "cost/", "client/")))
        assert row["sim/seconds"] == seconds
        assert "client/loss" not in row
    assert "round 2: no client took part" in caplog.text


def test_nan_of_a_client_who_is_not_heard_of_is_no_fault():
    silent = RULES._replace(dropout=1.0)
    bad = engine.with_outputs(walker(), lambda output: output._replace(update={"w": jnp.nan * output.update["w"]}))
    problem = problem_of(silent)._replace(method=lambda number: bad)
    _, state, (row,) = toy.run(problem, toy.EXECUTIONS["vmap"], 1)
    assert (row["client/non_finite"], row["server/non_finite"], float(state.server["w"])) == (0, 0, 0)
    assert (row["sim/dropped"], row["comm/bytes_down"], row["comm/bytes_up"]) == (6, 24, 0)


def test_going_on_from_a_state_gives_the_same_bits():
    shortened = types.SimpleNamespace(problem=problem_of(SHORTENED))
    engine.assert_goes_on(*engine.simulate(shortened, "chunked", rounds=4), start=2)


def test_clients_who_are_not_heard_of_compute_nothing_and_those_who_will_not_be_there_are_not_read():
    problem = problem_of()
    made = source.DeviceSource(problem)
    state = RunState({"w": jnp.zeros(())}, jnp.zeros(7, jnp.int32), jnp.int32(1), jax.random.key(SEED))
    ready = made.open(state, source.RunInputs(problem.tables[0], None), made.pools)
    sizes, ids = np.array(toy.SIZES), np.asarray(ready.cohort.ids)
    works = [reached(1, RULES, WINDOWS)[k] and stays(state.key, 1, k, RULES.dropout) for k in ids]
    assert 0 < sum(works) < 7
    np.testing.assert_array_equal(ready.inputs.rows.unlabeled.count, sizes[ids] * works)
    following = np.asarray(cohort.sample(state.key, jnp.int32(2), problem.spec, 9).ids)
    np.testing.assert_array_equal(
        ready.data.server.next_cohort.count, sizes[following] * np.array(reached(2, RULES, WINDOWS))[following]
    )


# --- who is drawn ------------------------------------------------------------------------------------------------------


def draws(rules, size, rounds, sizes=toy.SIZES, windows=WINDOWS):
    """The clients drawn in some rounds: ids int [rounds, size], and which of them can be reached."""
    data = toy.data(sizes)._replace(profiles=Profiles(SPEED, UP, DOWN, windows))
    spec = DataSpec((1,), 2, len(sizes), size)
    many = jax.jit(jax.vmap(lambda number: cohort.draw(jax.random.key(3), number, spec, rounds, rules, data)))
    drawn = many(jnp.arange(rounds, dtype=jnp.int32))
    return np.asarray(drawn.ids), np.asarray(drawn.available)


def test_windows_begin_at_their_begin_and_end_before_their_end_and_go_on_after_the_period():
    times = np.float32([0, 99, 100, 150, 199, 200, 299, 300, 399, 400, 500])
    windows = np.float32([[[100, 200], [0, 0]], [[300, 450], [150, 151]], [[0, 400], [0, 0]], [[0, 0], [0, 0]]])
    got = [system.are_available(System(round_s=float(t), period_s=400.0), windows, 1, 4).tolist() for t in times]
    first, second, always, never = zip(*got, strict=True)
    assert [t for t, there in zip(times, first, strict=True) if there] == [100, 150, 199, 500]
    assert [t for t, there in zip(times, second, strict=True) if there] == [0, 150, 300, 399, 400]
    assert all(always)
    assert not any(never)
    for number in range(9):
        got = system.are_available(RULES, WINDOWS, jnp.int32(number), 7)
        assert got.tolist() == reached(number, RULES, WINDOWS)


@pytest.mark.parametrize(("round_s", "period_s"), [(600.0, 86_400.0), (0.1, 86_400.0), (1e6, 604_800.0), (3.7, 1.3)])
def test_the_time_of_day_is_right_in_any_round(round_s, period_s):
    rules = System(round_s=round_s, period_s=period_s)
    for number in (0, 1, 143, 144, 30_000, 10**6, 10**9 + 7, 2**31 - 1):
        exact = float(Fraction(round_s) * number % Fraction(period_s))
        apart = abs(float(system.time_of_day(rules, jnp.int32(number))) - exact)
        assert min(apart, period_s - apart) < 1e-5 * period_s


def test_uniform_cohorts_are_those_of_even_clients():
    ids, available = draws(RULES, 3, 50)
    spec = DataSpec((1,), 2, 7, 3)
    even = jax.jit(jax.vmap(lambda number: cohort.sample(jax.random.key(3), number, spec, 50).ids))(jnp.arange(50))
    np.testing.assert_array_equal(ids, even)
    for number in range(50):
        assert available[number].tolist() == [reached(number, RULES, WINDOWS)[k] for k in ids[number]]


def test_weighted_cohorts_have_the_probabilities_of_drawing_one_after_another():
    sizes, rounds = (1, 2, 5, 0, 2), 6000
    ids, available = draws(RULES._replace(participation="weighted"), 2, rounds, sizes, None)
    assert available.all()
    p = np.array(sizes) / 10
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs = np.nan_to_num(p[:, None] * p / (1 - p[:, None]))  # i first, then j
    counts = np.zeros((5, 5))
    np.add.at(counts, tuple(ids.T), 1)
    for i in range(5):
        for j in range(5):
            chance = 0 if i == j else pairs[i, j]
            assert abs(counts[i, j] / rounds - chance) <= 5 * np.sqrt(chance * (1 - chance) / rounds)


def test_weighted_places_beyond_the_clients_with_data_are_empty():
    ids, available = draws(RULES._replace(participation="weighted"), 4, 20, (1, 2, 5, 0, 0), None)
    assert (available.sum(1) == 3).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert all(set(row[here]) == {0, 1, 2} for row, here in zip(ids, available, strict=True))


def test_available_cohorts_are_uniform_among_those_who_can_be_reached():
    rules, rounds = RULES._replace(participation="available", round_s=150.0, period_s=400.0), 4000
    ids, available = draws(rules, 2, rounds)
    assert available.all()
    drawn = np.zeros((rounds, 7))
    np.put_along_axis(drawn, ids, 1, axis=1)
    here = np.array([reached(number, rules, WINDOWS) for number in range(rounds)])
    assert not (drawn.astype(bool) & ~here).any()
    chances = here * 2 / here.sum(1, keepdims=True)
    spread = 5 * np.sqrt((chances * (1 - chances)).sum(0))
    assert (np.abs(drawn.sum(0) - chances.sum(0)) < spread).all()
    few = np.zeros_like(WINDOWS)
    few[[2, 5]] = 0, 400
    ids, available = draws(rules, 5, 20, windows=few)
    assert all(len(set(row)) == 5 for row in ids.tolist())
    assert all(set(row[here]) == {2, 5} for row, here in zip(ids, available, strict=True))


def test_clients_drop_out_at_the_rate_that_is_set_by_seed_round_and_client_alone():
    profiles = jax.tree.map(jnp.asarray, PROFILES)

    def of_round(number, ids):
        return system.slots(RULES, jax.random.key(1), cohort.Cohort(ids, number, 1, jnp.ones(7, bool)), profiles).stays

    ids = jnp.arange(7)
    found = np.asarray(jax.jit(jax.vmap(of_round, (0, None)))(jnp.arange(2000), ids))
    np.testing.assert_allclose(found.mean(0), 0.7, atol=5 * np.sqrt(0.21 / 2000))
    together = (found[:, :-1] & found[:, 1:]).mean(0)
    np.testing.assert_allclose(together, 0.49, atol=5 * np.sqrt(0.25 / 2000))
    np.testing.assert_array_equal(of_round(11, ids[::-1]), found[11, ::-1])
