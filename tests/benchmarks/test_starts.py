"""The benchmark of starts: the first has an empty cache, later ones have its programs."""

import subprocess

import pytest

from benchmarks import starts


@pytest.mark.slow
def test_a_real_start_and_one_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(starts, "ROUNDS", 2)
    monkeypatch.setattr(starts, "LATER", 1)
    one = starts.measure(2)
    assert [row[0] for row in starts.rows(one)] == ["2 seeds, first", "2 seeds, later"]
    assert one["first"]["wall_s"] > one["first"]["start_s"] > one["first"]["compile_s"] > one["later"][0]["compile_s"] > 0
    monkeypatch.setattr(starts, "CONFIG", "configs/digits.py:no_such_method")
    with pytest.raises(subprocess.CalledProcessError):
        starts.start(tmp_path, tmp_path / "cache", 1)
