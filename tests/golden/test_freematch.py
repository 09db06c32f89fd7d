"""FreeMatch's status over batches (SAT) and its fairness loss (SAF), against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.ssl import freematch
from fedjax_ssl.ssl.freematch import Status
from tests.golden.linear_clients import softmax

CLASSES, DECAY = 4, 0.9


update = jax.jit(freematch.update, static_argnames=("decay", "largest", "quantile"))


def shares(probs):
    return np.bincount(probs.argmax(1), minlength=CLASSES) / len(probs)


def batches(count: int):
    """Softmax outputs of a few examples each, none of the last class."""
    rng = np.random.default_rng(1)
    return [softmax(3 * rng.standard_normal((5, CLASSES)) - np.array([0, 0, 0, 9])) for _ in range(count)]


def padded(probs):
    """The same examples among rows that are none."""
    rows = np.concatenate([probs[:2], np.full((3, CLASSES), np.nan), probs[2:]])
    return jnp.asarray(rows, jnp.float32), jnp.array([True] * 2 + [False] * 3 + [True] * (len(probs) - 2))


@pytest.mark.parametrize(("largest", "quantile"), [(1.0, 0.0), (0.3, 0.0), (1.0, 0.8)])
def test_the_status_averages_confidence_outputs_and_pseudo_labels_over_batches(largest, quantile):
    tau, p, h = 1 / CLASSES, np.full(CLASSES, 1 / CLASSES), np.full(CLASSES, 1 / CLASSES)
    status = freematch.start(CLASSES)
    taus = []
    for probs in batches(3):
        of_batch = np.quantile(probs.max(1), quantile) if quantile else probs.max(1).mean()
        tau = min(DECAY * tau + (1 - DECAY) * of_batch, largest)
        p = DECAY * p + (1 - DECAY) * probs.mean(0)
        h = DECAY * h + (1 - DECAY) * shares(probs)
        status = update(status, *padded(probs), decay=DECAY, largest=largest, quantile=quantile)
        np.testing.assert_allclose(status.tau, tau, rtol=1e-6)
        np.testing.assert_allclose(status.probs, p, rtol=1e-6)
        np.testing.assert_allclose(status.histogram, h, rtol=1e-6)
        np.testing.assert_allclose(freematch.class_thresholds(status), p / p.max() * tau, rtol=1e-6)
        taus.append(tau)
    assert len(set(taus)) == (3 if largest == 1 else 2)  # the cut-off acts from the second batch on, and not before


@pytest.mark.parametrize("quantile", [0.0, 0.8])
def test_a_batch_without_examples_leaves_the_status(quantile):
    status = update(freematch.start(CLASSES), *padded(batches(1)[0]), decay=DECAY)
    got = update(status, jnp.full((2, CLASSES), jnp.nan), jnp.zeros(2, bool), decay=DECAY, quantile=quantile)
    jax.tree.map(np.testing.assert_array_equal, got, status)


def test_no_gradient_flows_into_the_status():
    def total(z):
        status = freematch.update(freematch.start(CLASSES), jax.nn.softmax(z), jnp.ones(3, bool), decay=DECAY)
        return status.tau + jnp.sum(freematch.class_thresholds(status) ** 2)

    assert not np.any(jax.jit(jax.grad(total))(jnp.arange(12.0).reshape(3, CLASSES)))


# Strong views of six examples; class 2 leads none of the accepted, class 3 has no share in the status' histogram.
LOGITS = np.random.default_rng(0).standard_normal((6, CLASSES)) * 2 + np.array([1.0, 1, -4, 1])
ACCEPTED = np.array([1, 1, 0, 1, 1, 1], bool)
PROBS, HISTOGRAM = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.6, 0.3, 0.1, 0.0])


def reciprocal(x):
    return np.array([1 / value if value > 0 else 0.0 for value in x])


def expected_loss(logits, histogram=HISTOGRAM):
    outputs = softmax(logits[ACCEPTED])
    a = PROBS * reciprocal(histogram)
    b = outputs.mean(0) * reciprocal(shares(outputs))
    a, b = a / a.sum(), b / b.sum()
    return np.sum(a * np.log(b + 1e-12))


@jax.jit
def got_loss(logits, accepted=ACCEPTED, histogram=HISTOGRAM):
    status = Status(jnp.float32(0.5), jnp.asarray(PROBS, jnp.float32), jnp.asarray(histogram, jnp.float32))
    return freematch.fairness_loss(jnp.asarray(logits, jnp.float32), jnp.asarray(accepted), status)


def test_the_fairness_loss_is_minus_the_cross_entropy_of_balanced_outputs():
    led = shares(softmax(LOGITS[ACCEPTED]))
    assert led[2] == 0  # 1/0 := 0 acts on both sides
    assert np.count_nonzero(led) == 3
    assert expected_loss(LOGITS) < -1
    np.testing.assert_allclose(got_loss(LOGITS), expected_loss(LOGITS), rtol=1e-5)
    whole = np.array([0.4, 0.2, 0.3, 0.1])
    np.testing.assert_allclose(got_loss(LOGITS, histogram=whole), expected_loss(LOGITS, whole), rtol=1e-5)


def test_its_gradient_flows_through_the_mean_output_alone():
    numeric = np.zeros_like(LOGITS)
    for i in np.ndindex(*LOGITS.shape):
        step = np.zeros_like(LOGITS)
        step[i] = 1e-5
        numeric[i] = (expected_loss(LOGITS + step) - expected_loss(LOGITS - step)) / 2e-5
    np.testing.assert_allclose(jax.grad(got_loss)(jnp.asarray(LOGITS)), numeric, rtol=1e-3, atol=1e-5 * np.abs(numeric).max())
    assert not numeric[2].any()  # not accepted

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
