"""Partitions: properties that hold for any labels, clients and seed, and one clear line for what cannot be done."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_ssl.data import federated, partition

SEEDS = st.integers(0, 2**32 - 1)
fast = settings(max_examples=60, deadline=None)


@st.composite
def pools(draw, max_size=120):
    """(labels of the whole pool, a shuffled selection of its positions, C)."""
    num_classes = draw(st.integers(1, 5))
    labels = draw(st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=max_size))
    chosen = draw(st.lists(st.sampled_from(range(len(labels))), unique=True, min_size=1))
    return np.array(labels), np.array(chosen), num_classes


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


def same(rows, others):
    return len(rows) == len(others) and all(np.array_equal(a, b) for a, b in zip(rows, others, strict=True))


# --- balanced_labels ---------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError) as error:
        partition.balanced_labels(labels, num_labels, 3, np.random.default_rng(0))
    assert message in one_line(error)


# --- iid ---------------------------------------------------------------------------------------------------------------


@fast
@given(pools(), st.data(), SEEDS)
def test_iid_gives_equal_shares_without_repetition_and_returns_the_remainder(pool, data, seed):
    _, indices, _ = pool
    num_clients = data.draw(st.integers(1, len(indices)))
    rows, unassigned = partition.iid(indices, num_clients, np.random.default_rng(seed))
    assert [len(row) for row in rows] == [len(indices) // num_clients] * num_clients
    assert len(unassigned) == len(indices) % num_clients
    assert sorted(np.concatenate([*rows, unassigned])) == sorted(indices)


def test_iid_sizes_are_the_specified_ones():
    """CIFAR-10 and SVHN with 40 labels and 100 clients: 499 and 732 examples each."""
    for num_unlabeled, share in [(50_000 - 40, 499), (73_257 - 40, 732)]:
        rows, unassigned = partition.iid(np.arange(num_unlabeled), 100, np.random.default_rng(0))
        assert {len(row) for row in rows} == {share}
        assert len(unassigned) == num_unlabeled - 100 * share


def test_iid_mixes_the_pool():
    """Sorted labels must not end up sorted by client: every client's class counts stay near N / (K C)."""
    labels = np.repeat(np.arange(4), 1000)
    rows, _ = partition.iid(np.arange(4000), 10, np.random.default_rng(0))
    histogram = partition.summary(rows, labels, 4).histogram
    assert histogram.min() > 60  # hypergeometric: mean 100, standard deviation 8
    assert histogram.max() < 140


@pytest.mark.parametrize("num_clients", [0, -1, 11])
def test_iid_says_what_is_wrong(num_clients):
    with pytest.raises(ValueError) as error:
        partition.iid(np.arange(10), num_clients, np.random.default_rng(0))
    assert f"num_clients={num_clients} cannot share 10 examples: give 1 to 10 clients" in one_line(error)


# --- dirichlet ---------------------------------------------------------------------------------------------------------


@fast
@given(pools(), st.integers(1, 8), st.floats(0.01, 100.0), SEEDS)
def test_dirichlet_gives_every_example_to_exactly_one_client(pool, num_clients, alpha, seed):
    labels, indices, _ = pool
    rows = partition.dirichlet(labels, indices, num_clients, alpha, np.random.default_rng(seed), min_size=0)
    assert len(rows) == num_clients
    assert sorted(np.concatenate(rows)) == sorted(indices)


