"""Client states on disk: a checkpoint has the rows that changed, and gives back what was saved; power cuts: test_power."""

import errno
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.experiment import sizes
from fedjax_ssl.experiment.build import build
from fedjax_ssl.runs import increments
from fedjax_ssl.runs.checkpoint import Checkpoints
from fedjax_ssl.simulation import client_states
from tests import disk, tiny
from tests.runs.test_checkpoint import assert_same, state_of
from tests.runs.test_checkpoint_damage import flip

CLIENTS = 50
pytestmark = pytest.mark.reliability


def on_disk():
    """A state whose clients are in a file, as they are before round 1."""

    def rows(start, number):
        ids = start + jnp.arange(number)
        return {"momentum": jnp.zeros((number, 3)), "counts": 10 * ids.astype(jnp.int32), "seen": ids[:, None] % 2 == 0}

    shapes = jax.eval_shape(lambda: rows(0, CLIENTS))
    return {"server": jnp.zeros(2), "clients": client_states.initial(rows, shapes, on_disk=True)}


def assign(state, ids, values):
    """The state after a round of a few clients."""
    clients, drawn = state["clients"], np.random.default_rng(values)
    clients["momentum"][ids] = drawn.standard_normal((len(ids), 3)).astype(np.float32)
    clients["counts"][ids] += 1
    clients["seen"][ids] = drawn.integers(2, size=(len(ids), 1)).astype(bool)
    return state | {"server": jnp.full(2, float(values))}


def in_memory(state):
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, state)


def restored(folder, begin=on_disk):
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.restore(begin())
    return found and (found[0], in_memory(found[1]))


def test_states_before_round_1_come_in_chunks_and_are_those_of_all_at_once(monkeypatch):
    monkeypatch.setattr(client_states, "CHUNK", 64)
    state = on_disk()
    assert isinstance(state["clients"]["counts"], client_states.OnDisk)
    assert not state["clients"]["momentum"].any()
    assert state["clients"]["counts"].tolist() == [10 * k for k in range(CLIENTS)]
    assert state["clients"]["seen"].ravel().tolist() == [k % 2 == 0 for k in range(CLIENTS)]
    assert not state["clients"]["counts"].changed.any()


@pytest.mark.parametrize("links", [True, False])
def test_each_of_many_checkpoints_gives_back_what_was_saved_in_few_files_of_few_bytes(tmp_path, monkeypatch, links):
    if not links:  # as on a file system that has none
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    monkeypatch.setattr(increments, "BLOCK", 100)
    chance = random.Random(0)
    for first in range(1, 41, 10):
        with Checkpoints(tmp_path) as checkpoints:  # as after a resume
            _, state = checkpoints.restore(on_disk()) or (0, on_disk())
            for round in range(first, first + 10):
                if round % 7:  # else nobody took part
                    state = assign(state, chance.sample(range(CLIENTS), 3), round)
                checkpoints.save(round, state)
                checkpoints.wait()
                assert not state["clients"]["counts"].changed.any()
                files = list((tmp_path / "checkpoints" / str(round) / "rows").iterdir())
                assert len(files) <= 6
                assert sum(file.stat().st_size for file in files) <= 2 * CLIENTS * (8 + 12 + 4 + 1)
        assert_same(restored(tmp_path), (round, in_memory(state)))
    assert (files[0].stat().st_nlink > 1) == (links and len(files) > 1)


def test_after_a_save_that_failed_the_next_one_has_its_rows(tmp_path):
    state = assign(on_disk(), [1, 2], 1)
    with Checkpoints(tmp_path) as checkpoints:
        with disk.failing(tmp_path, 3):
            checkpoints.save(1, state)
            with pytest.raises(OSError, match="Input/output error"):
                checkpoints.wait()
        state = assign(state, [3], 2)
        checkpoints.save(2, state)
    assert_same(restored(tmp_path), (2, in_memory(state)))


@pytest.mark.parametrize("harm", [flip, os.unlink, lambda path: os.truncate(path, 30)], ids=["a bit", "gone", "cut"])
def test_a_checkpoint_whose_rows_are_damaged_is_skipped_and_assigns_nothing(tmp_path, harm):
    state = assign(on_disk(), range(20), 1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        before = in_memory(state)
        checkpoints.save(2, assign(state, [7], 2))
    harm(tmp_path / "checkpoints" / "2" / "rows" / "2")
    assert_same(restored(tmp_path), (1, before))


def test_a_state_that_is_not_on_disk_is_another_experiments(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, assign(on_disk(), [1], 1))
    with pytest.raises(ValueError, match=r"'counts'\] is int32\[50\] on disk there and int32\[50\] here"):
        Checkpoints(tmp_path).restore(in_memory(on_disk()))


def test_states_that_do_not_fit_on_the_disk_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 0, 1))
    config = tiny.config("fixmatch", labels_at="clients", execution__data="disk")
    with pytest.raises(
        ValueError, match=r"data.num_clients: got \d+, clients' states of .* GB .*; TMPDIR names another folder"
    ):
        build(config)


def test_there_is_room_in_the_file_before_round_1(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        on_disk()


def test_the_states_of_other_checkpoints_are_as_before(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1))
    assert not (tmp_path / "checkpoints" / "1" / "rows").exists()
