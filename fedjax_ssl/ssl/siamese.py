"""FedSiam's layer selection: the distances between the layers of two networks, and which layers are uploaded.

A layer is all parameters of one module, such as kernel and bias of a convolution; J is their number. Rounds count from 1.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from fedjax_ssl.arrays import Array, Number, Params, PyTree, Scalar
from fedjax_ssl.ssl import losses

MIN_NORM = 1e-12  # the norm of a layer is at least this in FSM, which is then finite
Rounds = Int[Array, "..."]
Shares = Float[Array, "..."]


def _leaves(tree: PyTree) -> list[tuple[str, Array]]:
    """(name of its layer, leaf) of every leaf of parameters or of batch-norm statistics."""
    return [(jax.tree_util.keystr(path[:-1]), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def layers(params: Params) -> tuple[str, ...]:
    """The names of the J layers of a network."""
    return tuple(dict.fromkeys(name for name, _ in _leaves(params)))


def layer_bytes(names: tuple[str, ...], *trees: Params) -> Int32[np.ndarray, " J"]:
    """The bytes of each layer in `trees`, parameters and possibly batch-norm statistics; other leaves do not count."""
    size = dict.fromkeys(names, 0)
    for name, leaf in (item for tree in trees for item in _leaves(tree) if item[0] in size):
        size[name] += leaf.size * leaf.dtype.itemsize
    return np.array(list(size.values()), np.int32)


def layer_distances(target: Params, online: Params) -> Float[Array, " J"]:
    """The distance FSM[j] = ||theta_t[j] - theta_s[j]|| / ||theta_s[j]|| of each layer, Euclidean (FedSiam, Eq. 10)."""
    chex.assert_trees_all_equal_shapes(target, online)
    names = layers(online)

    def norms(tree: Params) -> Float[Array, " J"]:
        squares = {name: jnp.zeros(()) for name in names}
        for name, leaf in _leaves(tree):
            squares[name] += jnp.sum(jnp.square(leaf))
        return jnp.sqrt(jnp.stack(list(squares.values())))

    return norms(jax.tree.map(jnp.subtract, target, online)) / jnp.maximum(norms(online), MIN_NORM)


def linear_share(number: Rounds, *, saved: float, pi_rounds: float, rounds: int | Rounds) -> Shares:
    """The share tau of the online network's layers that is uploaded, falling linearly (FedSiam, Eq. 11).

        tau = 0 for R_g <= phi_g, else 2 (1 - mu) R_G (R_G - R_g) / (R_G - phi_g)^2, cut to [0, 1]

    R_g is `number`, the round; R_G is `rounds`, phi_g is `pi_rounds` <= R_G, mu is `saved`. Before it is cut, tau adds up to
    (1 - mu) R_G over all rounds, unless phi_g = R_G.
    """
    others = rounds - pi_rounds
    tau = 2.0 * (1.0 - saved) * rounds / (others + (others == 0)) ** 2 * (rounds - number)
    return jnp.where(number <= pi_rounds, 0.0, jnp.clip(tau, 0.0, 1.0))


def rectangle_share(number: Rounds, *, saved: float, pi_rounds: float, end_round: float, rounds: int | Rounds) -> Shares:
    """The share tau of the online network's layers that is uploaded, constant between two rounds (FedSiam, Eq. 12).

        tau = (1 - mu) R_G / (varphi_g - phi_g) for phi_g < R_g < varphi_g, cut to [0, 1], else 0

    varphi_g = `end_round` > phi_g; for the other arguments see `linear_share`.
    """
    tau = jnp.minimum((1.0 - saved) * rounds / (end_round - pi_rounds), 1.0)
    return jnp.where((number > pi_rounds) & (number < end_round), tau, 0.0)


class Window(NamedTuple):
    """The distances that M clients sent in each of the last W rounds, as a ring, and which clients count (Lambda)."""

    values: Float[Array, "W M J"]
    used: Bool[Array, "W M"]


def empty_window(length: int, num_clients: int, num_layers: int) -> Window:
    """A window of `length` rounds without any distances."""
    return Window(jnp.zeros((length, num_clients, num_layers)), jnp.zeros((length, num_clients), bool))


def remember(window: Window, round: Number, distances: Float[Array, "M J"], used: Bool[Array, " M"]) -> Window:
    """The window with a round's distances in place of the oldest; distances of clients that are not used may be NaN."""
    slot = round % window.values.shape[0]
    values = window.values.at[slot].set(jnp.where(used[:, None], distances, 0.0))
    return Window(values, window.used.at[slot].set(used))


def boundary(window: Window, tau: Number) -> Scalar:
    """The (1 - tau)-quantile of the window's distances, interpolated linearly; infinity if there is none."""
    return losses.masked_quantile(window.values, jnp.broadcast_to(window.used[..., None], window.values.shape), 1.0 - tau)


def uploaded(distances: Float[Array, "... J"], bound: Number, tau: Number) -> Bool[Array, "... J"]:
    """Which online layers are uploaded: those whose distance is at least the boundary `bound`; none if tau = 0."""
    return (distances >= bound) & (tau > 0)


def select_layers(names: tuple[str, ...], chosen: Bool[Array, "M J"], tree: Params, other: Params) -> Params:
    """A tree with the chosen layers taken from `tree` and all other layers from `other`.

    Both are parameters or statistics with leading axis M. Statistics of a batch norm without scale and bias belong to no layer,
    and are those of `other`.
    """
    which = {name: chosen[:, j] for j, name in enumerate(names)}

    def select(path: tuple[Any, ...], a: Array, b: Array) -> Array:
        mask = which.get(jax.tree_util.keystr(path[:-1]))
        return b if mask is None else jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree_util.tree_map_with_path(select, tree, other)
