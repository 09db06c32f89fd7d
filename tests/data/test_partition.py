"""The labeled set, IID and Dirichlet over clients; then every partition by name: what holds for all of them, and errors.

`tests/golden/test_partitions.py` compares their rows with plain loops.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedjax_ssl.data import partition
from fedjax_ssl.data.partition import PARTITIONS
from tests.data.common import message_of, same

SEEDS = st.integers(0, 2**32 - 1)
fast = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def requests(draw, name):
    """(labels of the whole pool, a shuffled selection of its positions, K) that the partition `name` accepts."""
    num_classes = {"batch_imbalanced": 10}.get(name) or draw(st.integers(2, 5))
    more = draw(st.lists(st.integers(0, num_classes - 1), min_size=40, max_size=90))
    labels = np.array([*range(num_classes), *more])
    indices = np.array(draw(st.lists(st.sampled_from(range(len(labels))), unique=True, min_size=30)))
    num_clients = {"class_grid": num_classes**2, "class_shards": 2 * num_classes}.get(name) or draw(st.integers(1, 12))
    num_clients += num_clients % 2 if name == "dirichlet_pairs" else 0
    return labels, indices, num_clients


def share_of(name, labels, indices, num_clients, seed=0, **parameters):
    """What the partition `name` gives to whom."""
    given = {"alpha": 0.5, "min_size": 0, "shards_per_client": 2, "classes_per_client": 2} | parameters
    given["clients"] = np.arange(len(labels)) % max(1, num_clients)
    scheme = PARTITIONS[name]
    own = {key: given[key] for key in scheme.parameters}
    return scheme.function(labels, indices, num_clients, np.random.default_rng(seed), **own)


@fast
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 20), SEEDS)
def test_balanced_labels_takes_the_same_number_of_every_class_and_leaves_the_rest(num_classes, per_class, more, seed):
    labels = np.random.default_rng(seed).permutation(
        np.concatenate([np.repeat(np.arange(num_classes), per_class), np.arange(more) % num_classes])
    )
    labeled, rest = partition.balanced_labels(labels, per_class * num_classes, num_classes, np.random.default_rng(seed))
    assert [int((labels[labeled] == c).sum()) for c in range(num_classes)] == [per_class] * num_classes
    assert sorted([*labeled, *rest]) == list(range(len(labels)))


def test_balanced_labels_follows_the_seed_and_is_uniform_within_a_class():
    labels = np.arange(400) % 2
    draw = lambda seed: partition.balanced_labels(labels, 20, 2, np.random.default_rng(seed))[0]  # noqa: E731
    assert np.array_equal(draw(3), draw(3))
    assert not np.array_equal(draw(3), draw(4))
    times_drawn = np.bincount(np.concatenate([draw(seed) for seed in range(400)]), minlength=400)
    # Binomial(400, 1/20) has mean 20 and standard deviation 4.4; its range over 400 positions stays well inside 3..45.
    assert 3 < times_drawn.min() < times_drawn.max() < 45


@pytest.mark.parametrize(
    ("num_labels", "message"),
    [
        (7, "num_labels=7 cannot be balanced over 3 classes: give a positive multiple of 3"),
        (0, "num_labels=0 cannot be balanced over 3 classes: give a positive multiple of 3"),
        (-3, "num_labels=-3 cannot be balanced"),
        (13, "num_labels=13 is more than the 12 training examples"),
        (12, "num_labels=12 needs 4 examples of every class, but class 1 has 2: give at most 6"),
    ],
)
def test_balanced_labels_says_what_is_wrong(num_labels, message):
    labels = np.array([0] * 5 + [1] * 2 + [2] * 5)
    assert message in message_of(ValueError, partition.balanced_labels, labels, num_labels, 3, np.random.default_rng(0))


def test_random_labels_is_uniform_over_examples_and_leaves_the_rest():
    draws = [partition.random_labels(np.zeros(100, int), 7, np.random.default_rng(seed)) for seed in range(300)]
    for labeled, rest in draws:
        assert len(labeled) == 7
        assert sorted([*labeled, *rest]) == list(range(100))
    times_drawn = np.bincount(np.concatenate([labeled for labeled, _ in draws]), minlength=100)
    assert 4 < times_drawn.min() < times_drawn.max() < 42  # Binomial(300, .07): mean 21, standard deviation 4.4
    for num_labels in (0, 101):
        message = message_of(ValueError, partition.random_labels, np.zeros(100, int), num_labels, np.random.default_rng(0))
        assert f"num_labels={num_labels} of 100 labeled training examples: give 1 to 100 labels" in message


@pytest.mark.parametrize(("size", "num_clients", "share"), [(49_960, 100, 499), (73_217, 100, 732), (7, 7, 1), (7, 4, 1)])
def test_iid_gives_equal_shares_and_returns_the_remainder(size, num_clients, share):
    """CIFAR-10 and SVHN with 40 labels and 100 clients: 499 and 732 examples each."""
    rows, unassigned, notes = share_of("iid", np.zeros(size, int), np.arange(size), num_clients)
    assert [len(row) for row in rows] == [share] * num_clients
    assert len(unassigned) == size - num_clients * share
    assert notes == ()


def test_iid_mixes_the_pool():
    """Sorted labels must not end up sorted by client: every client's class counts stay near N / (K C)."""
    labels = np.repeat(np.arange(4), 1000)
    histogram = partition.class_counts(share_of("iid", labels, np.arange(4000), 10).rows, labels, 4)
    assert 60 < histogram.min() <= histogram.max() < 140  # hypergeometric: mean 100, standard deviation 8


