"""PRNG keys, each a function of (seed, named stream, round, client id) alone.

So a client draws the same numbers whoever else takes part, on any device, and also after a resume.
"""

import jax

from fedjax_ssl.local.task import substream

stream = substream  # of a run's key: init, prepare, cohort, client, dropout, server


def round_key(key: jax.Array, name: str, round: jax.Array) -> jax.Array:
    """The key of a named stream in a round (int32 scalar, from 0)."""
    return jax.random.fold_in(stream(key, name), round)


def client_keys(key: jax.Array, round: jax.Array, ids: jax.Array, name: str = "client") -> jax.Array:
    """Keys [M] of the clients `ids` int32 [M] in a round, of a named stream."""
    return jax.vmap(jax.random.fold_in, (None, 0))(round_key(key, name, round), ids)
