"""Partitions against slow plain-Python re-implementations, one example at a time, that see the same random draws."""

import math
from itertools import accumulate

import numpy as np
import pytest

from fedjax_ssl.data import partition

CASES = {
    "even classes": (np.random.default_rng(0).permutation(np.arange(2000) % 10), 20),
    "uneven classes": (
        np.random.default_rng(1).choice(10, 1503, p=[0.3, 0.2, 0.1, 0.1, 0.1, 0.06, 0.04, 0.04, 0.03, 0.03]),
        20,
    ),
    "many clients": (np.random.default_rng(2).choice(10, 977), 100),
}


def members(labels, rng):
    """The examples of each class, in the order in which one shuffle of all examples shows them."""
    order = rng.permutation(len(labels)).tolist()
    return [[i for i in order if labels[i] == c] for c in range(10)]


def class_balanced(labels, num_clients, rng):
    rows, extra = [[] for _ in range(num_clients)], [0] * num_clients
    for one_class in members(labels, rng):
        ties = rng.random(num_clients).tolist()
        poorest = sorted(range(num_clients), key=lambda k: (extra[k], ties[k]))[: len(one_class) % num_clients]
        for k in poorest:
            extra[k] += 1
        start = 0
        for k in range(num_clients):
            end = start + len(one_class) // num_clients + (k in poorest)
            rows[k] += one_class[start:end]
            start = end
    return rows


