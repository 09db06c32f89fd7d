"""The labeled set, IID and Dirichlet over clients: what `test_partition_schemes` does not ask of every partition."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_ssl.data import federated, partition
from tests.data.common import message_of

SEEDS = st.integers(0, 2**32 - 1)
fast = settings(max_examples=60, deadline=None)


@st.composite
def pools(draw, max_size=120):
    """(labels of the whole pool, a shuffled selection of its positions, C)."""
    num_classes = draw(st.integers(1, 5))
    labels = draw(st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=max_size))
    chosen = draw(st.lists(st.sampled_from(range(len(labels))), unique=True, min_size=1))
    return np.array(labels), np.array(chosen), num_classes


def iid(indices, num_clients, seed):
    """(rows, unassigned); the labels play no part."""
    rows, unassigned, notes = partition.iid(np.zeros(1, int), indices, num_clients, np.random.default_rng(seed))
    assert notes == ()
    return rows, unassigned


def dirichlet(labels, indices, num_clients, alpha, rng, **options):
    """The rows; nothing is ever left over."""
    rng = np.random.default_rng(rng) if isinstance(rng, int) else rng
    rows, unassigned, _ = partition.dirichlet(labels, indices, num_clients, rng, alpha=alpha, **options)
    assert len(unassigned) == 0
    return rows


def same(rows, others):
    return len(rows) == len(others) and all(np.array_equal(a, b) for a, b in zip(rows, others, strict=True))


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
    draws = [partition.random_labels(100, 7, np.random.default_rng(seed)) for seed in range(300)]
    for labeled, rest in draws:
        assert len(labeled) == 7
        assert sorted([*labeled, *rest]) == list(range(100))
    times_drawn = np.bincount(np.concatenate([labeled for labeled, _ in draws]), minlength=100)
    assert 4 < times_drawn.min() < times_drawn.max() < 42  # Binomial(300, .07): mean 21, standard deviation 4.4
    for num_labels in (0, 101):
        message = message_of(ValueError, partition.random_labels, 100, num_labels, np.random.default_rng(0))
        assert f"num_labels={num_labels} of 100 training examples: give 1 to 100 labels" in message


@pytest.mark.parametrize(
    ("size", "num_clients", "share"), [(50_000 - 40, 100, 499), (73_257 - 40, 100, 732), (7, 7, 1), (7, 4, 1)]
)
def test_iid_gives_equal_shares_and_returns_the_remainder(size, num_clients, share):
    """CIFAR-10 and SVHN with 40 labels and 100 clients: 499 and 732 examples each."""
    rows, unassigned = iid(np.arange(size), num_clients, 0)
    assert [len(row) for row in rows] == [share] * num_clients
    assert len(unassigned) == size - num_clients * share


def test_iid_mixes_the_pool():
    """Sorted labels must not end up sorted by client: every client's class counts stay near N / (K C)."""
    labels = np.repeat(np.arange(4), 1000)
    rows, _ = iid(np.arange(4000), 10, 0)
    histogram = partition.class_counts(rows, labels, 4)
    assert histogram.min() > 60  # hypergeometric: mean 100, standard deviation 8
    assert histogram.max() < 140


@pytest.mark.parametrize("alpha", [1e-12, 1e-3, 0.05, 10.0, 1e300])
def test_extreme_alphas_give_a_partition(alpha):
    labels = np.arange(300) % 3
    rows = dirichlet(labels, np.arange(300), 6, alpha, 0, min_size=0)
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
        rows = dirichlet(labels, np.arange(20), 2, 1.0, rng, min_size=1)
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
        ({"indices": np.array([1, 2, 2])}, "indices hold 1 repeated positions"),
    ],
)  # fmt: skip
def test_dirichlet_says_what_is_wrong_before_anything_is_drawn(change, message):
    arguments = {"labels": np.arange(100) % 2, "indices": np.arange(100), "num_clients": 4, "alpha": 1.0} | change
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert message in message_of(ValueError, dirichlet, **arguments, rng=rng)
    assert (rng.bit_generator.state == before) == (change != NEVER_MET)


def test_clients_that_fall_short_are_drawn_anew_alone_where_whole_draws_cannot_succeed():
    """500 clients at alpha .05: a whole draw succeeds with (3/4)^500. Under 5 s is asked for; it takes about 1."""
    labels = np.arange(50_000) % 10
    start = time.process_time()
    rng = np.random.default_rng(0)
    rows, unassigned, notes = partition.dirichlet(labels, np.arange(50_000), 500, rng, alpha=0.05)
    assert time.process_time() - start < 5
    assert len(unassigned) == 0
    assert len(notes) == 1
    assert "none of 200 draws gave every client min_size=10" in notes[0]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(50_000))
    histogram = partition.class_counts(rows, labels, 10)
    sizes = histogram.sum(1)
    assert sizes.min() >= 10
    # As skewed as Dir(.05) conditioned on the size: without the condition a client holds 2 classes in the median.
    assert 1 <= np.median((histogram > 0).sum(1)) <= 3
    again = partition.dirichlet(labels, np.arange(50_000), 500, np.random.default_rng(0), alpha=0.05)
    assert same(rows, again.rows)


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


@fast
@given(pools(), st.integers(1, 6), SEEDS)
def test_counts_are_of_every_client_and_class_and_pack_keeps_the_rows(pool, num_clients, seed):
    labels, indices, num_classes = pool
    rows = dirichlet(labels, indices, num_clients, 0.5, seed, min_size=0)
    histogram = partition.class_counts(rows, labels, num_classes)
    sizes = histogram.sum(1)
    assert sizes.tolist() == [len(row) for row in rows]
    assert histogram.tolist() == [[sum(labels[i] == c for i in row) for c in range(num_classes)] for row in rows]
    table = federated.pack(rows)
    assert same(rows, [table.index[k, : table.count[k]] for k in range(num_clients)])
