"""Shuffled epochs and sweeps: every example once per epoch, in batches of fixed shape."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.data import batching


def real(batch: batching.Batch) -> list[list[int]]:
    """The real entries of many batches [S, B]."""
    return [positions[mask].tolist() for positions, mask in zip(*map(np.asarray, batch[:2]), strict=True)]


def batches(schedule: batching.Schedule) -> list[list[int]]:
    return real(jax.vmap(schedule.take)(jnp.arange(int(schedule.steps))))


def selection(count: int, size: int = 11) -> jax.Array:
    mask = np.zeros(size, bool)
    mask[np.random.default_rng(0).permutation(size)[:count]] = True
    return jnp.asarray(mask)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_every_epoch_goes_through_every_selected_example_once(count):
    mask = selection(count)
    got = batches(batching.shuffled(jax.random.key(0), mask, 4, epochs=3))
    per_epoch = -(-count // 4)
    assert len(got) == 3 * per_epoch
    epochs = [[i for batch in got[e * per_epoch : (e + 1) * per_epoch] for i in batch] for e in range(3)]
    assert all(sorted(epoch) == np.flatnonzero(mask).tolist() for epoch in epochs)
    assert all(len(batch) == 4 for batch in got[: per_epoch - 1])
    if count == 9:  # shuffled anew
        assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 7}])
def test_the_order_does_not_depend_on_the_largest_client(length):
    narrow, wide = (batching.shuffled(jax.random.key(1), jnp.arange(width) < 5, 2, **length) for width in (5, 9))
    np.testing.assert_array_equal(narrow.positions[:, :5], wide.positions[:, :5])
    assert narrow.steps == wide.steps


def test_a_number_of_steps_wraps_into_new_epochs_and_a_batch_knows_its_step_and_epoch():
    schedule = batching.shuffled(jax.random.key(1), jnp.ones(5, bool), 2, steps=7)
    got, taken = batches(schedule), [schedule.take(jnp.int32(s)) for s in range(7)]
    assert [len(batch) for batch in got] == [2, 2, 1, 2, 2, 1, 2]
    assert sorted(got[0] + got[1] + got[2]) == [0, 1, 2, 3, 4]
    assert [(int(b.step), int(b.epoch)) for b in taken] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)]
    assert batching.num_epochs(schedule) == 3


def test_nothing_selected_takes_no_step():
    for budget in ({"epochs": 2}, {"steps": 3}):
        schedule = batching.shuffled(jax.random.key(0), jnp.zeros(5, bool), 2, **budget)
        assert schedule.steps == batching.num_epochs(schedule) == 0
    assert not batching.stream(jax.random.key(0), jnp.zeros(5, bool), 2, 3).mask.any()


@pytest.mark.parametrize(("left_out", "batch_size"), [([2, 6], 2), ([2, 6], 3), ([2, 6], 7), ([2, 6], 20), ([], 9)])
def test_a_stream_of_full_batches_goes_through_shuffled_epochs(left_out, batch_size):
    mask = np.ones(9, bool)
    mask[left_out] = False
    batch = batching.stream(jax.random.key(0), jnp.asarray(mask), batch_size, 14)
    assert batch.positions.shape == batch.mask.shape == (14, batch_size)
    assert batch.mask.all()
    drawn, size = np.ravel(batch.positions), 9 - len(left_out)
    epochs = [drawn[start : start + size].tolist() for start in range(0, 14 * batch_size, size)]
    assert all(sorted(epoch) == np.flatnonzero(mask).tolist() for epoch in epochs if len(epoch) == size)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    if not left_out:  # a whole pool: no order a second time
        assert len({tuple(epoch) for epoch in epochs}) == 14


@pytest.mark.parametrize("budget", [{}, {"epochs": 1, "steps": 1}])
def test_epochs_and_steps_exclude_each_other(budget):
    with pytest.raises(ValueError, match="exactly one"):
        batching.shuffled(jax.random.key(0), jnp.ones(5, bool), 2, **budget)


def test_a_sweep_covers_the_examples_in_order():
    seen = []
    for s in range(3):
        batch = batching.in_order(jnp.int32(s), jnp.int32(7), 9, 3)
        assert batch.positions.max() <= 8
        seen += np.asarray(batch.positions)[np.asarray(batch.mask)].tolist()
    assert seen == list(range(7))


PAIRS = [  # labeled and unlabeled examples, batch sizes, budget; sizes of the labeled and of the unlabeled batches
    (9, 8, (4, 3), {"epochs": 2}, [4, 4, 1] * 2, [3, 3, 2] * 2),  # labeled examples count the epochs
    (1, 5, (4, 3), {"epochs": 3}, [1, 1, 1], [3, 2, 3]),
    (10, 2, (1, 3), {"epochs": 2}, [1] * 20, [2] * 20),
    (0, 7, (4, 3), {"epochs": 2}, [0] * 6, [3, 3, 1] * 2),  # unlabeled examples count them
    (5, 0, (4, 3), {"epochs": 2}, [4, 1] * 2, [0] * 4),
    (0, 0, (4, 3), {"epochs": 2}, [], []),
    (0, 0, (4, 3), {"steps": 3}, [], []),
    (9, 8, (4, 3), {"steps": 5}, [4, 4, 1, 4, 4], [3, 3, 2, 3, 3]),
    (0, 8, (4, 3), {"steps": 5}, [0] * 5, [3, 3, 2, 3, 3]),
    (9, 0, (4, 3), {"steps": 5}, [4, 4, 1, 4, 4], [0] * 5),
    (5, 8, (4, 3), {"epochs": 2, "larger_counts": True}, [4, 1] * 3, [3, 3, 2] * 2),  # the set of more batches counts them
    (9, 2, (4, 3), {"epochs": 2, "larger_counts": True}, [4, 4, 1] * 2, [2] * 6),
    (1, 8, (1, 1), {"epochs": 3, "larger_counts": True}, [1] * 24, [1] * 24),
    (0, 7, (4, 3), {"epochs": 2, "larger_counts": True}, [0] * 6, [3, 3, 1] * 2),
    (7, 0, (4, 3), {"epochs": 2, "larger_counts": True}, [4, 3] * 2, [0] * 4),
    (0, 0, (4, 3), {"epochs": 2, "larger_counts": True}, [], []),
    (9, 8, (4, 3), {"steps": 5, "larger_counts": True}, [4, 4, 1, 4, 4], [3, 3, 2, 3, 3]),
]


@pytest.mark.parametrize(("labeled", "unlabeled", "sizes", "budget", "first", "second"), PAIRS)
def test_pairs_go_through_epochs_of_both_sets(labeled, unlabeled, sizes, budget, first, second):
    masks = jnp.arange(10) < labeled, jnp.arange(8) < unlabeled  # in tables with room for more
    schedule = batching.paired(jax.random.key(0), masks, sizes, **budget)
    got = jax.vmap(schedule.take)(jnp.arange(int(schedule.steps)))
    assert got.real == got.labeled.mask.sum() + got.unlabeled.mask.sum()
    for number, (expected, count) in enumerate(((first, labeled), (second, unlabeled))):
        drawn = real(got[number])
        assert [len(batch) for batch in drawn] == expected
        flat = [i for batch in drawn for i in batch]
        epochs = [flat[start : start + count] for start in range(0, len(flat), count)] if count else []
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs if len(epoch) == count)
        assert count < 7 or len({tuple(epoch) for epoch in epochs}) == len(epochs)  # shuffled anew


def test_a_client_may_use_fewer_entries_of_an_unlabeled_batch():
    """The batches are those of its own size, in shapes of a larger one; without labels its own size counts the epochs."""
    masks = jnp.ones(7, bool), jnp.ones(10, bool)
    own = batching.paired(jax.random.key(0), masks, (3, 4), epochs=3)
    shared = batching.paired(jax.random.key(0), masks, (3, 9), epochs=3, entries=jnp.int32(4))
    assert own.steps == shared.steps == 9
    one, other = (jax.vmap(schedule.take)(jnp.arange(9)) for schedule in (own, shared))
    assert other.unlabeled.positions.shape == (9, 9)
    np.testing.assert_array_equal(other.labeled.positions, one.labeled.positions)
    drawn = real(other.unlabeled)
    assert drawn == real(one.unlabeled)
    assert [len(batch) for batch in drawn] == [4, 4, 2] * 3
    assert sorted(i for batch in drawn[3:6] for i in batch) == list(range(10))
    alone = batching.paired(jax.random.key(0), (jnp.zeros(7, bool), masks[1]), (3, 9), epochs=3, entries=jnp.int32(4))
    assert alone.steps == 9


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_draws_are_batches_of_different_examples_each_drawn_anew(count):
    mask = selection(count)
    got = batches(batching.draws(jax.random.key(0), mask, 4, 20))
    assert len(got) == (20 if count else 0)
    for batch in got:
        assert len(batch) == len(set(batch)) == min(count, 4)
        assert set(batch) <= set(np.flatnonzero(mask).tolist())
    if count == 9:  # not epochs: an example of one batch may be in the next, and each comes about equally often
        assert any(set(a) & set(b) for a, b in itertools.pairwise(got))
        times = np.bincount(np.concatenate(got), minlength=11)[mask]
        assert 2 <= times.min() <= times.max() <= 17
