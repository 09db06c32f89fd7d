"""Parameters as a sum of two parts, theta = sigma + psi, and messages that carry the changed entries alone (FedMatch)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int32

from fedjax_ssl.arrays import Array, Count, Number, PyTree, Scalar

PSI_FACTOR = 0.2  # psi_0 / sigma_0


class Parts(NamedTuple):
    """The parameters of any network in two parts: sigma, learned from labels, and psi, sparse, learned from unlabeled data.

    The gradient for theta = sigma + psi is also the gradient for sigma and for psi.
    """

    sigma: PyTree
    psi: PyTree


class Message(NamedTuple):
    """A message of changed entries: the values that its receiver has afterwards, and the number of entries that are sent."""

    value: PyTree
    entries: Count


def split(params: PyTree) -> Parts:
    """Fresh parts: sigma_0 is what the network was initialized with and psi_0 = .2 sigma_0, so that theta_0 = 1.2 sigma_0."""
    return Parts(params, jax.tree.map(lambda x: PSI_FACTOR * x, params))


def sparse(psi: PyTree, threshold: Number) -> PyTree:
    """`psi` with zeros in place of the entries of size `threshold` or less."""
    return jax.tree.map(lambda x: jnp.where(jnp.abs(x) > threshold, x, 0.0), psi)


def penalty(parts: Parts, l1: Number, l2: Number) -> Scalar:
    """l1 ||psi||_1 + l2 ||sigma - psi||_2^2, sums over all entries (FedMatch's loss of psi).

    The gradient of |x| is taken as 0 at x = 0, where JAX has 1.
    """

    def entry_sums(sigma: Float[Array, "*shape"], psi: Float[Array, "*shape"]) -> Scalar:
        absolute = psi * jax.lax.stop_gradient(jnp.sign(psi))
        return l1 * jnp.sum(absolute) + l2 * jnp.sum(jnp.square(sigma - psi))

    return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(entry_sums, parts.sigma, parts.psi))))


def changed(new: PyTree, known: PyTree, *, threshold: Number, delta: Number) -> Message:
    """The message with which a client sends `new` to the server, which knows `known`.

    An entry is sent where |sparse(new) - known| > delta; the others keep the server's value. The sent entry is that of `new`,
    not of sparse(new). `threshold` is that of `sparse`; it is 0 for a part that is not sparse.
    """
    sent = jax.tree.map(lambda x, y: jnp.abs(x - y) > delta, sparse(new, threshold), known)
    return Message(jax.tree.map(jnp.where, sent, new, known), _count(sent))


def differing(new: PyTree, known: PyTree) -> Count:
    """The number of entries in which `new` differs from `known` at all, which have to be sent for an exact copy of `new`."""
    return _count(jax.tree.map(jnp.not_equal, new, known))


def _count(marks: PyTree) -> Count:
    return sum((jnp.sum(x, dtype=jnp.int32) for x in jax.tree.leaves(marks)), jnp.zeros((), jnp.int32))


def message_bytes(entries: Int32[Array, "*k"], size: int) -> Int32[Array, "*k"]:
    """Bytes of a message of float32 entries: 4 for the value and 4 for the position of each, or 4 `size` if that is less."""
    return jnp.minimum(8 * entries, 4 * size).astype(jnp.int32)
