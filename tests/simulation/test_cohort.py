"""Cohorts and keys: uniform, without replacement, a function of (seed, round, client) alone; who of a cohort is dealt where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.method import ClientOutput, DataSpec
from fedjax_ssl.metrics import Sum, mean
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.cohort import sample
from fedjax_ssl.simulation.execution import deal, run_cohort
from tests import toy


def draws(num_clients: int, size: int, rounds: int, seed: int = 0) -> np.ndarray:
    key, spec = jax.random.key(seed), DataSpec((1,), 2, num_clients, size)
    many = jax.jit(jax.vmap(lambda r: sample(key, r, spec, rounds).ids))
    return np.asarray(many(jnp.arange(rounds, dtype=jnp.int32)))


def test_a_cohort_has_no_client_twice_and_every_client_is_in_range():
    for num_clients, size in ((10, 1), (10, 5), (10, 10), (1000, 37)):
        ids = draws(num_clients, size, 200)
        assert all(len(set(row)) == size for row in ids.tolist())
        assert ids.min() >= 0
        assert ids.max() < num_clients


def test_every_client_and_every_pair_is_equally_likely():
    ids = draws(6, 3, 4000)
    member = np.zeros((4000, 6), bool)
    np.put_along_axis(member, ids, True, axis=1)
    # Each client takes part with probability 1/2, each pair with 3/6 * 2/5 = 1/5; five standard errors.
    np.testing.assert_allclose(member.mean(0), 1 / 2, atol=5 * np.sqrt(0.25 / 4000))
    pairs = (member.T.astype(float) @ member)[np.triu_indices(6, 1)] / 4000
    np.testing.assert_allclose(pairs, 1 / 5, atol=5 * np.sqrt(0.16 / 4000))


def test_rounds_and_seeds_give_different_cohorts_and_the_same_seed_the_same():
    np.testing.assert_array_equal(draws(100, 10, 5), draws(100, 10, 5))
    assert len({tuple(sorted(row)) for row in draws(100, 10, 50).tolist()}) == 50
    assert not np.array_equal(draws(100, 10, 5), draws(100, 10, 5, seed=1))


def test_a_clients_key_depends_on_neither_slot_nor_cohort():
    key, zero = jax.random.key(3), jnp.int32(0)
    one = jax.random.key_data(rng.client_keys(key, zero, jnp.array([4, 7, 9])))
    other = jax.random.key_data(rng.client_keys(key, zero, jnp.array([9, 1, 2, 4])))
    np.testing.assert_array_equal(one[0], other[3])
    np.testing.assert_array_equal(one[2], other[0])
    assert not np.array_equal(one[0], one[1])
    later = jax.random.key_data(rng.client_keys(key, jnp.int32(1), jnp.array([4])))
    assert not np.array_equal(one[0], later[0])


def test_streams_do_not_share_keys():
    key = jax.random.key(0)
    names = ("init", "prepare", "cohort", "client", "server")
    assert len({tuple(jax.random.key_data(rng.stream(key, name)).tolist()) for name in names}) == len(names)


def test_clients_and_server_draw_from_keys_of_their_run_their_round_and_a_clients_id():
    made = toy.method()

    def client_update(shared, per_client, state, client_data, key):
        output = made.client_update(shared, per_client, state, client_data, key)
        return output._replace(
            metrics={**output.metrics, "client/draw": Sum(jax.random.uniform(key)), "client/own": Sum(per_client)}
        )

    def server_update(server, aggregate, data, key):
        server, metrics = made.server_update(server, aggregate, data, key)
        return server, {**metrics, "server/draw": Sum(jax.random.uniform(key))}

    drawn = set()
    for seed in (0, 1):
        changed = made._replace(client_update=client_update, server_update=server_update)
        problem = toy.problem(made=changed, seeds=(seed,), cohort_size=7)
        _, state, rows = toy.run(problem, toy.EXECUTIONS["chunked"], rounds=2)
        for number, row in enumerate(rows):
            keys = rng.client_keys(state.key, np.int32(number), np.arange(7))
            np.testing.assert_allclose(row["client/draw"], np.sum(jax.vmap(jax.random.uniform)(keys)), rtol=1e-6)
            own = jax.random.uniform(rng.round_key(state.key, "server", np.int32(number)))
            np.testing.assert_allclose(row["server/draw"], own, rtol=1e-6)
            assert row["client/own"] == sum(range(7))
            drawn.add(round(row["client/draw"], 4))
    assert len(drawn) == 4


@pytest.mark.parametrize(("size", "chunk", "devices"), [(10, 1, 2), (9, 2, 2), (7, 3, 1), (1, 1, 4), (16, 2, 4)])
def test_clients_are_dealt_to_chunks_and_devices_by_how_much_they_have_to_do(size, chunk, devices):
    ranks = deal(size, chunk, devices)
    assert sorted(ranks) == list(range(len(ranks)))  # each once
    assert len(ranks) - size < chunk * devices
    work = np.r_[np.sort(np.random.default_rng(0).integers(1, 100, size))[::-1], np.zeros(len(ranks) - size, int)]
    of_chunks = work[ranks].reshape(devices, -1, chunk)
    assert np.all(of_chunks[:, :, :1] >= of_chunks)  # in a chunk there are neighbors, the longest first
    longest = of_chunks[:, :, 0].sum(axis=1)
    assert longest.max() - longest.min() <= work[0]
    if (size, chunk, devices) == (10, 1, 2):
        np.testing.assert_array_equal(ranks.reshape(2, 5), [[0, 3, 4, 7, 8], [1, 2, 5, 6, 9]])


@pytest.mark.parametrize("size", [7, 1])  # 1: fewer clients than devices
@pytest.mark.parametrize("name", ["sharded_chunked", "chunked"])
def test_results_come_back_in_the_cohorts_order_whoever_is_dealt_where(name, size):
    def client(shared, number):
        return ClientOutput({"w": shared * number}, number, {"of": number}, {"m": mean(number, True)})

    numbers, work = jnp.float32([3, 1, 4, 1.5, 9, 2, 6])[:size], jnp.array([5, 1, 9, 2, 6, 5, 3])[:size]
    execution = toy.EXECUTIONS[name]

    def run(numbers):
        return run_cohort(client, jnp.float32(2), numbers, aggregator="stack", execution=execution, work=work)

    if mesh := execution.mesh():
        whole = jax.sharding.PartitionSpec()
        run = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    output = jax.jit(run)(numbers)
    np.testing.assert_array_equal(output.client_states["of"], numbers)
    np.testing.assert_array_equal(output.aggregate.update["w"], 2 * numbers)
    np.testing.assert_array_equal(output.metrics["m"].total, numbers)
