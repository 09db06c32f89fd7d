"""A method on one number, as quick to compile as the one of `tests.toy`: for tests of what runs any method."""

import jax
import jax.numpy as jnp
from pydantic import Field

from fedjax_ssl.method import ClientOutput, Method, Requires
from fedjax_ssl.methods import METHODS
from fedjax_ssl.metrics import Mean, Sum
from fedjax_ssl.options import Options, Weight


class AverageOptions(Options):
    scale: Weight = Field(default=1.0, description="A factor of what clients send.")


def average(*, task, client, server, options=AverageOptions()) -> Method:
    """w <- w + mean_k rate * scale * (client k's mean pixel + a random number); each client counts how often it took part."""
    del server

    def client_update(shared, per_client, times, client_data, key):
        del per_client
        rows = jnp.arange(client_data.unlabeled.index.shape[0])
        pixels = client_data.unlabeled.take(rows).reshape(len(rows), -1).astype(jnp.float32).mean(1)
        count = client_data.unlabeled.count.astype(jnp.float32)
        mean = jnp.sum(jnp.where(client_data.unlabeled.mask, pixels, 0)) / jnp.maximum(count, 1)
        step = client.learning_rate(jnp.zeros(())) * options.scale * (mean + jax.random.uniform(key))
        metrics = {
            "client/loss": Mean(shared["params"] + step, jnp.ones(())),
            "comm/bytes_up": Sum(jnp.int32(4)),
            "perf/client_images": Sum(client_data.unlabeled.count),
        }
        return ClientOutput({"params": -step}, count, times + 1, metrics)

    def predict(model, images, mask):
        del mask
        pixels = images.reshape(len(images), -1)[:, 20 : 20 + task.num_classes]
        return pixels.astype(jnp.float32) - model["params"] * jnp.arange(task.num_classes)

    return Method(
        init=lambda key, spec: ({"params": jax.random.uniform(key)}, jnp.zeros(spec.num_clients, jnp.int32)),
        broadcast=lambda model, clients, cohort: (model, cohort.ids),
        client_update=client_update,
        server_update=lambda model, aggregate, data, key: (jax.tree.map(jnp.subtract, model, aggregate.update), {}),
        predict={"w": predict},
        requires=Requires(("server", "clients")),
    )


def register(name: str = "average") -> None:
    """For a config file, which may be read by a process of its own; `tests` in this one have a fixture."""
    METHODS[name] = average
