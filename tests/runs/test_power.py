"""Kills, power cuts, I/O errors at any moment: the next start has the newest whole state, and ends with the same bits."""

import contextlib
import errno
import os
import pathlib
import random
import shutil
from functools import partial

import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.runs.checkpoint import Checkpoints
from fedjax_ssl.runs.clients import ClientsLog
from fedjax_ssl.runs.folder import folders, open_workdir
from fedjax_ssl.runs.run import Stop, run
from tests import disk, tiny
from tests.commands import rows
from tests.runs.test_checkpoint import assert_same, state_of
from tests.runs.test_increments import assign, in_memory, on_disk, restored
from tests.runs.test_resume import assert_same_checkpoint

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]
ci, slow = pytest.mark.ci, pytest.mark.slow


def copy_if_there(source: str, target: str) -> None:
    """Copies a file. TensorStore, whose calls are not seen, may have renamed one of a checkpoint that is being written."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


class Images:
    """What is left at each `every`-th moment, in folders.

    By power cuts: nothing that is not synced, and what chance will have; by a kill: all that is written.
    """

    def __init__(self, folder: pathlib.Path, every: int = 1):
        self.left: list[tuple[pathlib.Path, int]] = []
        self.promised = 0  # what is said to be on disk by now
        self._folder, self._every, self._moments, self._chance = folder, every, 0, random.Random(every)

    def __call__(self, of: disk.Disk) -> None:
        self._moments += 1
        if self._moments % self._every:
            return
        for leave in (
            of.after_a_power_cut,
            partial(of.after_a_power_cut, chance=self._chance),
            partial(shutil.copytree, of.root, copy_function=copy_if_there),
        ):
            self.left.append((self._folder / str(len(self.left)), self.promised))
            leave(self.left[-1][0])


# A kind of state: as it is before round 1, and, from the one before a round, as it is after it.
KINDS = {
    "in memory": (lambda: state_of(0), lambda state, round: state_of(round)),
    "on disk": (on_disk, lambda state, round: assign(state, [round, 2 * round], round)),
}
kinds = pytest.mark.parametrize("kind", ["in memory", pytest.param("on disk", marks=slow)])


def saved(root, kind, *rounds):
    """Saves rounds after what is in the folder; yields each with a copy of its state once that is on disk."""
    begin, after = KINDS[kind]
    with Checkpoints(root) as checkpoints:
        _, state = checkpoints.restore(begin()) or (0, begin())
        for round in rounds:
            state = after(state, round)
            checkpoints.save(round, state)
            checkpoints.wait()
            yield round, in_memory(state)


@kinds
def test_after_a_kill_or_a_power_cut_at_any_moment_of_three_saves_the_newest_that_ended_is_there(tmp_path, kind):
    images, root, expected = Images(tmp_path), tmp_path / "run", {0: None}
    root.mkdir()
    with disk.forgetting(root, images):
        for images.promised, state in saved(root, kind, 1, 2, 3):
            expected[images.promised] = state
    for image, promised in images.left:
        round, state = restored(image, KINDS[kind][0]) or (0, None)
        assert round >= promised, image
        assert_same(state, expected[round])
    assert len(images.left) >= 150


@pytest.mark.ci
@kinds
def test_after_an_io_error_at_any_write_of_a_save_the_one_before_is_there_and_the_next_succeeds(tmp_path, kind):
    begin, after = KINDS[kind]
    expected = dict(saved(tmp_path / "before", kind, 1, 2))

    def third(number: int) -> list[str]:
        root = pathlib.Path(shutil.copytree(tmp_path / "before", tmp_path / str(number)))
        with Checkpoints(root) as checkpoints:
            state = after(checkpoints.restore(begin())[1], 3)
            expected[3] = in_memory(state)
            with disk.failing(root, number) as calls:
                checkpoints.save(3, state)
                checkpoints.wait()
        return calls

    calls = third(10**9)
    assert {"mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir"} == set(calls)
    for number in range(len(calls)):
        with pytest.raises(OSError, match="Input/output error"):
            third(number)
        round, state = restored(tmp_path / str(number), begin)
        assert round in (2, 3)
        assert_same(state, expected[round])
        list(saved(tmp_path / str(number), kind, 4))
        assert restored(tmp_path / str(number), begin)[0] == 4
    assert len(calls) >= 35


RUNS_AND_STEPS = [
    pytest.param(1, 23, marks=ci), *(pytest.param(*some, marks=slow) for some in ((2, 61), (1, 1), (2, 5)))
]  # fmt: skip
"""How many runs a program has, and which moments, or calls, are tried: every 23rd ..."""


@pytest.fixture(scope="module")
def whole(request, own_methods, tmp_path_factory):
    """An experiment of one run and one of two, and the folder of the whole run."""
    few = {"data__name": "digits", "data__num_clients": 4, "cohort_size": 2, "diagnostics__clients_every": 2}
    given = tiny.config("average", network="linear", seeds=request.param, **few)
    experiment, folder = build(given), tmp_path_factory.mktemp("whole")
    go(experiment, folder)
    return experiment, folder


def go(experiment, workdir):
    for own, folder in zip(experiment.runs, folders(experiment, workdir), strict=True):
        open_workdir(folder, own.settings.to_dict())
    run(experiment, workdir, Stop())


def assert_goes_on(whole, workdir):
    """The same command ends as the run that nothing has disturbed."""
    experiment, expected = whole
    go(experiment, workdir)
    for number, before in enumerate(folders(experiment, expected)):
        after = folders(experiment, workdir)[number]
        assert rows(after) == rows(before)
        assert_same_checkpoint(experiment.only([number]), before, after)
        assert (after / "summary.json").exists()
        records = [ClientsLog(folder).read() for folder in (before, after)]
        assert all(np.array_equal(records[1][name], values) for name, values in records[0].items())


@pytest.mark.parametrize(("whole", "every"), RUNS_AND_STEPS, indirect=["whole"])
def test_a_run_goes_on_with_the_same_bits_after_a_kill_or_a_power_cut(tmp_path, whole, every):
    images, root = Images(tmp_path, every), tmp_path / "run"
    root.mkdir()
    with disk.forgetting(root, images):
        go(whole[0], root)
    for image, _ in images.left:
        assert_goes_on(whole, image)
        shutil.rmtree(image)
    assert len(images.left) * every >= 900


def refusal(experiment, workdir) -> str:
    """What a run says that cannot write; nothing if it ends well."""
    try:
        go(experiment, workdir)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("whole", "every"), RUNS_AND_STEPS, indirect=["whole"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_run_goes_on_with_the_same_bits_after_an_error_at_any_write(tmp_path, whole, every, code):
    with disk.failing(tmp_path / "all", 10**9) as calls:
        go(whole[0], tmp_path / "all")
    assert rows(tmp_path / "all" / whole[0].runs[0].name) == rows(whole[1] / whole[0].runs[0].name)
    said: list[str] = []
    for number in range(0, len(calls), every):
        root = tmp_path / str(number)
        with disk.failing(root, number, code) as made:
            said.append(refusal(whole[0], root))
        assert len(made) > number
        assert_goes_on(whole, root)
        shutil.rmtree(root)
    assert len(calls) >= 300
    assert sum(os.strerror(code) in one for one in said) > 0.9 * len(said)