@pytest.mark.parametrize("alpha", [1e-12, 1e-3, 0.05, 10.0, 1e300])
def test_extreme_alphas_give_a_partition(alpha):
    labels = np.arange(300) % 3
    rows = share_of("dirichlet", labels, np.arange(300), 6, alpha=alpha).rows
    assert sorted(np.concatenate(rows)) == list(range(300))


class _Scripted(np.random.Generator):
    """A generator that hands out the given draws, one try after the other."""

    def __init__(self, *tries):
        super().__init__(np.random.PCG64())
        self.tries = list(tries)

    def dirichlet(self, alpha, size):
        draw = np.array(self.tries.pop(0), float)
        assert draw.shape == (size, len(alpha))
        return draw

    def permutation(self, positions):
        return positions


def test_a_try_whose_open_clients_have_no_mass_is_discarded():
    """Class 0 fills client 0, then class 1 gives all mass to client 0 again: nobody can take it, so the try is void."""
    labels = np.repeat([0, 1], 10)
    rng = _Scripted([[1.0, 0.0], [1.0, 0.0]], [[0.5, 0.5], [0.25, 0.75]])
    with np.errstate(all="raise"):  # the division by the mass that is not there
        rows = partition.dirichlet(labels, np.arange(20), 2, rng, alpha=1.0, min_size=1).rows
    # Second try: 5 + 5, then floor(2.5) = 2 and the remaining 8.
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3, 4, 10, 11], [5, 6, 7, 8, 9, *range(12, 20)]]
    assert rng.tries == []


NEVER_MET = {"alpha": 1e-3, "min_size": 20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clients": 11}, "100 examples cannot give num_clients=11 clients min_size=10 each by chance: use at most 9"),
        ({"num_clients": 11}, "lower min_size to 9"),
        ({"alpha": 0.0}, "alpha=0.0 is no Dirichlet concentration"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"min_size": -1}, "min_size=-1"),
        ({"max_tries": 0}, "max_tries=0"),
        (NEVER_MET, "no Dirichlet split of 100 examples with alpha=0.001 and num_clients=4 gave every"),
    ],
)  # fmt: skip
def test_dirichlet_says_what_is_wrong_before_anything_is_drawn(change, message):
    arguments = {"labels": np.arange(100) % 2, "indices": np.arange(100), "num_clients": 4, "alpha": 1.0} | change
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert message in message_of(ValueError, partition.dirichlet, **arguments, rng=rng)
    assert (rng.bit_generator.state == before) == (change != NEVER_MET)


def test_clients_that_fall_short_are_drawn_anew_alone_where_whole_draws_cannot_succeed():
    """500 clients at alpha .05: a whole draw succeeds with (3/4)^500."""
    labels = np.arange(50_000) % 10
    rows, unassigned, notes = share_of("dirichlet", labels, np.arange(50_000), 500, alpha=0.05, min_size=10)
    assert (len(unassigned), len(notes)) == (0, 1)
    assert "none of 200 draws gave every client min_size=10" in notes[0]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(50_000))
    histogram = partition.class_counts(rows, labels, 10)
    sizes = histogram.sum(1)
    assert sizes.min() >= 10
    # As skewed as Dir(.05) conditioned on the size: without the condition a client holds 2 classes in the median.
    assert 1 <= np.median((histogram > 0).sum(1)) <= 3
    assert same(rows, share_of("dirichlet", labels, np.arange(50_000), 500, alpha=0.05, min_size=10).rows)