@fast
@given(pools(), st.integers(1, 4), st.floats(0.5, 100.0), SEEDS)
def test_dirichlet_keeps_the_smallest_size(pool, num_clients, alpha, seed):
    labels, indices, _ = pool
    min_size = max(1, len(indices) // (4 * num_clients))
    try:
        rows = partition.dirichlet(labels, indices, num_clients, alpha, np.random.default_rng(seed), min_size=min_size)
    except ValueError:
        return  # a pool of two examples of one class cannot always be split; the messages are tested below
    assert min(len(row) for row in rows) >= min_size


@fast
@given(pools(), st.integers(1, 6), st.floats(0.05, 10.0), SEEDS)
def test_dirichlet_depends_on_the_seed_and_the_set_of_indices_alone(pool, num_clients, alpha, seed):
    labels, indices, _ = pool
    first = partition.dirichlet(labels, indices, num_clients, alpha, np.random.default_rng(seed), min_size=0)
    orders = [indices, indices[::-1], np.array(list(set(indices.tolist()))), np.array(list(dict.fromkeys(indices.tolist())))]
    for order in orders:
        again = partition.dirichlet(labels, order, num_clients, alpha, np.random.default_rng(seed), min_size=0)
        assert same(first, again)


@fast
@given(pools(), SEEDS)
def test_iid_depends_on_the_seed_and_the_set_of_indices_alone(pool, seed):
    _, indices, _ = pool
    first, _ = partition.iid(indices, 1 + len(indices) // 3, np.random.default_rng(seed))
    again, _ = partition.iid(np.array(list(set(indices.tolist()))), 1 + len(indices) // 3, np.random.default_rng(seed))
    assert same(first, again)


def test_other_seeds_give_other_partitions():
    labels = np.arange(1000) % 10
    splits = [partition.dirichlet(labels, np.arange(1000), 5, 0.5, np.random.default_rng(seed)) for seed in range(5)]
    shares = [partition.iid(np.arange(1000), 5, np.random.default_rng(seed))[0] for seed in range(5)]
    assert not any(same(splits[0], split) for split in splits[1:])
    assert not any(same(shares[0], share) for share in shares[1:])


def test_a_client_that_holds_its_share_gets_no_further_class():
    """Two clients, 2 classes of 50: whoever got >= 50 of class 0 gets nothing of class 1 (both, where they split evenly)."""
    labels = np.repeat([0, 1], 50)
    for seed in range(200):
        rows = partition.dirichlet(labels, np.arange(100), 2, 0.05, np.random.default_rng(seed), min_size=0)
        histogram = partition.summary(rows, labels, 2).histogram
        if 50 in histogram[:, 0]:
            full = int(histogram[:, 0].argmax())
            assert histogram[full, 1] == 0


def test_small_alpha_is_skewed_and_large_alpha_is_even():
    labels = np.repeat(np.arange(10), 500)

    def largest_class_share(alpha):
        rows = partition.dirichlet(labels, np.arange(5000), 10, alpha, np.random.default_rng(0), min_size=1)
        histogram = partition.summary(rows, labels, 10).histogram
        return (histogram.max(1) / histogram.sum(1)).mean()

    assert largest_class_share(1e4) < 0.12 < 0.3 < largest_class_share(0.1)


@pytest.mark.parametrize("alpha", [1e-12, 1e-3, 1e300])
def test_extreme_alphas_give_a_partition(alpha):
    labels = np.arange(300) % 3
    rows = partition.dirichlet(labels, np.arange(300), 6, alpha, np.random.default_rng(0), min_size=0)
    assert sorted(np.concatenate(rows)) == list(range(300))


class _Scripted:
    """Stands in for a generator: hands out the given draws, one try after the other."""

    def __init__(self, *tries):
        self.tries = list(tries)

    def dirichlet(self, alpha, size):
        draw = np.array(self.tries.pop(0), float)
        assert draw.shape == (size, len(alpha))
        return draw


def test_a_try_whose_open_clients_have_no_mass_is_discarded():
    """Class 0 fills client 0, then class 1 gives all mass to client 0 again: nobody can take it, so the try is void."""
    labels = np.repeat([0, 1], 10)
    rng = _Scripted([[1.0, 0.0], [1.0, 0.0]], [[0.5, 0.5], [0.25, 0.75]])
    with np.errstate(all="raise"):  # the division by the mass that is not there
        rows = partition.dirichlet(labels, np.arange(20), 2, 1.0, rng, min_size=1)
    # Second try: 5 + 5, then floor(2.5) = 2 and the remaining 8.
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3, 4, 10, 11], [5, 6, 7, 8, 9, *range(12, 20)]]
    assert rng.tries == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_clients": 11}, "100 examples cannot give num_clients=11 clients min_size=10 each: use at most 10 clients"),
        ({"num_clients": 11}, "lower min_size to 9"),
        ({"alpha": 0.0}, "alpha=0.0 is no Dirichlet concentration"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"min_size": -1}, "min_size=-1"),
        ({"max_tries": 0}, "max_tries=0"),
        ({"indices": np.array([1, 2, 2])}, "indices hold 1 repeated positions"),
    ],
)
def test_dirichlet_says_what_is_wrong(change, message):
    arguments = {"labels": np.arange(100) % 2, "indices": np.arange(100), "num_clients": 4, "alpha": 1.0} | change
    with pytest.raises(ValueError) as error:
        partition.dirichlet(**arguments, rng=np.random.default_rng(0))
    assert message in one_line(error)


def test_tries_are_bounded_and_the_failure_names_alpha_clients_and_the_best_size():
    labels = np.arange(50_000) % 10
    with pytest.raises(ValueError) as error:
        partition.dirichlet(labels, np.arange(50_000), 500, 0.05, np.random.default_rng(0), max_tries=50)
    message = one_line(error)
    for part in ("alpha=0.05", "num_clients=500", "min_size=10", "50 tries", "best smallest client: 0", "raise alpha"):
        assert part in message


def test_impossible_sizes_fail_before_anything_is_drawn():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    with pytest.raises(ValueError, match="at most 5 clients"):
        partition.dirichlet(np.zeros(50, int), np.arange(50), 6, 0.1, rng)
    assert rng.bit_generator.state == before


# --- summary and pack --------------------------------------------------------------------------------------------------


@fast
@given(pools(), st.integers(1, 6), SEEDS)
def test_summary_counts_every_client_and_class_and_pack_keeps_the_rows(pool, num_clients, seed):
    labels, indices, num_classes = pool
    rows = partition.dirichlet(labels, indices, num_clients, 0.5, np.random.default_rng(seed), min_size=0)
    sizes, histogram = partition.summary(rows, labels, num_classes)
    assert sizes.tolist() == [len(row) for row in rows]
    assert histogram.tolist() == [[sum(labels[i] == c for i in row) for c in range(num_classes)] for row in rows]
    table = federated.pack(rows)
    assert same(rows, [table.index[k, : table.count[k]] for k in range(num_clients)])
