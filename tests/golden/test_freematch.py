"""FreeMatch's status (SAT) and fairness loss (SAF) where there is no data or no gradient; `test_central` has the equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ssl import freematch
from fedjax_ssl.ssl.freematch import Status
from tests.golden.linear_clients import softmax

CLASSES, DECAY = 4, 0.9


update = jax.jit(freematch.update, static_argnames=("decay", "largest"))


def test_padding_does_not_count_and_a_batch_without_examples_leaves_the_status():
    options, probs = {"decay": DECAY}, softmax(np.random.default_rng(1).standard_normal((5, CLASSES)))
    whole = update(freematch.start(CLASSES), jnp.float32(probs), jnp.ones(5, bool), **options)
    rows = np.concatenate([probs[:2], np.full((3, CLASSES), np.nan), probs[2:]])
    padded = update(freematch.start(CLASSES), jnp.float32(rows), ~np.isnan(rows[:, 0]), **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), padded, whole)
    got = update(padded, jnp.full((2, CLASSES), jnp.nan), jnp.zeros(2, bool), **options)
    jax.tree.map(np.testing.assert_array_equal, got, padded)


def test_no_gradient_flows_into_the_status():
    def total(z):
        status = freematch.update(freematch.start(CLASSES), jax.nn.softmax(z), jnp.ones(3, bool), decay=DECAY)
        return status.tau + jnp.sum(freematch.class_thresholds(status) ** 2)

    assert not np.any(jax.jit(jax.grad(total))(jnp.arange(12.0).reshape(3, CLASSES)))


# Strong views of six examples; class 2 leads none of the accepted, class 3 has no share in the status' histogram.
LOGITS = np.random.default_rng(0).standard_normal((6, CLASSES)) * 2 + np.array([1.0, 1, -4, 1])
ACCEPTED = np.array([1, 1, 0, 1, 1, 1], bool)
PROBS, HISTOGRAM = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.6, 0.3, 0.1, 0.0])


@jax.jit
def got_loss(logits, accepted=ACCEPTED, histogram=HISTOGRAM):
    status = Status(jnp.float32(0.5), jnp.asarray(PROBS, jnp.float32), jnp.asarray(histogram, jnp.float32))
    return freematch.fairness_loss(jnp.asarray(logits, jnp.float32), jnp.asarray(accepted), status)


def test_no_gradient_of_the_fairness_loss_flows_into_the_status():
    def of_status(probs, histogram):
        return freematch.fairness_loss(jnp.asarray(LOGITS), jnp.asarray(ACCEPTED), Status(jnp.float32(0.5), probs, histogram))

    for part in jax.jit(jax.grad(of_status, (0, 1)))(jnp.asarray(PROBS), jnp.array([0.4, 0.2, 0.3, 0.1])):
        assert not np.any(part)


@pytest.mark.parametrize("tiny", [1e-39, 1e-44])
def test_a_share_that_has_all_but_faded_counts_as_none(tiny):
    # 1/h is infinite, or as large as float32 goes: never NaN.
    assert np.isfinite(got_loss(LOGITS, histogram=np.array([0.6, 0.3, 0.1, tiny])))


def test_nothing_accepted_gives_no_loss_and_no_gradient():
    loss, grad = jax.value_and_grad(lambda z: got_loss(z, np.zeros(6, bool)))(jnp.asarray(LOGITS))
    assert loss == 0
    np.testing.assert_array_equal(grad, np.zeros_like(LOGITS))
