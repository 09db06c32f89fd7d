"""Accuracies, confusion matrices and calibration of outputs, by golden computations."""

import numpy as np
import pytest

from fedjax_ssl.experiment import evaluation

LOGITS = np.log([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.5, 0.3], [0.05, 0.05, 0.9], [0.4, 0.35, 0.25]]).astype(np.float32)
LABELS = np.array([0, 1, 2, 2, 1])


def test_golden_confusion_classes_and_calibration():
    found = evaluation.report(LOGITS, LABELS)
    assert found["confusion"] == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert found["class_accuracy"] == [1.0, 0.5, 0.5]
    assert found["accuracy"] == 0.6
    # Confidences .7, .6, .5, .9, .4 are in five bins of one example each; right are the first, second and fourth.
    assert found["ece"] == pytest.approx((0.3 + 0.4 + 0.5 + 0.1 + 0.4) / 5)


def test_golden_calibration_against_the_definition():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(500, 4)).astype(np.float32) * 2, rng.integers(0, 4, 500)
    probs = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (probs.max(1) > low) & (probs.max(1) <= low + 1 / 15 + 1e-12)
        if inside.any():
            expected += inside.mean() * abs((probs.argmax(1) == labels)[inside].mean() - probs.max(1)[inside].mean())
    assert evaluation.calibration(evaluation.predictions(logits), labels).error == pytest.approx(expected, rel=1e-9)


def test_golden_clients():
    right = np.array([1, 0, np.nan, 1, 1, 0], float)
    rows = [np.array([0, 1]), np.array([2]), np.array([2, 3]), np.array([3, 4, 5])]
    found = evaluation.of_clients(right, rows)
    np.testing.assert_allclose(found.accuracy, [0.5, np.nan, 1.0, 2 / 3])
    assert found.examples.tolist() == [2, 0, 1, 3]
    assert (found.mean, found.worst) == (pytest.approx((0.5 + 1 + 2 / 3) / 3), 0.5)
    assert found.histogram.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 1]


def test_a_class_without_examples_has_no_accuracy():
    np.testing.assert_array_equal(evaluation.class_accuracies(np.array([[2, 0], [0, 0]])), [1.0, np.nan])
