"""Asynchronous rounds (FedBuff) with a method of one number, beside a Python loop over arrivals."""

import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data.profiles import Profiles
from fedjax_ssl.method import ClientOutput, Cohort
from fedjax_ssl.metrics import Mean, Sum
from fedjax_ssl.simulation import cohort
from fedjax_ssl.simulation.asynchronous import inner
from fedjax_ssl.simulation.simulator import Simulator, copied
from fedjax_ssl.simulation.system import System
from tests import engine, tiny, toy

BUFFER, CONCURRENCY, ROUNDS, EXPONENT, RATE = 2, 4, 12, 0.7, 0.5
RULES = System(participation="async", is_timed=True, concurrency=CONCURRENCY, staleness=EXPONENT)
UP, DOWN = np.float32([4, 0.5, 1, 2.5, 0.3, 8, 1.7]), np.float32([3, 4, 0.9, 4, 2, 0.4, 4])
PROFILES = Profiles(np.full(7, np.inf, np.float32), UP, DOWN)


def approaching():
    """A client goes half of the way from the number that it was given to its pixels' mean."""

    def client_update(shared, per_client, state, client_data, key):
        pixels = client_data.unlabeled.take(jnp.arange(client_data.unlabeled.index.shape[0])).reshape(-1).astype(jnp.float32)
        count = client_data.unlabeled.count.astype(jnp.float32)
        gap = shared["w"] - jnp.sum(jnp.where(client_data.unlabeled.mask, pixels, 0)) / jnp.maximum(count, 1)
        metrics = {"client/loss": Mean(gap, jnp.ones(())), "comm/bytes_up": Sum(4), "comm/bytes_down": Sum(4)}
        return ClientOutput({"w": RATE * gap}, count, state + 1, metrics)

    return toy.method()._replace(client_update=client_update)


def problem_of(rules=RULES, **options):
    problem = toy.problem(BUFFER, made=approaching(), **options)
    return problem._replace(tables=tuple({**own, "profiles": PROFILES} for own in problem.tables), system=rules)


def drawn(problem, number):
    key, data = jax.random.key(problem.seeds[0]), problem.data
    return [int(k) for k in cohort.draw(key, jnp.int32(number), problem.spec, problem.rounds, problem.system, data).ids]


def expected(problem, exponent=EXPONENT):
    """The numbers, the seconds and the mean staleness of all rounds, by a queue of arrivals."""
    w, step, now, last, rows = 0.0, 0, 0.0, 0.0, []
    order, queue = itertools.count(), []

    def begin(client, now):
        update = RATE * (w - 10 * (client + 1))
        seconds = 4 / DOWN[client] + 4 / UP[client]
        heapq.heappush(queue, (now + seconds, next(order), client, step, update))

    begun = itertools.chain.from_iterable(drawn(problem, number) for number in range(ROUNDS))
    next(begun)  # the free place: it is the one of the update that completes a step
    for _ in range(CONCURRENCY - 1):
        begin(next(begun), 0.0)
    for number in range(ROUNDS):
        arrived = []
        if number >= CONCURRENCY // BUFFER:
            begin(next(begun), now)  # with the new model
            while len(arrived) < BUFFER:
                now, _, who, since, update = heapq.heappop(queue)
                arrived.append((toy.SIZES[who], step - since, update))
                if len(arrived) < BUFFER:
                    begin(next(begun), now)
        if arrived:
            total = sum(n for n, _, _ in arrived)
            w -= sum(n * (1 + late) ** -exponent * update for n, late, update in arrived) / total
            step += 1
        rows.append((w, now - last, np.mean([late for _, late, _ in arrived]) if arrived else None))
        last = now
    return rows


def test_the_example_has_late_updates_and_some_that_overtake_others():
    rows = expected(problem_of())
    assert [row[2] for row in rows[:2]] == [None, None]
    assert max(row[2] for row in rows[2:]) > 2
    assert 0.0 in [row[2] for row in rows[2:]] or min(row[2] for row in rows[2:]) < 1
    assert expected(problem_of(), 0.0)[-1][0] != rows[-1][0]


