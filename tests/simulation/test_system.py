"""Uneven clients on a method of one number, beside NumPy: who can be reached, drops out, is late or shortened, and in what time."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data import batching
from fedjax_ssl.data.profiles import Profiles
from fedjax_ssl.local import train
from fedjax_ssl.local.client import client_metrics
from fedjax_ssl.local.marks import mark
from fedjax_ssl.method import ClientOutput, DataSpec
from fedjax_ssl.metrics import mean
from fedjax_ssl.simulation import cohort, rng, system
from fedjax_ssl.simulation.simulator import Simulator
from fedjax_ssl.simulation.system import System
from tests import engine, toy

RATE, EPOCHS, SEED = 0.1, 2, 5
ROUNDS = 6
RULES = System(round_s=100.0, period_s=400.0, dropout=0.3, deadline_s=20.0, is_timed=True)
SPEED, UP, DOWN = np.float32([[1, 2, 3, 1, 2, 0.5, 50], [4, 2, 1, 4, 4, 4, 4], [4, 4, 4, 2, 1, 4, 4]])
WINDOWS = np.float32([[[0, 400]], [[0, 200]], [[100, 400]], [[0, 400]], [[300, 600]], [[0, 400]], [[0, 400]]])
PROFILES = Profiles(SPEED, UP, DOWN, WINDOWS)


def walker():
    """Each client walks from the broadcast number towards its pixels, one pixel a step, by `local.train`."""
    made = toy.method()

    def client_update(shared, own, state, shard, key):
        def step(w, batch, key):
            pixel = shard.unlabeled.take(batch.positions).reshape(-1).astype(jnp.float32)
            grad = jax.grad(lambda w: jnp.sum((mark((w - pixel)[:, None])) ** 2) / 2)(w)
            return w - RATE * grad, {"loss": mean(jnp.abs(w - pixel), batch.mask)}

        schedule = batching.shuffled(key, shard.unlabeled.mask, 1, epochs=EPOCHS)
        trained = train(shared["w"], step, schedule, key)
        update = {"w": shared["w"] - trained.carry}
        weight = shard.unlabeled.count.astype(jnp.float32)
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
def expected(shortens, seed=SEED):
    """What a loop over rounds and clients makes of it: the rows, the number after the rounds, and the clients' counts."""
    key, w, taken, rows = jax.random.key(seed), 0.0, np.zeros(7, int), []
    for number in range(ROUNDS):
        row = {"sim/seconds": 0.0, "sim/dropped": 0, "sim/absent": 0, "client/participants": 0, "comm/bytes_up": 0}
        row |= {"comm/bytes_down": 0, "cost/forward_passes": 0, "cost/backward_passes": 0, "perf/client_images": 0}
        updates, weights = [], []
        for k, there in enumerate(reached(number, RULES, WINDOWS)):
            if not there:
                row["sim/absent"] += 1
                row["sim/seconds"] = RULES.deadline_s
                continue
            row["comm/bytes_down"] += 4
            if not stays(key, number, k, RULES.dropout):
                row["sim/dropped"] += 1
                row["sim/seconds"] = RULES.deadline_s
                continue
            steps = EPOCHS * toy.SIZES[k]
            both_ways = 4 / DOWN[k] + 4 / UP[k]
            if shortens:
                steps = min(steps, max(0, math.floor((RULES.deadline_s - both_ways) * SPEED[k] / 3 + 1e-6)))
            seconds = both_ways + 3 * steps / SPEED[k]
            row["cost/forward_passes"] += steps
            row["cost/backward_passes"] += steps
            row["perf/client_images"] += steps
            if seconds > RULES.deadline_s + 1e-4:
                row["sim/dropped"] += 1
                row["sim/seconds"] = RULES.deadline_s
                continue
            local = w
            for _ in range(steps):
                local -= RATE * (local - 10 * (k + 1))  # all pixels of a client are alike
            row["comm/bytes_up"] += 4
            row["client/participants"] += 1
            row["sim/seconds"] = max(row["sim/seconds"], seconds)
            taken[k] += 1
            updates.append(local)
            weights.append(toy.SIZES[k])
        w = np.average(updates, weights=weights) if updates else w
        rows.append(row)
    return rows, w, taken


def assert_as_expected(state, rows, shortens, seed=SEED):
    wanted, w, taken = expected(shortens, seed)
    for row, one in zip(rows, wanted, strict=True):
        assert {key: row[key] for key in one} == pytest.approx(one, rel=1e-5)
        assert row["client/non_finite"] == 0
    np.testing.assert_allclose(state.server["w"], w, rtol=1e-5)
    np.testing.assert_array_equal(state.clients, taken)


def test_the_example_has_every_case():
    for shortens in (False, True):
        rows, _, _ = expected(shortens)
        assert {row["sim/absent"] for row in rows} >= {1, 2}
        assert sum(row["sim/dropped"] for row in rows) > 3
        assert any(row["sim/seconds"] < RULES.deadline_s for row in rows) or shortens
    late, short = (sum(row["client/participants"] for row in expected(shortens)[0]) for shortens in (False, True))
    assert late < short


WAYS = [*((name, False) for name in toy.EXECUTIONS), ("vmap", True), ("sharded", True)]


@pytest.mark.parametrize("shortens", [False, True])
@pytest.mark.parametrize(
    ("name", "on_host"),
    [pytest.param(*way, marks=() if way in (("chunked", False), ("sharded", True)) else pytest.mark.ci) for way in WAYS],
)
def test_rounds_of_uneven_clients_are_what_a_python_loop_computes(name, on_host, shortens):
    problem = problem_of(RULES._replace(shortens=shortens), on_host=on_host)
    _, state, rows = toy.run(problem, toy.EXECUTIONS[name], ROUNDS)
    assert_as_expected(state, rows, shortens)
