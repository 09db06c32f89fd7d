"""What is computed from a model's outputs on labeled examples: accuracies and other scores, confusion matrix, worst clients.

All functions are NumPy on plain arrays. Labels below 0 mark examples without a known label; callers leave them out.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int, Int64

BINS = 15  # of the calibration, as in Guo et al. 2017
TENTHS = 10  # the number of bins of the clients' histogram; the worst clients are one part in so many
TOP = 5  # an example counts in the top-5 accuracy if its class has one of the five largest outputs
Logits = Float[np.ndarray, "N C"]
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


def predictions(logits: Logits) -> Predictions:
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
    return OfClients(accuracy, count, *summaries(accuracy))


def summaries(accuracy: Float[np.ndarray, " K"]) -> tuple[float, float, Int64[np.ndarray, " _"]]:
    """The mean, the worst tenth and the histogram of clients' accuracies, of which NaN does not count."""
    measured = accuracy[~np.isnan(accuracy)]
    return _mean(measured), worst(measured), np.histogram(measured, TENTHS, (0.0, 1.0))[0]


def over_clients(accuracy: Float[np.ndarray, " K"]) -> dict[str, float]:
    """The metrics of clients' accuracies, of which NaN does not count: mean, standard deviation and the worst tenth."""
    known = accuracy[~np.isnan(accuracy)]
    return {
        "eval/client_accuracy": _mean(known),
        "eval/client_accuracy_sd": float(known.std()),
        "eval/client_accuracy_worst": worst(known),
    }


def worst(accuracy: Float[np.ndarray, " K"]) -> float:
    """The mean over the worst tenth of clients, at least one; NaN if there are none."""
    return float(np.sort(accuracy)[: max(1, len(accuracy) // TENTHS)].mean()) if len(accuracy) else float("nan")


def _mean(values: Float[np.ndarray, " n"]) -> float:
    """The mean of the values that are not NaN; NaN if there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def balanced_accuracy(logits: Logits, labels: Classes) -> float:
    """The mean of the accuracies of the classes that have examples."""
    return _mean(class_accuracies(confusion_matrix(labels, predictions(logits).label, logits.shape[1])))


def macro_f1(logits: Logits, labels: Classes) -> float:
    """The mean of the classes' F1, 2 right / (examples + predicted ones), over classes that have examples or are predicted."""
    confusion = confusion_matrix(labels, predictions(logits).label, logits.shape[1])
    total = confusion.sum(axis=0) + confusion.sum(axis=1)
    return _mean(np.where(total > 0, 2 * np.diagonal(confusion) / np.maximum(total, 1), np.nan))


def macro_auc(logits: Logits, labels: Classes) -> float:
    """The mean of the areas under the ROC curves of each class against all others, by the class' softmax output.

    The mean is over the classes that some examples have and others do not have; NaN if there is none.
    """
    from sklearn.metrics import roc_auc_score  # takes a second to import, which only those wait for who ask for it

    outputs = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True, initial=-np.inf))
    outputs /= outputs.sum(axis=1, keepdims=True)
    is_class = labels[:, None] == np.arange(logits.shape[1])
    known = np.flatnonzero(is_class.any(axis=0) & ~is_class.all(axis=0))
    return _mean(np.array([roc_auc_score(is_class[:, c], outputs[:, c]) for c in known], float))


def top5_accuracy(logits: Logits, labels: Classes) -> float:
    """The share of the examples whose class has one of the five largest outputs; NaN with at most five classes.

    Of equal outputs the lowest class is the largest, as for the accuracy.
    """
    classes = np.arange(logits.shape[1])
    if len(classes) <= TOP:
        return float("nan")
    own = np.take_along_axis(logits, labels.astype(np.int64)[:, None], axis=1)
    larger = (logits > own) | ((logits == own) & (classes < labels[:, None]))
    return _mean((larger.sum(axis=1) < TOP).astype(float))


def ece(logits: Logits, labels: Classes) -> float:
    """The expected calibration error."""
    return calibration(predictions(logits), labels).error


class Score(NamedTuple):
    """A number in [0, 1] that is computed from outputs and labels: its key in reports, after `eval/` in logs, and its name."""

    key: str
    name: str
    of: Callable[[Logits, Classes], float]


SCORES = {
    "balanced_accuracy": Score("balanced_accuracy", "balanced accuracy", balanced_accuracy),
    "macro_f1": Score("macro_f1", "macro F1", macro_f1),
    "auc": Score("auc", "macro AUC", macro_auc),
    "top5": Score("top5_accuracy", "top-5 accuracy", top5_accuracy),
    "ece": Score("ece", "calibration error", ece),
}
"""What can be computed in addition to accuracy and loss, under the names that `eval_metrics` takes."""


def scores(logits: Logits, labels: Classes, names: Iterable[str] = tuple(SCORES)) -> dict[str, float]:
    """The scores with these names; NaN if there is no example, or an output is not finite."""
    is_known = len(labels) > 0 and bool(np.isfinite(logits).all())
    return {SCORES[name].key: SCORES[name].of(logits, labels) if is_known else float("nan") for name in names}


def check_scores(names: Iterable[str], num_classes: int) -> None:
    """Raises ValueError for a score that no outputs of so many classes have."""
    if "top5" in names and num_classes <= TOP:
        raise ValueError(f"eval_metrics: got top5 for {num_classes} classes, accepted: with more than {TOP} classes")


def report(logits: Logits, labels: Classes) -> dict[str, Any]:
    """All of these results for N labeled examples, except those of clients, as plain numbers and lists."""
    num_classes, predicted = logits.shape[1], predictions(logits)
    confusion = confusion_matrix(labels, predicted.label, num_classes)
    calibrated = calibration(predicted, labels)
    return {
        "examples": len(labels),
        "accuracy": float(np.mean(predicted.label == labels)) if len(labels) else float("nan"),
        **scores(logits, labels),
        "class_accuracy": class_accuracies(confusion).tolist(),
        "confusion": confusion.tolist(),
        "calibration": {name: getattr(calibrated, name).tolist() for name in ("examples", "accuracy", "confidence")},
    }
