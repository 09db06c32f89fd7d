"""In which order several are measured in turns."""

import itertools

import pytest

from benchmarks.spread import balanced, whole


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_each_has_each_place_and_comes_after_each_other_as_often(count):
    turns = [balanced(count, turn) for turn in range(whole(count))]
    times = whole(count) // count
    assert (count, times) in ((1, 1), (2, 1), (3, 2), (4, 1), (5, 2), (6, 1))
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    for places in zip(*turns, strict=True):
        assert [places.count(one) for one in range(count)] == [times] * count
    after = [pair for turn in turns for pair in itertools.pairwise(turn)]
    assert all(after.count((a, b)) == times for a in range(count) for b in range(count) if a != b)