@pytest.mark.parametrize("name", toy.EXECUTIONS)
def test_steps_of_the_server_are_those_of_a_loop_over_arrivals(name):
    problem = problem_of()
    simulator = Simulator(problem, toy.EXECUTIONS[name])
    state = simulator.initialize()
    for w, seconds, late in expected(problem):
        state, row = simulator.round(state)
        np.testing.assert_allclose(inner(state.server)["w"], w, rtol=1e-5)
        assert row["sim/seconds"] == pytest.approx(seconds, rel=1e-4, abs=1e-4)
        assert row.get("sim/staleness") == (None if late is None else pytest.approx(late))
        assert row["client/participants"] == BUFFER - (int(state.round) == 1)
        assert (row["client/non_finite"], row["server/non_finite"]) == (0, 0)
    assert int(state.server.steps) == ROUNDS - CONCURRENCY // BUFFER
    assert np.sum(np.asarray(state.clients)) == ROUNDS * BUFFER - 1


def test_one_client_at_a_time_is_never_late_and_takes_the_steps_of_sequential_training():
    problem = problem_of(RULES._replace(concurrency=1))
    problem = problem._replace(spec=problem.spec._replace(cohort_size=1))
    simulator, w = Simulator(problem, toy.EXECUTIONS["vmap"]), 0.0
    state = simulator.initialize()
    for number in range(6):
        (client,) = drawn(problem, number)
        w -= RATE * (w - 10 * (client + 1)) * (number > 0)
        state, row = simulator.round(state)
        np.testing.assert_allclose(inner(state.server)["w"], w, rtol=1e-5)
        assert row.get("sim/staleness", 0.0) == 0.0


@pytest.mark.parametrize("on_host", [False, True])
def test_it_goes_on_from_a_state_bit_for_bit_and_with_several_rounds_in_one_call(on_host):
    problem = problem_of(on_host=on_host)
    simulator, half, _ = toy.run(problem, toy.EXECUTIONS["vmap"], ROUNDS // 2)
    half = copied(half)
    _, whole, rows = toy.run(problem, toy.EXECUTIONS["vmap"], ROUNDS)
    state = half
    for row in rows[ROUNDS // 2 :]:
        state, again = simulator.round(state)
        assert again == row
    assert engine.same_bits(whole, state)
    np.testing.assert_allclose(inner(whole.server)["w"], expected(problem)[-1][0], rtol=1e-5)


@pytest.mark.ci
def test_two_seeds_in_one_program_are_the_runs_alone():
    together = Simulator(problem_of(seeds=(0, 1)), toy.EXECUTIONS["vmap"]._replace(rounds=ROUNDS))
    state, _ = together.dispatch(together.initialize(), ["first", "second"])
    for own, seed in zip(together.split(state), (0, 1), strict=True):
        problem = problem_of(seeds=(seed,))
        np.testing.assert_allclose(inner(own.server)["w"], expected(problem)[-1][0], rtol=1e-5)


def test_a_client_that_is_left_out_arrives_without_weight():
    made = approaching()

    def client_update(shared, per_client, state, client_data, key):
        output = made.client_update(shared, per_client, state, client_data, key)
        return output._replace(update={"w": output.update["w"] + jnp.where(per_client == 3, jnp.nan, 0)})

    problem = problem_of()._replace(method=lambda _: made._replace(client_update=client_update))
    _, state, rows = toy.run(problem, toy.EXECUTIONS["vmap"], ROUNDS)
    assert np.isfinite(inner(state.server)["w"])
    assert sum(row["client/non_finite"] for row in rows) == sum(3 in drawn(problem, number) for number in range(ROUNDS)) > 0


def test_the_cohorts_are_those_of_uniform_rounds():
    problem, uniform = problem_of(), problem_of(RULES._replace(participation="uniform"))
    assert [drawn(problem, number) for number in range(4)] == [drawn(uniform, number) for number in range(4)]
    assert isinstance(cohort.sample(jax.random.key(0), jnp.int32(0), problem.spec, None), Cohort)


@pytest.mark.ci
@pytest.mark.parametrize(
    "method", ["fl2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedlabel", "fedmatch", "fixmatch", "feddure"))]
)
def test_methods_run_asynchronously_and_their_models_are_used_as_ever(tmp_path, method):
    keys = {"speed": 50.0, "speed_sigma": 1.0, "participation": "async", "staleness": 0.5}
    experiment = tiny.experiment(method, rounds=4, **{f"system__{key}": value for key, value in keys.items()})
    *_, (state, row) = experiment.rounds()
    assert row["sim/seconds"] > 0
    assert row["sim/staleness"] >= 0
    assert experiment.predict(state, experiment.problem.test.images[:3]).shape == (3, 10)
    if method != "fedmatch":
        experiment.save_model(tmp_path / "model.npz", state)
