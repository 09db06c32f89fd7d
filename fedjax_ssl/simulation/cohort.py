"""Who takes part in a round."""

import jax
import jax.numpy as jnp

from fedjax_ssl.method import Cohort, DataSpec
from fedjax_ssl.simulation import rng


def sample(key: jax.Array, round: jax.Array, spec: DataSpec, rounds: int) -> Cohort:
    """The cohort of a round (int32 scalar, from 0): M of K clients, uniformly without replacement.

    Floyd's algorithm, whose cost depends on M alone, not on K. `key` is the run's root key.
    """
    num_clients, cohort_size = spec.num_clients, spec.cohort_size
    tops = jnp.arange(num_clients - cohort_size, num_clients, dtype=jnp.int32)
    keys = jax.random.split(rng.round_key(key, "cohort", round), cohort_size)
    draws = jax.vmap(lambda k, top: jax.random.randint(k, (), 0, top + 1, jnp.int32))(keys, tops)

    def step(chosen: jax.Array, slot: jax.Array) -> tuple[jax.Array, None]:
        taken = jnp.any(chosen == draws[slot])
        return chosen.at[slot].set(jnp.where(taken, tops[slot], draws[slot])), None

    ids, _ = jax.lax.scan(step, jnp.full(cohort_size, -1, jnp.int32), jnp.arange(cohort_size))
    return Cohort(ids, round, rounds)
