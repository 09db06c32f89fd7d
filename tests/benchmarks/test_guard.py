"""What the guard says of two results, by made-up turns."""

import subprocess
import sys

import pytest

from benchmarks import guard, harness


def result(*there_by_here: float) -> dict:
    return harness.spread(there_by_here, "ratio", "ratio_quartiles")


@pytest.mark.parametrize(
    ("there_by_here", "said"),
    [
        ((0.5, 0.5, 0.5, 0.5), "2.000 times as long as before (2.000 to 2.000): SLOWER"),
        ((2.0, 2.0, 2.0, 2.0), "0.500 times as long as before (0.500 to 0.500)"),
        ((0.98, 0.98, 0.98, 0.98), "1.020 times as long as before (1.020 to 1.020)"),  # within what does not count
        ((0.9, 0.9, 1.2, 1.2), "0.952 times as long as before (0.833 to 1.111)"),
        ((0.8, 0.9, 0.9, 1.3, 1.3), "1.111 times as long as before (0.769 to 1.111)"),  # turns disagree
    ],
)
def test_slower_is_what_the_turns_agree_on(there_by_here, said):
    assert guard.verdict({}, result(*there_by_here)) == said


def test_what_failed_is_said():
    assert guard.verdict({}, {"error": "no memory"}) == "failed: no memory"


@pytest.mark.slow
def test_a_commit_is_built_beside_and_removed():
    before = subprocess.check_output(["git", "worktree", "list"], cwd=harness.ROOT, text=True)
    command = [sys.executable, "-m", "benchmarks.guard", "--workloads", "fl2_cnn"]
    ended = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("fl2_cnn: ")
    assert "times as long as before" in ended.stdout
    assert subprocess.check_output(["git", "worktree", "list"], cwd=harness.ROOT, text=True) == before
