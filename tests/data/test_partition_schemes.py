"""Every partition by name: what holds for all of them, the papers' numbers, and errors.

`tests/golden/test_partitions.py` compares their rows with plain loops.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_ssl.data import partition
from tests.data.common import message_of

SEEDS = st.integers(0, 2**32 - 1)
fast = settings(max_examples=25, deadline=None)
COVERS_ALL = set(partition.PARTITIONS) - {"iid", "random_classes", "batch_imbalanced"}


def share(name, labels, indices, num_clients, seed=0, **parameters):
    given = {"alpha": 0.5, "min_size": 0, "shards_per_client": 2, "classes_per_client": 2} | parameters
    scheme = partition.PARTITIONS[name]
    own = {key: given[key] for key in scheme.parameters}
    return scheme.function(labels, indices, num_clients, np.random.default_rng(seed), **own)


@st.composite
def requests(draw, name):
    """(labels of the whole pool, a shuffled selection of its positions, K) that the partition `name` accepts."""
    num_classes = {"batch_imbalanced": 10}.get(name) or draw(st.integers(2, 5))
    more = draw(st.lists(st.integers(0, num_classes - 1), min_size=40, max_size=90))
    labels = np.array([*range(num_classes), *more])
    indices = np.array(draw(st.lists(st.sampled_from(range(len(labels))), unique=True, min_size=30)))
    num_clients = {"class_grid": num_classes**2, "class_shards": 2 * num_classes}.get(name) or draw(st.integers(1, 12))
    return labels, indices, num_clients


def same(rows, others):
    return len(rows) == len(others) and all(np.array_equal(a, b) for a, b in zip(rows, others, strict=True))


@pytest.mark.parametrize("name", partition.PARTITIONS)
@fast
@given(data=st.data(), seed=SEEDS)
def test_every_index_is_given_once_and_the_seed_and_the_set_of_indices_decide(name, data, seed):
    labels, indices, num_clients = data.draw(requests(name))
    rows, unassigned, notes = share(name, labels, indices, num_clients, seed)
    assert len(rows) == num_clients
    assert sorted(np.concatenate([*rows, unassigned])) == sorted(indices)
    assert all(note and "\n" not in note for note in notes)
    if name in COVERS_ALL:
        assert len(unassigned) == 0
    other = share(name, labels, indices[::-1], num_clients, seed)
    assert same([*rows, unassigned], [*other.rows, other.unassigned])


@pytest.mark.parametrize("name", partition.PARTITIONS)
def test_another_seed_gives_another_partition_and_labels_outside_of_the_indices_the_same(name):
    labels, indices = np.arange(3000) % 10, np.arange(1500)
    first, *others = ([np.sort(row) for row in share(name, labels, indices, 100, seed).rows] for seed in range(4))
    assert not any(same(first, other) for other in others)
    changed = np.where(np.arange(3000) < 1500, labels, 9)
    assert same(share(name, changed, indices, 100).rows, share(name, labels, indices, 100).rows)


@pytest.mark.parametrize("name", sorted(set(partition.PARTITIONS) - {"class_grid"}))
def test_within_a_class_examples_are_drawn_at_random(name):
    """No client gets a run of a class's examples."""
    labels = np.arange(2000) % 10
    parts = [np.sort(row[labels[row] == c]) for row in share(name, labels, np.arange(2000), 20).rows for c in range(10)]
    runs = [np.ptp(part) == 10 * (len(part) - 1) for part in parts if 4 < len(part) < 200]  # all of a class are a run
    assert runs
    assert not any(runs)


def histogram(rows, labels):
    return partition.class_counts(rows, labels, int(labels.max()) + 1)


