"""Labels at some clients: what clients without labels do differently, with any method and without a change of its code."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.arrays import Key, Number, PyTree
from fedjax_ssl.method import ClientData, ClientOutput, Method


class Kinds(NamedTuple):
    """How clients without labels differ from those that have some."""

    unlabeled_rate: Number = 1.0  # factor of their learning rate
    wait: int = 0  # rounds before they begin


def with_kinds(method: Method, kinds: Kinds) -> Method:
    """The method whose clients without labels rest in the first rounds, and have a learning rate of their own.

    A client that rests has no data, receives nothing and takes no part in the average. ValueError, as the method is traced,
    where it does not broadcast a `local.Broadcast`.
    """
    if kinds == Kinds() or not method.requires.clients:
        return method

    def client_update(shared: PyTree, per_client: PyTree, state: PyTree, data: ClientData, key: Key) -> ClientOutput:
        if not (hasattr(shared, "learning_rate") and hasattr(shared, "round")):
            accepted = "a method that broadcasts a local.Broadcast"
            raise ValueError(f"client.unlabeled_rate, client.unlabeled_wait: got {type(shared).__name__}, accepted: {accepted}")
        is_labeled = data.labeled.count > 0
        rests = ~is_labeled & (shared.round < kinds.wait)
        shared = shared._replace(learning_rate=shared.learning_rate * jnp.where(is_labeled, 1.0, kinds.unlabeled_rate))
        unlabeled = data.unlabeled._replace(count=jnp.where(rests, 0, data.unlabeled.count))
        output = method.client_update(shared, per_client, state, data._replace(unlabeled=unlabeled), key)
        metrics = dict(output.metrics)
        if (down := metrics.get("comm/bytes_down")) is not None:
            metrics["comm/bytes_down"] = jax.tree.map(lambda x: jnp.where(rests, 0, x), down)
        return output._replace(weight=jnp.where(rests, 0.0, output.weight), metrics=metrics)

    return method._replace(client_update=client_update)
