"""CAT, (FL)^2's Eqs. 7-9, and acceptance, against NumPy."""

import numpy as np
import pytest

from fedjax_ssl.ssl import thresholds


def softmax_rows(rng: np.random.Generator, n: int, classes: int) -> np.ndarray:
    x = np.exp(3 * rng.standard_normal((n, classes)))
    return (x / x.sum(1, keepdims=True)).astype(np.float32)


def expected_cat(probs: np.ndarray) -> tuple[float, np.ndarray]:
    tau = np.mean([max(row) for row in probs])
    mean = np.array([np.mean(probs[:, c]) for c in range(probs.shape[1])])
    return tau, np.array([m / max(mean) * tau for m in mean])


@pytest.mark.parametrize("n", [1, 7, 50])
def test_cat_is_eqs_7_to_9_over_the_real_examples(n):
    rng = np.random.default_rng(n)
    probs = softmax_rows(rng, n, 5)
    padded = np.concatenate([probs[: n // 2], np.full((3, 5), np.nan, np.float32), probs[n // 2 :]])
    mask = np.array([True] * (n // 2) + [False] * 3 + [True] * (n - n // 2))
    got = thresholds.client_adaptive(padded, mask)
    tau, per_class = expected_cat(probs)
    np.testing.assert_allclose(got.tau, tau, rtol=1e-6)
    np.testing.assert_allclose(got.per_class, per_class, rtol=1e-5)
    assert np.max(got.per_class) == pytest.approx(tau, rel=1e-6)


def test_a_client_without_examples_has_zero_thresholds():
    got = thresholds.client_adaptive(np.full((4, 3), np.nan, np.float32), np.zeros(4, bool))
    assert got.tau == 0
    np.testing.assert_array_equal(got.per_class, np.zeros(3))


def test_strict_and_not_strict_differ_at_equality_alone():
    values = np.array([0.1, 0.5, 0.9], np.float32)
    assert thresholds.passes(values, 0.5, strict=True).tolist() == [False, False, True]
    assert thresholds.passes(values, 0.5, strict=False).tolist() == [False, True, True]


def test_equal_confidences_accept_nothing_when_strict():
    # A client of one image: tau_k is its confidence, so that nothing lies above (spec: the empty pseudo-label set).
    probs = np.array([[0.7, 0.2, 0.1]], np.float32)
    cat = thresholds.client_adaptive(probs, np.array([True]))
    assert not thresholds.passes(probs.max(1), cat.per_class[probs.argmax(1)], strict=True).any()
    assert thresholds.passes(probs.max(1), cat.per_class[probs.argmax(1)], strict=False).all()
