"""A server that trains in parallel with its clients, against NumPy: half of the average is its own model, momentum on top.

The server's linear model and its labeled data are those of `test_server_training`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.local import ServerState, Weights, server
from fedjax_ssl.method import Aggregate
from tests import tiny
from tests.golden.test_server_training import LABELS, RATE, STEPS, Server, sgd

MU = 0.5  # of the server's momentum


def test_the_servers_model_is_half_of_the_average_and_the_step_starts_from_it():
    parallel = Server(training="parallel", momentum=MU)
    finish = jax.jit(parallel.method.server_update)
    rng = np.random.default_rng(0)
    (name,) = parallel.state.weights.params
    v = {leaf: np.zeros_like(x) for leaf, x in parallel.layer(parallel.state).items()}
    optimizer = sgd()  # its momentum persists over the rounds
    for number, weight in enumerate([3.0, 0.0, 2.0]):  # nobody takes part in the second round
        sent = parallel.layer(parallel.state)
        mean = {leaf: x + 0.1 * rng.standard_normal(x.shape) for leaf, x in sent.items()}
        update = {
            name: {leaf: jnp.float32(sent[leaf] - mean[leaf]) if weight else jnp.zeros(sent[leaf].shape) for leaf in sent}
        }
        aggregate = Aggregate(Weights(update, ()), jnp.float32(weight))
        own = parallel.expected(optimizer, RATE)  # W_s
        if weight:
            average = {leaf: own[leaf] / 2 + mean[leaf] / 2 for leaf in own}
            v = {leaf: MU * v[leaf] + own[leaf] - average[leaf] for leaf in own}
            expected = {leaf: own[leaf] - v[leaf] for leaf in own}
        else:
            expected = own  # the momentum neither moves nor is applied
        parallel.state, metrics = finish(parallel.state, aggregate, parallel.given(number), jax.random.key(1))
        got = parallel.layer(parallel.state)
        for leaf in expected:
            np.testing.assert_allclose(got[leaf], expected[leaf], rtol=1e-4, atol=1e-5)
        momentum = parallel.layer(parallel.state._replace(weights=Weights(parallel.state.optimizer[0].trace, {})))
        for leaf in v:
            np.testing.assert_allclose(momentum[leaf], v[leaf], rtol=1e-3, atol=1e-5)
        assert metrics["server/loss"].weight == STEPS * LABELS


def test_tracked_statistics_are_averaged_alike():
    def of(x):
        return Weights({"w": jnp.float32(x)}, {"mean": jnp.float32(10 * x)})

    clients = Aggregate(of(4.0), jnp.float32(1.0))  # W_t - mean_k W_k
    got = server.average_with_server(
        ServerState(of(1.0), (), ()), ServerState(of(3.0), (), ()), clients
    ).update  # (3 - 1 + 4) / 2
    assert (got.params["w"], got.stats["mean"]) == (3.0, 30.0)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"server\.training: got 'before', accepted: after, parallel"):
        tiny.experiment("fixmatch", server__training="before")


def test_a_server_without_labels_has_nothing_to_train_in_parallel():
    with pytest.raises(ValueError, match=r"server\.training: got parallel with data\.labels_at=clients, accepted: after"):
        tiny.experiment("fedavg", data__labels_at="clients", server__training="parallel")
