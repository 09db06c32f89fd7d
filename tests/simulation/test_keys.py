"""Every key comes from seed, stream, round and client id."""

import jax
import numpy as np

from fedjax_ssl.metrics import Sum
from fedjax_ssl.simulation import rng
from tests import toy


def test_a_client_draws_from_a_key_of_its_run_its_round_and_its_id():
    made = toy.method()

    def client_update(shared, own, state, shard, key):
        output = made.client_update(shared, own, state, shard, key)
        return output._replace(metrics={**output.metrics, "client/draw": Sum(jax.random.uniform(key)), "client/id": Sum(own)})

    drawn = set()
    for seed in (0, 1):
        problem = toy.problem(made=made._replace(client_update=client_update), seeds=(seed,), cohort_size=7)
        _, state, rows = toy.run(problem, toy.EXECUTIONS["chunked"], rounds=2)
        for number, row in enumerate(rows):
            keys = rng.client_keys(state.key, np.int32(number), np.arange(7))
            np.testing.assert_allclose(row["client/draw"], np.sum(jax.vmap(jax.random.uniform)(keys)), rtol=1e-6)
            assert row["client/id"] == sum(range(7))
            drawn.add(round(row["client/draw"], 4))
    assert len(drawn) == 4
