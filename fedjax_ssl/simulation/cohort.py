"""Who takes part in a round."""

import jax
import jax.numpy as jnp

from fedjax_ssl.data.federated import FederatedData
from fedjax_ssl.method import Cohort, DataSpec
from fedjax_ssl.simulation import rng
from fedjax_ssl.simulation.system import System, are_available


def draw(
    key: jax.Array, round: jax.Array, spec: DataSpec, rounds: int | None, system: System | None, data: FederatedData
) -> Cohort:
    """Draws the cohort of a round by the rules of `system`, or uniformly where `system` is None.

    A weighted cohort is drawn client by client, with probabilities proportional to the numbers of examples n_k of those who
    are left; this equals taking the M largest of log n_k + Gumbel noise. Where fewer than M clients can be drawn, the others of
    the M count as not available.
    """
    if spec.labeled_cohort:
        ids = _of_kinds(rng.round_key(key, "cohort", round), spec, jnp.asarray(data.labeled.count) > 0)
    else:
        ids = sample(key, round, spec, rounds).ids
    if system is None:
        return Cohort(ids, round, rounds)
    assert data.profiles is not None
    windows = jax.tree.map(jnp.asarray, data.profiles.windows)
    if system.participation in ("uniform", "async"):
        available = are_available(system, jax.tree.map(lambda x: x[ids], windows), round, len(ids))
        if system.participation == "async":  # whose first round lets one client fewer begin
            available &= (round > 0) | (jnp.arange(len(ids)) > 0)
        return Cohort(ids, round, rounds, available)
    available = are_available(system, windows, round, spec.num_clients)
    scores = jax.random.gumbel(rng.round_key(key, "cohort", round), available.shape)
    if system.participation == "available":
        scores = jnp.where(available, scores, -jnp.inf)
    else:
        scores += jnp.log((data.labeled.count + data.unlabeled.count).astype(jnp.float32))
    chosen, ids = jax.lax.top_k(scores, spec.cohort_size)
    return Cohort(ids, round, rounds, available[ids] & (chosen > -jnp.inf))


def sample(key: jax.Array, round: jax.Array, spec: DataSpec, rounds: int | None) -> Cohort:
    """The cohort of a round (int32 scalar, from 0): M of K clients, uniformly without replacement.

    They are drawn by Floyd's algorithm, whose cost depends on M alone, not on K. `key` is the run's root key.
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


def _of_kinds(key: jax.Array, spec: DataSpec, has_labels: jax.Array) -> jax.Array:
    """Ids [M], the first `labeled_cohort` ones of clients with labels, each uniform among its kind, without replacement."""
    scores, number = jax.random.uniform(key, has_labels.shape), spec.labeled_cohort
    labeled = jax.lax.top_k(jnp.where(has_labels, scores, -1.0), number)[1]
    others = jax.lax.top_k(jnp.where(has_labels, -1.0, scores), spec.cohort_size - number)[1]
    return jnp.concatenate([labeled, others]).astype(jnp.int32)
