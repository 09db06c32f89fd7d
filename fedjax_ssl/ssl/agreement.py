"""Inter-client consistency (FedMatch): a client's helpers, their common pseudo-labels, and its divergence from them."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int, Int32

from fedjax_ssl.arrays import Array, Logits, PerExample
from fedjax_ssl.ssl import losses


class Neighbors(NamedTuple):
    """The H nearest clients of each of M clients, nearest first; an id counts only where `found` is true."""

    ids: Int32[Array, "M H"]
    found: Bool[Array, "M H"]


def nearest(embeddings: Float[Array, "K E"], seen: Bool[Array, " K"], ids: Int[Array, " M"], count: int) -> Neighbors:
    """For each client in `ids` the nearest other clients, by Euclidean distance of embeddings; the lower id wins a tie.

    Clients that are not `seen` have no embedding, so they have no neighbors and are nobody's neighbor. H is the smaller of
    `count` and K.
    """
    chex.assert_rank([embeddings, seen, ids], [2, 1, 1])
    clients = jnp.arange(len(seen))
    difference = embeddings[ids][:, None] - embeddings
    eligible = seen & seen[ids][:, None] & (clients != ids[:, None])
    distance = jnp.where(eligible, jnp.sum(jnp.square(difference), axis=-1), jnp.inf)
    order = jnp.argsort(distance, axis=1, stable=True)[:, :count].astype(jnp.int32)
    return Neighbors(order, jnp.take_along_axis(eligible, order, axis=1))


def label(logits: Logits, helper_logits: Float[Array, "H B C"], available: Bool[Array, " H"]) -> Int32[Array, " B"]:
    """Agreement-based pseudo-labels: the client and its available helpers vote for a class; the lowest class wins a tie.

    >>> client, helpers = jnp.array([[0.0, 2.0]]), jnp.array([[[1.0, 0.0]], [[3.0, 0.0]]])
    >>> label(client, helpers, jnp.array([True, True])).tolist(), label(client, helpers, jnp.array([False, False])).tolist()
    ([0], [1])
    """
    chex.assert_rank([logits, helper_logits, available], [2, 3, 1])
    votes = jax.nn.one_hot(jnp.argmax(helper_logits, axis=-1), logits.shape[-1], dtype=jnp.int32)
    votes = jnp.sum(jnp.where(available[:, None, None], votes, 0), axis=0)
    votes += jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.int32)
    return jnp.argmax(votes, axis=-1).astype(jnp.int32)


def divergence(logits: Logits, helper_logits: Float[Array, "H B C"], available: Bool[Array, " H"]) -> PerExample:
    """1/H sum_h KL(softmax(helper_h) || softmax(client)) over H available helpers, 0 without any; helpers get no gradient."""
    kl = jax.vmap(losses.kl_divergence, (0, None))(helper_logits, logits)
    total = jnp.sum(jnp.where(available[:, None], kl, 0.0), axis=0)
    return total / jnp.maximum(jnp.sum(available), 1)


def embedding_image(shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
    """The image on which a model's softmax output is its embedding: fixed noise N(125, 125^2) truncated to [0, 255]."""
    return 125.0 + 125.0 * jax.random.truncated_normal(jax.random.key(0), -1.0, 130.0 / 125.0, shape)
