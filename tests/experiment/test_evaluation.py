"""Accuracies, scores, confusion matrices and calibration of outputs, by golden computations and as scikit-learn has them."""

import json
import warnings

import numpy as np
import pytest
from sklearn import metrics

from fedjax_ssl.data import sources
from fedjax_ssl.experiment import evaluation
from fedjax_ssl.experiment.build import build
from fedjax_ssl.files import plain
from tests import tiny

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


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize(("classes", "absent"), [(2, ()), (4, ()), (8, ()), (8, (0, 3))])
def test_scores_are_those_of_scikit_learn(classes, absent):
    rng, here = np.random.default_rng(0), [c for c in range(classes) if c not in absent]
    labels = rng.choice(here, 400)
    logits = (2 * rng.normal(size=(400, classes)) + 2 * np.eye(classes)[labels]).astype(np.float32)
    predicted, softmax = logits.argmax(1), np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    expected = {
        "balanced_accuracy": metrics.balanced_accuracy_score(labels, predicted),
        "macro_f1": metrics.f1_score(labels, predicted, average="macro"),
        "auc": np.mean([metrics.roc_auc_score(labels == c, softmax[:, c]) for c in here]),
        "top5_accuracy": metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(8)) if classes == 8 else np.nan,
        "ece": evaluation.report(logits, labels)["ece"],
    }
    if classes > 2 and not absent:
        assert expected["auc"] == pytest.approx(metrics.roc_auc_score(labels, softmax, multi_class="ovr", average="macro"))
    assert evaluation.scores(logits, labels) == pytest.approx(expected, nan_ok=True)


def test_top5_is_refused_where_it_would_always_be_1():
    images, labels = np.zeros((200, 8, 8, 1), np.uint8), np.arange(200) % 5
    data = sources.from_arrays(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(ValueError, match=r"^eval_metrics: got top5 for 5 classes, accepted: with more than 5 classes$"):
        build(tiny.config("fedavg", network="linear", eval_metrics="ece,top5"), data)


def test_golden_scores_at_ties():
    # Of class 0 against 1: two of four pairs are won, and one is a tie.
    logits = np.float32([[1, 0], [3, 0], [1, 0], [2, 0]])
    assert evaluation.macro_auc(logits, np.array([0, 0, 1, 1])) == pytest.approx((2 + 0.5) / 4)
    # All outputs are equal: classes 0 to 4 are the first five, as class 0 is the first one.
    assert evaluation.top5_accuracy(np.zeros((4, 7), np.float32), np.array([0, 4, 5, 6])) == 0.5


@pytest.mark.parametrize(
    ("change", "balanced", "f1", "auc"),
    [
        (lambda logits, labels: (logits[:0], labels[:0]), None, None, None),
        (lambda logits, labels: (logits, 0 * labels), 0.4, 2 * 0.4 / 1.4 / 3, None),
        (lambda logits, labels: (logits[:1], labels[:1]), 1, 1, None),
        (lambda logits, labels: (logits * np.float32(np.nan), labels), None, None, None),
        (lambda logits, labels: (np.zeros_like(logits), labels), 1 / 3, 2 / 6 / 3, 0.5),
    ],
    ids=["no example", "one class", "one example", "not finite", "all equal"],
)
def test_scores_of_odd_outputs_are_absent_and_never_an_error(change, balanced, f1, auc):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = evaluation.scores(*change(LOGITS, LABELS))
    shown = json.loads(json.dumps(plain(found)))
    assert [shown[key] for key in ("balanced_accuracy", "macro_f1", "auc")] == pytest.approx([balanced, f1, auc])
    assert (shown["top5_accuracy"], shown["ece"] is None) == (None, balanced is None)
