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
def test_labels_outside_of_the_indices_do_not_matter(name):
    labels, indices = np.arange(3000) % 10, np.arange(1500)
    changed = np.where(np.arange(3000) < 1500, labels, 9)
    assert same(share(name, changed, indices, 100).rows, share(name, labels, indices, 100).rows)


def test_a_class_that_nobody_drew_is_unassigned_and_noted():
    labels = np.arange(300) % 10
    rows, unassigned, notes = share("random_classes", labels, np.arange(300), 2)
    assert len(np.concatenate(rows)) + len(unassigned) == 300
    assert len(unassigned) >= 180
    assert notes[0].startswith("no client drew class ")
    assert notes[0].endswith(f": {len(unassigned)} examples go to no client")


def test_batch_imbalanced_counts_what_is_short():
    rows, unassigned, notes = share("batch_imbalanced", np.arange(50_000) % 10, np.arange(50_000), 100)
    assert 0 < len(unassigned) < 1500  # classes run out, by the chance of their counts
    assert notes[0].endswith(f"short of {len(unassigned)} examples in all")
    assert all(len(row) == 500 for row in rows[:80])  # the first clients have all that they asked for


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
