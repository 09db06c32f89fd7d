"""The preview's numbers, its text and its picture."""

import math

import cv2
import numpy as np
import pytest

from fedjax_ssl.data import preview, split
from fedjax_ssl.data.settings import DataSettings
from tests.data.common import labels_alone

LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])


def seen(server=(), labeled=(), unlabeled=(), unassigned=0, notes=()):
    rows = [[np.array(row, int) for row in table] for table in (labeled, unlabeled)]
    drawn = split.Assignment(np.array(server, int), *rows, np.zeros(0, int), unassigned, notes, np.zeros(0, int), [])
    return preview.preview(drawn, LABELS, 3)


def jensen_shannon(p, q):
    """In bits, one term at a time, from relative entropies to the middle."""
    p, q = ([x / sum(counts) for x in counts] for counts in (p, q))
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    relative = [sum(a * math.log2(a / m) for a, m in zip(x, middle, strict=True) if a) for x in (p, q)]
    return sum(relative) / 2


@pytest.mark.parametrize(("p", "q"), [([1, 2, 3], [3, 2, 1]), ([5, 0, 0], [1, 1, 1]), ([7, 1, 0], [0, 1, 9]), ([2, 2], [1, 1])])
def test_the_divergence_is_jensen_shannons_in_bits(p, q):
    assert preview.jensen_shannon(np.array(p), np.array(q)) == pytest.approx(jensen_shannon(p, q), abs=1e-12)
    counts, others = np.array([[1, 1], [4, 0], [0, 0], [1, 0]]), np.array([[5, 5], [0, 1], [1, 1], [0, 0]])
    np.testing.assert_allclose(preview.jensen_shannon(counts, others), [0, 1, np.nan, np.nan], atol=1e-12)


def test_the_table_counts_what_everybody_holds():
    shown = preview.table(seen(labeled=[[0, 4], [8]], unlabeled=[[1, 2, 5, 6], [9, 10, 3]], unassigned=2, notes=("a note",)))
    lines = shown.splitlines()
    assert lines[0].split() == ["client", "labeled", "unlabeled", "classes", "(unlab.)", "divergence"]
    assert lines[1].split()[:6] == ["0", "2", "4", "2", "2", "0.000"]
    assert lines[2].split()[:6] == ["1", "1", "3", "1", "2", f"{jensen_shannon([0, 0, 1], [1, 0, 2]):.3f}"]
    assert lines[1].endswith("|██ |  |██ |")
    assert lines[2].endswith("|  █|  |▄ █|")
    summary = {line[:20].strip(): line[20:].split() for line in lines[4:]}
    assert summary["of 2 clients"] == ["min", "median", "mean", "max", "sum"]
    assert summary["labeled"] == ["1", "1.5", "1.5", "2", "3"]
    assert summary["unlabeled"] == ["3", "3.5", "3.5", "4", "7"]
    assert summary["classes, labeled"] == ["1", "1.5", "1.5", "2"]
    assert summary["classes, unlabeled"] == ["2", "2", "2.0", "2"]
    assert "Jensen-Shannon, in bits" in shown
    assert "unassigned: 2 training examples that nobody has" in lines
    assert lines[-1] == "note: a note"
    assert "server" not in shown


def test_the_servers_labels_are_compared_where_no_client_holds_any():
    shown = preview.table(seen(server=[0, 4, 8], labeled=[[], []], unlabeled=[[1, 5, 9], [2]]))
    lines = shown.splitlines()
    assert lines[1].split()[:6] == ["0", "0", "3", "-", "3", "0.000"]
    assert lines[2].split()[:6] == ["1", "0", "1", "-", "1", f"{jensen_shannon([1, 1, 1], [1, 0, 0]):.3f}"]
    assert "server: 3 labeled examples of 3 of 3 classes" in lines


def test_a_long_table_repeats_its_header_and_stays_aligned():
    drawn = split.draw(labels_alone(np.arange(6000) % 10, 10), DataSettings(num_clients=120, partition="dirichlet"), 0)
    shown = preview.table(preview.preview(drawn, np.arange(6000) % 10, 10))
    table = shown.split("\n\nof 120 clients")[0].splitlines()
    assert sum(line.startswith("client  labeled  unlabeled") for line in table) == 5
    rows = [line for line in table if line and not line.startswith("client")]
    assert [int(line.split()[0]) for line in rows] == list(range(120))
    assert len({len(line) for line in rows}) == 1
    assert max(len(line) for line in rows) < 100
    labels = np.arange(4000) % 100  # bars of so many classes do not fit
    assert "|" not in preview.table(
        preview.preview(split.draw(labels_alone(labels, 100), DataSettings(num_clients=4, num_labels=100), 0), labels, 100)
    )


def test_the_picture_shows_each_client_and_class_in_its_place(tmp_path):
    """Client 0 holds class 0, client 1 class 2: the darkest spots are at the panel's upper left and lower right."""
    path = tmp_path / "preview.png"
    preview.heat_map(seen(labeled=[[], []], unlabeled=[[0, 1, 2, 3], [8, 9, 10, 11]]), path, "two clients")
    picture = cv2.imread(str(path)).astype(int)
    right = picture[:, picture.shape[1] // 2 :]
    rows, columns = np.nonzero((right[..., 0] > right[..., 2] + 40) & (right.sum(-1) < 200))  # dark blue
    columns, rows = columns[columns < 0.85 * right.shape[1]], rows[columns < 0.85 * right.shape[1]]  # not the color bar
    middle = (rows.min() + rows.max()) / 2
    upper, lower = columns[rows < middle - 3], columns[rows > middle + 3]
    assert upper.max() < lower.min()
