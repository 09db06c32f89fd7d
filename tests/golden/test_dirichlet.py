"""The Dirichlet split of SemiFL and (FL)^2, against a plain loop over classes and clients that sees the same draws."""

import math
from itertools import accumulate

import numpy as np
import pytest

from fedjax_ssl.data import partition


def reference(labels, num_clients, alpha, rng, min_size):
    """The routine as it is described, one number at a time."""
    classes = sorted(set(labels.tolist()))
    while True:
        draws = [rng.dirichlet([alpha] * num_clients) for _ in classes]
        rows = [[] for _ in range(num_clients)]
        for c, p in zip(classes, draws, strict=True):
            members = [i for i, label in enumerate(labels) if label == c]
            full = [len(row) >= len(labels) / num_clients for row in rows]
            reached = list(accumulate(0.0 if full[k] else p[k] for k in range(num_clients)))
            if reached[-1] == 0.0:
                break
            start = 0
            for k in range(num_clients):
                end = len(members) if k == num_clients - 1 else math.floor(reached[k] / reached[-1] * len(members))
                rows[k] += members[start:end]
                start = end
        else:
            if min(len(row) for row in rows) >= min_size:
                return rows


CASES = {
    "even classes": (np.random.default_rng(0).permutation(np.arange(2000) % 10), 10, 0.3, 10),
    "uneven classes": (np.random.default_rng(1).choice(7, 1500, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.06, 0.04]), 6, 0.2, 10),
    "skewed, repeated": (np.random.default_rng(2).permutation(np.arange(3000) % 10), 20, 0.1, 10),
    "a class is missing": (np.random.default_rng(3).choice([0, 2, 5], 600), 4, 0.5, 20),
}


def rows_of(case, seed):
    labels, num_clients, alpha, min_size = CASES[case]
    rng = np.random.default_rng(seed)
    shared = partition.dirichlet(labels, np.arange(len(labels)), num_clients, rng, alpha=alpha, min_size=min_size)
    return [row.tolist() for row in shared.rows]


def classes_of(case, rows):
    """The class of every entry: which examples of a class a client gets is drawn, and not compared."""
    return [CASES[case][0][row].tolist() for row in rows]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_plain_loop(case, seed):
    labels, num_clients, alpha, min_size = CASES[case]
    expected = reference(labels, num_clients, alpha, np.random.default_rng(seed), min_size)
    assert classes_of(case, rows_of(case, seed)) == classes_of(case, expected)


def test_a_client_gets_no_run_of_a_class():
    """Examples are stored by scan or by source often enough: a run would make clients differ in more than their classes."""
    labels, rows = CASES["even classes"][0], rows_of("even classes", 0)
    rank = np.argsort(np.argsort(labels, kind="stable")) % 200  # of an example within its class of 200
    shares = [np.array([rank[i] for i in row if labels[i] == c]) for row in rows for c in range(10)]
    some = [share for share in shares if 20 <= len(share) <= 150]
    assert len(some) > 5
    assert all(share.max() - share.min() > len(share) for share in some)


def test_cifar10_split_has_the_sizes_that_the_specification_simulated(cifar10_labels):
    """N = 50,000, 100 clients, alpha .1: sizes about 10 to 3,000, median about 400."""
    labels = cifar10_labels
    labeled, rest = partition.balanced_labels(labels, 40, 10, np.random.default_rng(0))
    medians = []
    for seed in range(20):
        rows = partition.dirichlet(labels, rest, 100, np.random.default_rng(seed), alpha=0.1).rows
        sizes = np.array([len(row) for row in rows])
        assert np.array_equal(np.sort(np.concatenate(rows)), np.setdiff1d(np.arange(50_000), labeled))
        assert sizes.min() >= 10
        assert 1000 < sizes.max() < 5500  # one class holds 5,000; a client that is below N / K may still receive one
        medians.append(np.median(sizes))
    assert 300 < np.mean(medians) < 500
