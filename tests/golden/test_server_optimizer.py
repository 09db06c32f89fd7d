"""The federated server optimizers (FedOpt) as they are built from a config, against NumPy, over several rounds."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl.experiment.arguments import server_optimizer
from fedjax_ssl.experiment.settings import Settings

ROUNDS, RATE, B1, B2, TAU = 4, 0.05, 0.8, 0.95, 1e-2
KEYS = {"learning_rate": RATE, "b1": B1, "b2": B2, "eps": TAU, "momentum": 0.7}


def sgd(d, state, t):
    """FedAvgM: v <- .7 v + d."""
    (v,) = state
    v = 0.7 * v + d
    return v, (v,)


def adam(d, state, t):
    """FedAdam (Reddi et al. 2021, Algorithm 2): v begins at tau^2, and neither average is corrected for its start."""
    m, v = state if t > 1 else (0.0, TAU**2)
    m, v = B1 * m + (1 - B1) * d, B2 * v + (1 - B2) * d**2
    return m / (np.sqrt(v) + TAU), (m, v)


def yogi(d, state, t):
    """FedYogi: v moves towards d^2 by a share of d^2, whatever the distance."""
    m, v = state if t > 1 else (0.0, TAU**2)
    m, v = B1 * m + (1 - B1) * d, v - (1 - B2) * np.sign(v - d**2) * d**2
    return m / (np.sqrt(v) + TAU), (m, v)


def adagrad(d, state, t):
    """FedAdagrad, which has no momentum in the paper's experiments: v sums all d^2."""
    (v,) = state if t > 1 else (TAU**2,)
    v = v + d**2
    return d / (np.sqrt(v) + TAU), (v,)


@pytest.mark.parametrize(("rule", "moments"), [(sgd, 1), (adam, 2), (yogi, 2), (adagrad, 1)])
def test_the_averaged_client_update_is_the_gradient_of_a_server_optimizer(rule, moments):
    given = {"server": {"optimizer": {"name": rule.__name__, **KEYS}}}
    optimizer = server_optimizer(Settings.from_dict(given).server.optimizer)
    expected = np.linspace(-1, 1, 7)
    state, kept = optimizer.init(weights := jnp.asarray(expected, jnp.float32)), (np.zeros(7),) * moments
    for t in range(1, ROUNDS + 1):
        d = np.random.default_rng(t).normal(0, 0.1, 7)
        change, state = optimizer.update(jnp.asarray(d, jnp.float32), state, weights)
        weights = optax.apply_updates(weights, change)
        step, kept = rule(d, kept, t)
        expected = expected - RATE * step
    np.testing.assert_allclose(weights, expected, rtol=2e-5)


def test_the_defaults_are_those_of_the_papers_experiments():
    """Reddi et al. 2021, Section 5 and Appendix D: beta1 = .9, beta2 = .99, tau = .001."""
    assert (given := Settings.from_dict({}).server.optimizer).name == "sgd"
    assert (given.learning_rate, given.b1, given.b2, given.eps) == (1.0, 0.9, 0.99, 1e-3)
