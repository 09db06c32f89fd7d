"""What is computed from a model's outputs on labeled examples: accuracies, confusion matrix, calibration, worst clients.

All functions are NumPy on plain arrays. Labels below 0 mark examples without a known label; callers leave them out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int, Int64

BINS = 15  # of the calibration, as in Guo et al. 2017
TENTHS = 10  # the number of bins of the clients' histogram; the worst clients are one part in so many
Classes = Int[np.ndarray, " N"]


class Predictions(NamedTuple):
    """The class of the largest output for each of N examples, and its softmax output."""

    label: Int64[np.ndarray, " N"]
    confidence: Float64[np.ndarray, " N"]


class Calibration(NamedTuple):
    """The expected calibration error in [0, 1], and each bin's number of examples, accuracy and mean confidence.

    Accuracy and confidence of an empty bin are NaN.
    """

    error: float
    examples: Int64[np.ndarray, " bins"]
    accuracy: Float64[np.ndarray, " bins"]
    confidence: Float64[np.ndarray, " bins"]


class OfClients(NamedTuple):
    """The model's accuracy on each client's own examples (NaN where none has a known label), their number, and summaries.

    `worst` is the mean over the worst tenth of the clients, at least one. `histogram` counts clients in ten equal bins.
    """

    accuracy: Float64[np.ndarray, " K"]
    examples: Int64[np.ndarray, " K"]
    mean: float
    worst: float
    histogram: Int64[np.ndarray, " _"]


def predictions(logits: Float[np.ndarray, "N C"]) -> Predictions:
    """Classes and confidences of logits; the lowest class wins a tie."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True, initial=-np.inf)
    confidence = 1.0 / np.exp(shifted).sum(axis=1)
    return Predictions(logits.argmax(axis=1).astype(np.int64), confidence)


def confusion_matrix(labels: Classes, predicted: Classes, num_classes: int) -> Int64[np.ndarray, "C C"]:
    """How many examples of class i (row) are taken for class j (column).

    >>> confusion_matrix(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    cells = np.bincount(labels.astype(np.int64) * num_classes + predicted, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def class_accuracies(confusion: Int[np.ndarray, "C C"]) -> Float64[np.ndarray, " C"]:
    """The share of each class's examples that are classified correctly (recall); NaN for a class without examples."""
    total = confusion.sum(axis=1)
    return np.where(total > 0, np.diagonal(confusion) / np.maximum(total, 1), np.nan)


def calibration(predicted: Predictions, labels: Classes, bins: int = BINS) -> Calibration:
    """ECE = sum_b |B_b| / N |acc(B_b) - conf(B_b)| over equal bins (l, u] of confidence (Guo et al. 2017, Eq. 3)."""
    which = np.clip(np.ceil(predicted.confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(which, minlength=bins)
    correct = np.bincount(which, weights=predicted.label == labels, minlength=bins)
    confidence = np.bincount(which, weights=predicted.confidence, minlength=bins)
    error = float(np.abs(correct - confidence).sum() / max(len(labels), 1))
    empty = np.where(count > 0, count, np.nan)
    return Calibration(error, count, correct / empty, confidence / empty)


def of_clients(correct: Float[np.ndarray, " N"], rows: Sequence[Int[np.ndarray, " _"]]) -> OfClients:
    """Accuracies of clients that have the examples `rows`; `correct` is 1, 0, or NaN where the label is not known."""
    known = [own[~np.isnan(own)] for own in (correct[row] for row in rows)]
    count = np.array([len(own) for own in known])
    accuracy = np.array([own.mean() if len(own) else np.nan for own in known])
    measured = accuracy[count > 0]
    mean = float(measured.mean()) if len(measured) else float("nan")
    return OfClients(accuracy, count, mean, worst(measured), np.histogram(measured, TENTHS, (0.0, 1.0))[0])


def worst(accuracy: Float[np.ndarray, " K"]) -> float:
    """The mean over the worst tenth of clients, at least one; NaN if there are none."""
    return float(np.sort(accuracy)[: max(1, len(accuracy) // TENTHS)].mean()) if len(accuracy) else float("nan")


def report(logits: Float[np.ndarray, "N C"], labels: Classes) -> dict[str, Any]:
    """All of these results for N labeled examples, except those of clients, as plain numbers and lists."""
    num_classes, predicted = logits.shape[1], predictions(logits)
    confusion = confusion_matrix(labels, predicted.label, num_classes)
    calibrated = calibration(predicted, labels)
    return {
        "examples": len(labels),
        "accuracy": float(np.mean(predicted.label == labels)) if len(labels) else float("nan"),
        "class_accuracy": class_accuracies(confusion).tolist(),
        "confusion": confusion.tolist(),
        "ece": calibrated.error,
        "calibration": {name: getattr(calibrated, name).tolist() for name in ("examples", "accuracy", "confidence")},
    }