def shards(labels, num_clients, rng, shards_per_client=2):
    in_order = [i for one_class in members(labels, rng) for i in one_class]
    owners = rng.permutation([k for k in range(num_clients) for _ in range(shards_per_client)]).tolist()
    rows = [[] for _ in range(num_clients)]
    for shard, k in enumerate(owners):
        rows[k] += in_order[shard * len(labels) // len(owners) : (shard + 1) * len(labels) // len(owners)]
    return rows


def dirichlet_classes(labels, num_clients, rng, alpha=0.1):
    by_class = members(labels, rng)
    mixtures = [rng.dirichlet([alpha] * 10).tolist() for _ in range(num_clients)]
    rows = [[] for _ in range(num_clients)]
    for c, one_class in enumerate(by_class):
        total, reached, start = 0.0, 0.0, 0
        for q in mixtures:  # one by one: from Python 3.12 on `sum` carries the rounding along, which moves a cut
            total += q[c]
        for k, q in enumerate(mixtures):
            reached += q[c]
            end = len(one_class) if k == num_clients - 1 else math.floor(reached / total * len(one_class))
            rows[k] += one_class[start:end]
            start = end
    return rows


def dirichlet_pairs(labels, num_clients, rng, alpha=0.1):
    share, joined = len(labels) // num_clients, []
    order = rng.permutation(len(labels)).tolist()
    for pair in range(num_clients // 2):
        part = order[2 * share * pair : 2 * share * (pair + 1)]
        shuffled = [part[i] for i in rng.permutation(2 * share)]
        first = second = ()
        while min(len(first), len(second)) < share / 2:
            first, second, sure = [], [], True
            present = sorted({int(labels[i]) for i in part})
            draws = [rng.dirichlet([alpha] * 2).tolist() for _ in present]
            for c, (p, q) in zip(present, draws, strict=True):
                own = [i for i in shuffled if labels[i] == c]
                p, q = p * (len(first) < share), q * (len(second) < share)
                sure = sure and p + q > 0
                cut = math.floor(p / (p + q) * len(own)) if sure else 0
                first, second = first + own[:cut], second + own[cut:]
            first = first if sure else ()
        joined += first + second
    return [joined[share * k : share * (k + 1)] for k in range(num_clients)]


def batch_imbalanced(labels, num_clients, rng):
    by_class, rows = members(labels, rng), []
    for i in range(num_clients):
        peak = i % 10
        chances = [0.03] * 10
        chances[peak], chances[(peak - 1) % 10], chances[(peak + 1) % 10], chances[(peak + 5) % 10] = 0.5, 0.15, 0.15, 0.02
        row = []
        for c, count in enumerate(rng.multinomial(len(labels) // num_clients, chances)):
            row += by_class[c][:count]
            by_class[c] = by_class[c][count:]
        rows.append(row)
    return rows


def class_shards(labels, num_clients, rng, classes_per_client=2):
    entries = rng.permutation([e % 10 for e in range(num_clients * classes_per_client)]).tolist()
    slots = [entries[k * classes_per_client : (k + 1) * classes_per_client] for k in range(num_clients)]
    return deal(labels, slots, rng)


def random_classes(labels, num_clients, rng, classes_per_client=2):
    orders = rng.permuted([list(range(10))] * num_clients, axis=1).tolist()
    return deal(labels, [order[:classes_per_client] for order in orders], rng)


def class_grid(labels, num_clients, rng):
    return deal(labels, [(i // 10, i % 10) for i in range(num_clients)], rng)


def deal(labels, slots, rng):
    """Every class in equal shares to the clients that list it, twice where they list it twice."""
    rows = [[] for _ in slots]
    for c, one_class in enumerate(members(labels, rng)):
        holders = rng.permutation([k for k, classes in enumerate(slots) for held in classes if held == c]).tolist()
        wanted = [0] * len(slots)
        for i in range(len(one_class) if holders else 0):
            wanted[holders[i % len(holders)]] += 1
        for k, number in enumerate(wanted):
            rows[k] += one_class[:number]
            one_class = one_class[number:]
    return rows


REFERENCES = (
    *(class_balanced, shards, dirichlet_classes, dirichlet_pairs, batch_imbalanced, class_shards, random_classes, class_grid),
)
PARAMETERS = {"alpha": 0.1, "shards_per_client": 2, "classes_per_client": 2}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reference", REFERENCES, ids=lambda function: function.__name__)
def test_rows_equal_the_plain_loop(reference, case, seed):
    labels, num_clients = CASES[case]
    if reference is class_grid:
        num_clients = 100
    scheme = partition.PARTITIONS[reference.__name__]
    own = {key: PARAMETERS[key] for key in scheme.parameters}
    rows = scheme.function(labels, np.arange(len(labels)), num_clients, np.random.default_rng(seed), **own).rows
    expected = reference(labels, num_clients, np.random.default_rng(seed))
    assert [sorted(row.tolist()) for row in rows] == [sorted(row) for row in expected]


def dirichlet(labels, num_clients, alpha, rng, min_size):
    """The split of SemiFL and (FL)^2."""
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


DIRICHLET = {
    "even classes": (np.random.default_rng(0).permutation(np.arange(2000) % 10), 10, 0.3, 10),
    "uneven classes": (np.random.default_rng(1).choice(7, 1500, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.06, 0.04]), 6, 0.2, 10),
    "skewed, repeated": (np.random.default_rng(2).permutation(np.arange(3000) % 10), 20, 0.1, 10),
    "a class is missing": (np.random.default_rng(3).choice([0, 2, 5], 600), 4, 0.5, 20),
}


def rows_of(case, seed):
    labels, num_clients, alpha, min_size = DIRICHLET[case]
    rng = np.random.default_rng(seed)
    return partition.dirichlet(labels, np.arange(len(labels)), num_clients, rng, alpha=alpha, min_size=min_size).rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", DIRICHLET)
def test_the_rows_of_dirichlet_equal_the_plain_loop(case, seed):
    labels, num_clients, alpha, min_size = DIRICHLET[case]
    expected = dirichlet(labels, num_clients, alpha, np.random.default_rng(seed), min_size)
    # Which examples of a class a client gets is drawn, and not compared.
    assert [labels[row].tolist() for row in rows_of(case, seed)] == [labels[row].tolist() for row in expected]


def test_a_client_gets_no_run_of_a_class():
    """Examples are stored by scan or by source often enough: a run would make clients differ in more than their classes."""
    labels, rows = DIRICHLET["even classes"][0], rows_of("even classes", 0)
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
