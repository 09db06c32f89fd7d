"""Partitions against slow plain-Python re-implementations, one example at a time, that see the same random draws."""

import math

import numpy as np
import pytest

from fedjax_ssl.data import partition
from fedjax_ssl.data.class_partitions import BATCH_IMBALANCED

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


REFERENCES = (class_balanced, shards, dirichlet_classes, batch_imbalanced, class_shards, random_classes, class_grid)
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


def test_fedmatch_class_vectors_are_the_specified_ones():
    """Peak .50, neighbors .15, one .02, the rest .03; client 3's written out."""
    for kind in range(10):
        vector = np.roll(BATCH_IMBALANCED, kind)
        assert vector.sum() == pytest.approx(1.0)
        assert sorted(vector) == pytest.approx([0.02, *[0.03] * 6, 0.15, 0.15, 0.5])
        assert vector[kind] == 0.5
    assert np.roll(BATCH_IMBALANCED, 3).tolist() == [0.03, 0.03, 0.15, 0.5, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03]
