"""In which order several are measured in turns."""

import itertools

import pytest

from benchmarks.spread import balanced


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_each_has_each_place_and_comes_after_each_other_as_often(count):
    turns = [balanced(count, turn) for turn in range(2 * count)]
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    for places in zip(*turns, strict=True):
        assert [places.count(one) for one in range(count)] == [2] * count
    after = [pair for turn in turns for pair in itertools.pairwise(turn)]
    assert all(after.count((a, b)) == 2 for a in range(count) for b in range(count) if a != b)
