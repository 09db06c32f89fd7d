"""CAT, (FL)^2's Eqs. 7-9, and acceptance, against NumPy."""

import numpy as np
import pytest

from fedjax_ssl.ssl import thresholds
from tests.golden.linear_clients import softmax


@pytest.mark.parametrize("n", [1, 7, 50])
def test_cat_is_eqs_7_to_9_over_the_real_examples(n):
    probs = softmax(3 * np.random.default_rng(n).standard_normal((n, 5))).astype(np.float32)
    padded = np.concatenate([probs[: n // 2], np.full((3, 5), np.nan, np.float32), probs[n // 2 :]])
    mask = np.array([True] * (n // 2) + [False] * 3 + [True] * (n - n // 2))
    got = thresholds.client_adaptive(padded, mask)
    tau, mean = np.mean([max(row) for row in probs]), probs.mean(0)
    np.testing.assert_allclose(got.tau, tau, rtol=1e-6)
    np.testing.assert_allclose(got.per_class, mean / max(mean) * tau, rtol=1e-5)


def test_a_client_without_examples_has_zero_thresholds():
    got = thresholds.client_adaptive(np.full((4, 3), np.nan, np.float32), np.zeros(4, bool))
    assert got.tau == 0
    np.testing.assert_array_equal(got.per_class, np.zeros(3))


def test_strict_and_not_strict_differ_at_equality_alone():
    values = np.array([0.1, 0.5, 0.9], np.float32)
    assert thresholds.passes(values, 0.5, strict=True).tolist() == [False, False, True]
    assert thresholds.passes(values, 0.5, strict=False).tolist() == [False, True, True]