def test_class_balanced_gives_exact_shares_and_seven_or_eight_of_750():
    """FedDure: 5 of each class for 500 per class; 7 or 8 of each, 75 in all, for 750 per class."""
    for per_class, accepted in ((500, {5}), (750, {7, 8})):
        labels = np.repeat(np.arange(10), per_class)
        counts = histogram(share("class_balanced", labels, np.arange(len(labels)), 100).rows, labels)
        assert set(counts.ravel().tolist()) == accepted
        assert set(counts.sum(1).tolist()) == {per_class // 10}


def test_class_balanced_spreads_the_remainders_at_random():
    """Which clients get the eighth example of class 2 says nothing about class 4: no fixed rotation."""
    labels = np.repeat(np.arange(10), 750)
    more = histogram(share("class_balanced", labels, np.arange(7500), 100).rows, labels) == 8
    assert 10 < (more[:, 2] & more[:, 4]).sum() < 40  # 25 expected, 50 or 0 under rotation


def test_shards_of_sorted_labels_hold_two_classes_each():
    labels = np.random.default_rng(0).permutation(np.arange(50_000) % 10)
    counts = histogram(share("shards", labels, np.arange(50_000), 100).rows, labels)
    assert set(counts.sum(1).tolist()) == {500}
    assert set((counts > 0).sum(1).tolist()) == {1, 2}  # shards of 250 lie within a class of 5,000


def test_random_classes_are_distinct_and_uniform():
    labels = np.arange(50_000) % 10
    counts = histogram(share("random_classes", labels, np.arange(50_000), 100).rows, labels)
    assert set((counts > 0).sum(1).tolist()) == {2}
    pairs = np.zeros((10, 10))
    for seed in range(30):
        held = histogram(share("random_classes", labels, np.arange(50_000), 100, seed).rows, labels) > 0
        pairs += held.astype(int).T @ held
    off_diagonal = pairs[~np.eye(10, dtype=bool)]
    assert 35 < off_diagonal.min() < off_diagonal.max() < 105  # 3,000 draws of 45 pairs: 67 each, standard deviation 8


def test_a_class_that_nobody_drew_is_unassigned_and_noted():
    labels = np.arange(300) % 10
    rows, unassigned, notes = share("random_classes", labels, np.arange(300), 2)
    assert len(np.concatenate(rows)) + len(unassigned) == 300
    assert len(unassigned) >= 180
    assert notes[0].startswith("no client drew class ")
    assert notes[0].endswith(f": {len(unassigned)} examples go to no client")


def test_batch_imbalanced_follows_the_client_types_and_counts_what_is_short():
    labels = np.arange(50_000) % 10
    rows, unassigned, notes = share("batch_imbalanced", labels, np.arange(50_000), 100)
    counts = histogram(rows, labels)
    for kind in range(10):
        mean = counts[kind::10].mean(0) / 500
        assert np.argsort(mean)[-1] == kind
        assert {int(c) for c in np.argsort(mean)[-3:-1]} == {(kind - 1) % 10, (kind + 1) % 10}
    short = 50_000 - counts.sum()
    assert 0 < short < 1500  # classes run out, by the chance of their counts
    assert len(unassigned) == short
    assert notes[0].endswith(f"short of {short} examples in all")
    assert (counts.sum(1)[:80] == 500).all()  # the first clients have all that they asked for


def test_dirichlet_classes_is_skewed_by_alpha_with_sizes_near_even():
    """C = 10, K = 100, alpha .1: simulated sizes are 365 to 767."""
    labels = np.arange(50_000) % 10
    smallest, largest, top = [], [], []
    for seed in range(10):
        counts = histogram(share("dirichlet_classes", labels, np.arange(50_000), 100, seed, alpha=0.1).rows, labels)
        smallest.append(counts.sum(1).min())
        largest.append(counts.sum(1).max())
        top.append((counts.max(1) / counts.sum(1)).mean())
    assert 250 < np.mean(smallest) < 420
    assert 650 < np.mean(largest) < 950
    assert np.mean(top) > 0.6


@pytest.mark.parametrize("name", sorted(set(partition.PARTITIONS) - {"dirichlet"}))
@pytest.mark.parametrize("num_clients", [0, 21])
def test_more_clients_than_examples_or_none_are_refused(name, num_clients):
    with pytest.raises(ValueError, match=rf"^num_clients={num_clients} cannot share 20 examples: give 1 to 20 clients$"):
        share(name, np.arange(20) % 10, np.arange(20), num_clients)


@pytest.mark.parametrize("name", partition.PARTITIONS)
def test_a_repeated_position_is_refused(name):
    with pytest.raises(ValueError, match=r"^indices hold 1 repeated positions: give each position once$"):
        share(name, np.arange(20) % 10, np.array([1, 1, 2]), 1)


@pytest.mark.parametrize(
    ("name", "num_clients", "parameters", "message"),
    [
        ("shards", 10, {"shards_per_client": 30}, "shards_per_client=30 with num_clients=10 cannot cut 200 examples: give 1"),
        ("shards", 10, {"shards_per_client": 0}, "shards_per_client=0 with num_clients=10 cannot cut 200 examples"),
        ("class_shards", 4, {"classes_per_client": 2}, "makes 8 shards, which is no multiple of the 10 classes"),
        ("class_shards", 10, {"classes_per_client": 11}, "classes_per_client=11: give 1 to 10, the number of classes"),
        ("random_classes", 10, {"classes_per_client": 0}, "classes_per_client=0: give 1 to 10, the number of classes"),
        ("class_grid", 99, {}, "num_clients=99 does not make a grid of 10 x 10 classes: give 100 clients"),
        ("dirichlet_classes", 10, {"alpha": 0.0}, "alpha=0.0 is no Dirichlet concentration"),
        ("dirichlet_classes", 2, {"alpha": 1e-6}, "alpha=1e-06 with num_clients=2 left no client any share of class"),
        ("batch_imbalanced", 5, {"classes": 7}, "batch_imbalanced is defined for 10 classes, got 7: use dirichlet"),
    ],
)
def test_impossible_requests_name_the_reason(name, num_clients, parameters, message):
    labels = np.arange(200) % parameters.get("classes", 10)
    assert message in message_of(ValueError, share, name, labels, np.arange(200), num_clients, **parameters)
