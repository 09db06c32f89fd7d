"""Two processes of two devices compute what one process of four does: to 1e-6 a round, for every method."""

import pickle

import numpy as np
import pytest

from tests import engine, hosts, tiny

pytestmark = pytest.mark.reliability

ALL = ["-".join(case) for case in tiny.CASES]


@pytest.mark.slow
def test_two_processes_of_two_devices_equal_one_of_four(tmp_path):
    port, file = str(hosts.free_port()), tmp_path / "found"
    jobs = hosts.started([["tests.hosts", str(process), port, str(file), *ALL] for process in range(2)], devices=2)
    assert [one.status for one in hosts.ended(jobs, timeout=3600)] == [0, 0]
    found = pickle.loads(file.read_bytes())
    first = found.pop("first")
    assert np.signbit(first["zeros"]).tolist() == [False, True]
    assert (first["key"].tolist(), first["flag"]) == ([0, 0], True)
    for case in ALL:
        for (row, state), (other, got) in zip(hosts.rounds(case.split("-")), found[case], strict=True):
            assert row.keys() == other.keys()
            assert other == pytest.approx(row, rel=1e-6, abs=1e-6), case
            for tree, both in zip(state, got, strict=True):
                assert engine.distance(tree, both) < 1e-6, case