def test_a_partial_redraw_has_the_law_of_whole_draws_that_succeed():
    """Sorted sizes and largest class share of 10 clients on 1,000 examples, for both ways of meeting min_size=30."""
    labels = np.arange(1000) % 4

    def statistics(max_tries):
        values, redrawn = [], 0
        for seed in range(300):
            rng = np.random.default_rng([seed, max_tries])
            rows, _, notes = partition.dirichlet(labels, np.arange(1000), 10, rng, alpha=0.3, min_size=30, max_tries=max_tries)
            histogram = partition.class_counts(rows, labels, 4)
            sizes = histogram.sum(1)
            values.append([*np.sort(sizes), 100 * (histogram.max(1) / sizes).mean()])
            redrawn += len(notes)
        return np.mean(values, 0), np.var(values, 0) / len(values), redrawn

    whole, whole_variance, never = statistics(100_000)
    partial, partial_variance, often = statistics(1)
    assert never == 0
    assert often > 240  # of 300: a first draw succeeds in one of eight
    # Within 4 standard errors and 1 example: the two laws differ a little, by the coupling that the docstring names.
    assert np.all(np.abs(whole - partial) < 4 * np.sqrt(whole_variance + partial_variance) + 1)


COVERS_ALL = set(PARTITIONS) - {"iid", "dirichlet_pairs", "random_classes", "batch_imbalanced"}


@pytest.mark.parametrize("name", PARTITIONS)
@settings(fast, max_examples=25)
@given(data=st.data(), seed=SEEDS)
def test_every_index_is_given_once_and_the_seed_and_the_set_of_indices_decide(name, data, seed):
    labels, indices, num_clients = data.draw(requests(name))
    rows, unassigned, notes = share_of(name, labels, indices, num_clients, seed)
    assert len(rows) == num_clients
    assert sorted(np.concatenate([*rows, unassigned])) == sorted(indices)
    assert all(note and "\n" not in note for note in notes)
    if name in COVERS_ALL:
        assert len(unassigned) == 0
    other = share_of(name, labels, indices[::-1], num_clients, seed)
    assert same([*rows, unassigned], [*other.rows, other.unassigned])


@pytest.mark.parametrize("name", PARTITIONS)
def test_labels_outside_of_the_indices_do_not_matter(name):
    labels, indices = np.arange(3000) % 10, np.arange(1500)
    changed = np.where(np.arange(3000) < 1500, labels, 9)
    assert same(share_of(name, changed, indices, 100).rows, share_of(name, labels, indices, 100).rows)


def test_a_class_that_nobody_drew_is_unassigned_and_noted():
    labels = np.arange(300) % 10
    _, unassigned, notes = share_of("random_classes", labels, np.arange(300), 2)
    assert len(unassigned) >= 180
    assert notes[0].startswith("no client drew class ")
    assert notes[0].endswith(f": nobody has {len(unassigned):,} examples")


def test_batch_imbalanced_counts_what_is_short():
    rows, unassigned, notes = share_of("batch_imbalanced", np.arange(50_000) % 10, np.arange(50_000), 100)
    assert 0 < len(unassigned) < 1500  # classes run out, by the chance of their counts
    assert notes[0].endswith(f"fell short by {len(unassigned):,} examples in all")
    assert all(len(row) == 500 for row in rows[:80])  # the first clients have all that they asked for


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"dirichlet", "natural"}))
@pytest.mark.parametrize("num_clients", [0, 21])
def test_more_clients_than_examples_or_none_are_refused(name, num_clients):
    with pytest.raises(ValueError, match=rf"^num_clients={num_clients} cannot share 20 examples: give 1 to 20 clients$"):
        share_of(name, np.arange(20) % 10, np.arange(20), num_clients)


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_repeated_position_is_refused(name):
    with pytest.raises(ValueError, match=r"^indices hold 1 repeated positions: give each position once$"):
        share_of(name, np.arange(20) % 10, np.array([1, 1, 2]), 1)


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
        ("dirichlet_pairs", 7, {"alpha": 1.0}, "num_clients=7 cannot be paired: give an even number of clients"),
        (
            "dirichlet_pairs",
            2,
            {"alpha": 1e-4, "classes": 1},
            "alpha=0.0001 left a client of a pair less than half of the mean",
        ),
        ("batch_imbalanced", 5, {"classes": 7}, "batch_imbalanced is defined for 10 classes, got 7: use dirichlet"),
    ],
)
def test_impossible_requests_name_the_reason(name, num_clients, parameters, message):
    labels = np.arange(200) % parameters.get("classes", 10)
    assert message in message_of(ValueError, share_of, name, labels, np.arange(200), num_clients, **parameters)
