"""Examples of a file or a folder for a model: their labels become the numbers of its classes."""

import re

import numpy as np
import pytest

from fedjax_ssl.data.sources import examples

BY_TEXT = ("0", "1", "10", "11", "2")  # folders that are named by integers, in the order of text
LETTERS = ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("classes", "names", "labels", "expected", "is_by_position"),
    [
        (BY_TEXT, (), [0, 1, 2, 10, 11], [0, 1, 4, 2, 3], False),
        ((), BY_TEXT[:3], [0, 1, 2, -1], [0, 1, 10, -1], False),
        (("00", "01", "10"), (), [0, 10], [0, 2], False),
        (("00", "01", "10"), ("10", "1"), [0, 1], [2, 1], False),
        (BY_TEXT, (), np.array(["10", "2", "-1"]), [2, 4, -1], False),
        ((), (), np.array(["10", "2", "-1"]), [10, 2, -1], False),
        (("3", "5"), (), [5, 3], [1, 0], False),  # `renumber_labels`
        ((), (), [11, 0], [11, 0], False),
        (("0.0", "1.0", "10.0"), (), [10, 1], [2, 1], False),  # as pandas writes them
        (LETTERS, ("b", "a"), [0, 1], [1, 0], False),
        (LETTERS, (), [4, -1, 0], [4, -1, 0], True),
        ((), tuple("abcdefghijkl"), [11, 0], [11, 0], True),
    ],
)
def test_classes_are_matched_by_integers_or_names_and_by_position_with_a_warning(
    caplog, classes, names, labels, expected, is_by_position
):
    model = examples.Classes(classes, len(classes) or 12)
    labels = np.asarray(labels)
    assert examples.labels_of("x.npz", labels, len(labels), names, model).tolist() == expected
    assert caplog.messages == [line for line in caplog.messages if "matched by position alone" in line]
    assert len(caplog.messages) == is_by_position


@pytest.mark.parametrize(
    ("classes", "names", "labels", "line"),
    [
        (BY_TEXT, (), [3], "with label 3, accepted: 0, 1, 10, 11, 2, or -1"),
        ((), ("0", "12"), [1], "with class 12, accepted: 0 to 11, or -1"),
        (LETTERS, ("a", "z"), [0], "with class z, accepted: 0 = a, "),
        (LETTERS, ("1", "2"), [0], "with class 1, accepted: 0 = a, "),
        (LETTERS, (), [5], "with label 5, accepted: 0 to 4, or -1"),
        ((), ("a", "b"), [0], "with 2 classes, accepted: each of the model's 12 classes"),
        ((), (), [2**40], f"with label {2**40}, accepted: 0 to 11"),
        (LETTERS, ("a", "b"), [2], "got labels from 2 to 2 in x.npz, accepted: 0 to 1"),
    ],
)
def test_classes_that_the_model_lacks_are_refused(classes, names, labels, line):
    model = examples.Classes(classes, len(classes) or 12)
    with pytest.raises(ValueError, match=re.escape(line)):
        examples.labels_of("x.npz", np.asarray(labels), len(labels), names, model)
