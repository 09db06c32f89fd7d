"""Where randomness comes from: every key is a function of (seed, named stream, round, client id), and of nothing else.

No slot in the cohort, order of arrival or device index enters a key, so a client draws the same numbers whoever else takes
part, wherever it runs, and after a resume.
"""

from __future__ import annotations

import zlib

import jax


def stream(key: jax.Array, name: str) -> jax.Array:
    """The key of a named stream (`init`, `prepare`, `cohort`, `client`, `server`) of a run's root key."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def round_key(key: jax.Array, name: str, round: jax.Array) -> jax.Array:
    """The key of a named stream in a round (int32 scalar, 0-based)."""
    return jax.random.fold_in(stream(key, name), round)


def client_keys(key: jax.Array, round: jax.Array, ids: jax.Array) -> jax.Array:
    """Keys [M] of the clients `ids` int32 [M] in a round."""
    return jax.vmap(jax.random.fold_in, (None, 0))(round_key(key, "client", round), ids)
