"""RSCFed's consensus of random groups (Liang et al. 2022), as its released code has it: outliers count less."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32

from fedjax_ssl.arrays import Array, Key, Number, PyTree


def draw(key: Key, present: Bool[Array, " M"], size: int) -> Bool[Array, " M"]:
    """`size` of the clients that are present, drawn without replacement, or all of them where there are no more."""
    order = jnp.argsort(jnp.where(present, jax.random.uniform(key, present.shape), 2.0))
    return present & (jnp.argsort(order) < size)


def coefficients(
    updates: PyTree,
    sizes: Float[Array, " M"],
    labeled: Bool[Array, " M"],
    *,
    rates: tuple[Number, Number],
    labeled_factor: Number,
) -> Float32[Array, " M"]:
    """The coefficients r_k of clients in their group's mean, whose sum is 1; all 0 for a group of nobody.

        a_k = n_k / sum n,  d_k = sum over tensors of ||u_k - sum_j a_j u_j||,  r_k ~ a_k exp(-rate d_k / n_k)

    The updates u [M, ...] are parameters, and n are `sizes`; a client of size 0 is not of the group, and its update may be NaN.
    The two `rates` are those of a group with a labeled client and of one without. The coefficient of a labeled client is
    multiplied by `labeled_factor`, before all are divided by their sum.

    >>> updates = {"w": jnp.array([[0.0], [1.0], [9.0]])}
    >>> sizes, labeled = jnp.array([1.0, 1.0, 0.0]), jnp.array([True, False, False])
    >>> print(coefficients(updates, sizes, labeled, rates=(0.0, 0.0), labeled_factor=3.0).round(2))
    [0.75 0.25 0.  ]
    """
    members = sizes > 0
    share = sizes / jnp.maximum(jnp.sum(sizes), 1.0)

    def distance(update: Float[Array, " M *shape"]) -> Float[Array, " M"]:
        rows = jnp.where(members[:, None], update.reshape(len(members), -1), 0.0)
        apart = jnp.where(members[:, None], rows - share @ rows, 0.0)
        return jnp.sqrt(jnp.sum(jnp.square(apart), axis=1))

    distances = jnp.sum(jnp.stack([distance(update) for update in jax.tree.leaves(updates)]), axis=0)
    is_labeled = members & labeled
    rate = jnp.where(jnp.any(is_labeled), rates[0], rates[1])
    # As a softmax: in float32 the exponentials themselves may all be 0.
    logs = jnp.log(jnp.where(members, share, 1.0)) - rate * distances / jnp.maximum(sizes, 1.0)
    logs = jnp.where(members, logs + jnp.where(is_labeled, jnp.log(labeled_factor), 0.0), -jnp.inf)
    return jnp.where(jnp.any(members), jax.nn.softmax(logs), 0.0)
