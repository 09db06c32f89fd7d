"""FedSiam's layer selection: how far two networks are apart, layer by layer, and which layers are worth sending.

A layer is one module's parameters together (a convolution's kernel and bias, a batch norm's scale and bias), in the order in
which the parameters' pytree has them; J is their number. Numbers of rounds count from 1 here, as the paper counts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.ssl import losses

PyTree = Any
# Under this a layer's norm counts as 0: FSM stays finite, and large where the other network's layer is not 0.
LEAST_NORM = 1e-12


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """(name of its layer, leaf) of every leaf of parameters or of batch-norm statistics."""
    return [(jax.tree_util.keystr(path[:-1]), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def layers(params: PyTree) -> tuple[str, ...]:
    """The names of the J layers of a network's parameters."""
    return tuple(dict.fromkeys(name for name, _ in _leaves(params)))


def layer_bytes(names: tuple[str, ...], *trees: PyTree) -> np.ndarray:
    """Bytes of each layer, int32 [J], in parameters and (where they travel) batch-norm statistics."""
    size = dict.fromkeys(names, 0)
    for name, leaf in (item for tree in trees for item in _leaves(tree)):
        size[name] += leaf.size * leaf.dtype.itemsize
    return np.array(list(size.values()), np.int32)


def layer_distances(target: PyTree, online: PyTree) -> jax.Array:
    """FSM[j] = ||theta_t[j] - theta_s[j]|| / ||theta_s[j]||, Euclidean norms over a layer's entries (FedSiam, Eq. 10).

    Args:
        target: theta_t, pytree of float32 arrays.
        online: theta_s, likewise.

    Returns:
        float32 [J], >= 0.
    """
    chex.assert_trees_all_equal_shapes(target, online)
    names = layers(online)

    def norms(tree: PyTree) -> jax.Array:
        squares = {name: jnp.zeros(()) for name in names}
        for name, leaf in _leaves(tree):
            squares[name] += jnp.sum(jnp.square(leaf))
        return jnp.sqrt(jnp.stack(list(squares.values())))

    return norms(jax.tree.map(jnp.subtract, target, online)) / jnp.maximum(norms(online), LEAST_NORM)


def linear_share(number: jax.Array, *, saved: float, pi_rounds: int, rounds: int) -> jax.Array:
    """The share tau of the online network's layers that is uploaded, falling linearly (FedSiam, Eq. 11).

        tau = 0 for R_g <= phi_g, else 2 (1 - mu) R_G (R_G - R_g) / (R_G - phi_g)^2, cut to [0, 1]

    Over a run it adds up to (1 - mu) R_G, but for what is cut: a share of layers, of whatever size.

    Args:
        number: int32 scalar, R_g, the round, from 1.
        saved: mu in [0, 1], the share of the online network's layers that is saved.
        pi_rounds: phi_g.
        rounds: R_G > phi_g.

    Returns:
        float32 scalar.
    """
    tau = 2.0 * (1.0 - saved) * rounds / (rounds - pi_rounds) ** 2 * (rounds - number)
    return jnp.where(number <= pi_rounds, 0.0, jnp.clip(tau, 0.0, 1.0))


def rectangle_share(number: jax.Array, *, saved: float, pi_rounds: int, end_round: int, rounds: int) -> jax.Array:
    """The share tau of the online network's layers that is uploaded, constant in between (FedSiam, Eq. 12).

        tau = (1 - mu) R_G / (varphi_g - phi_g) for phi_g < R_g < varphi_g, cut to [0, 1], else 0

    Args:
        number: int32 scalar, R_g, the round, from 1.
        saved: mu in [0, 1].
        pi_rounds: phi_g.
        end_round: varphi_g > phi_g.
        rounds: R_G.

    Returns:
        float32 scalar.
    """
    tau = min((1.0 - saved) * rounds / (end_round - pi_rounds), 1.0)
    return jnp.where((number > pi_rounds) & (number < end_round), tau, 0.0)


class Window(NamedTuple):
    """Lambda: the distances that clients sent in the last rounds.

    Attributes:
        values: float32 [W, M, J], of W rounds in a ring.
        used: bool [W, M], which clients' values count.
    """

    values: jax.Array
    used: jax.Array


def empty_window(length: int, num_clients: int, num_layers: int) -> Window:
    """A window of W rounds of M clients that holds nothing yet."""
    return Window(jnp.zeros((length, num_clients, num_layers)), jnp.zeros((length, num_clients), bool))


def remember(window: Window, round: jax.Array, distances: jax.Array, used: jax.Array) -> Window:
    """The window with a round's distances in place of the oldest.

    Args:
        window: the last rounds.
        round: int32 scalar, which round; consecutive.
        distances: float32 [M, J]; those of clients that are not used may be NaN.
        used: bool [M].
    """
    slot = round % window.values.shape[0]
    values = window.values.at[slot].set(jnp.where(used[:, None], distances, 0.0))
    return Window(values, window.used.at[slot].set(used))


def boundary(window: Window, tau: jax.Array) -> jax.Array:
    """The (1 - tau)-quantile of the window's distances, interpolated linearly as NumPy does; infinity where there is none.

    Args:
        window: the distances of n layers in all.
        tau: scalar in [0, 1].

    Returns:
        float32 scalar.
    """
    return losses.masked_quantile(window.values, jnp.broadcast_to(window.used[..., None], window.values.shape), 1.0 - tau)


def uploaded(distances: jax.Array, bound: jax.Array, tau: jax.Array) -> jax.Array:
    """Which online layers are uploaded: those whose distance is not under the boundary; none where tau = 0.

    Args:
        distances: float32 [..., J].
        bound: float32 scalar, the boundary.
        tau: scalar in [0, 1].

    Returns:
        bool [..., J].
    """
    return (distances >= bound) & (tau > 0)


def select_layers(names: tuple[str, ...], chosen: jax.Array, tree: PyTree, other: PyTree) -> PyTree:
    """The layers of `tree` that are chosen, and those of `other` in place of the rest.

    Args:
        names: the J layers.
        chosen: bool [M, J].
        tree: pytree of arrays with leading axis M: parameters, or the statistics of their batch norms.
        other: likewise.
    """
    which = {name: chosen[:, j] for j, name in enumerate(names)}

    def select(path: tuple, a: jax.Array, b: jax.Array) -> jax.Array:
        mask = which[jax.tree_util.keystr(path[:-1])]
        return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree_util.tree_map_with_path(select, tree, other)
