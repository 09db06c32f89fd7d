"""Batch norm of a network's inputs, in JAX and in NumPy.

In front of a linear network, whose gradients it leaves easy to write out, it shows whose statistics are used and tracked.
"""

import jax.numpy as jnp
import numpy as np

EPSILON = 1e-5


def normalize(stats, images, mask, train):
    """(inputs [n, D], statistics): by the masked batch in training, which are then its statistics; else by `stats`."""
    x, real = images.reshape(len(images), -1), mask[:, None]
    mean, var = stats["mean"], stats["var"]
    if train:
        count = jnp.maximum(jnp.sum(mask), 1)
        mean = jnp.sum(jnp.where(real, x, 0.0), 0) / count
        var = jnp.sum(jnp.where(real, (x - mean) ** 2, 0.0), 0) / count
        stats = {"mean": mean, "var": var * count / jnp.maximum(count - 1, 1)}
    return jnp.where(real, (x - mean) / jnp.sqrt(var + EPSILON), 0.0), stats


def in_front_of(model):
    """A network without statistics of its own, of normalized inputs."""

    def apply(params, stats, images, *, mask, train=False, key=None):
        inputs, stats = normalize(stats, images, mask, train)
        return model.apply(params, {}, inputs.reshape(images.shape), mask=mask, train=train, key=key)[0], stats

    return model._replace(apply=apply)


def normalized(x):
    """A batch [n, D] by its own statistics."""
    return (x - x.mean(0)) / np.sqrt(x.var(0) + EPSILON)


def tracked(stats, x, share):
    """Statistics after a batch [n, D], which has the given share in them."""
    batch = {"mean": x.mean(0), "var": x.var(0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1])}
    return {name: (1 - share) * stats[name] + share * batch[name] for name in stats}
