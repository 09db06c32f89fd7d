"""The loop of local steps, against the steps written out."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.data import batching
from fedjax_ssl.local import train
from fedjax_ssl.metrics import Sum


def test_each_step_draws_from_its_own_key_and_counts_its_real_examples():
    schedule = batching.shuffled(jax.random.key(1), jnp.arange(8) < 5, 2, epochs=2, steps=0)
    key = jax.random.key(7)

    def step(carry, batch, key):
        number, draws = carry
        positions = jnp.sum(jnp.where(batch.mask, batch.positions, 0))
        return (number + 1, draws.at[number].set(jax.random.uniform(key))), {"positions": Sum(positions)}

    trained = train((0, jnp.zeros(9)), step, schedule, key)
    number, draws = trained.carry
    assert number == schedule.steps == 6  # of 2, 2 and 1 examples an epoch
    np.testing.assert_array_equal(draws[:6], [jax.random.uniform(jax.random.fold_in(key, s)) for s in range(6)])
    assert trained.images == 10
    assert trained.metrics["positions"].total == 2 * (0 + 1 + 2 + 3 + 4)
