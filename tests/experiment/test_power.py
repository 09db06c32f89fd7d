"""Power cuts at any moment, I/O errors at any write: the next start has the newest whole state, and ends with the same bits."""

import contextlib
import errno
import pathlib
import random
import shutil

import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.checkpoint import Checkpoints
from fedjax_ssl.experiment.clients import ClientsLog
from fedjax_ssl.experiment.owner import OWNER
from fedjax_ssl.experiment.run import Stop, folders, open_workdir, run
from tests import tiny
from tests.experiment import disk
from tests.experiment.commands import rows
from tests.experiment.test_checkpoint import assert_same, restore, save_all, state_of
from tests.experiment.test_resume import assert_same_checkpoint

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]


class Images:
    """What power cuts leave at each `every`-th moment, in folders: nothing that is not synced, and what chance will have."""

    def __init__(self, folder: pathlib.Path, every: int = 1):
        self.left: list[tuple[pathlib.Path, int]] = []
        self.promised = 0  # what is said to be on disk by now
        self._folder, self._every, self._moments, self._chance = folder, every, 0, random.Random(every)

    def __call__(self, of: disk.Disk) -> None:
        self._moments += 1
        for chance in (None, self._chance) if self._moments % self._every == 0 else ():
            self.left.append((self._folder / str(len(self.left)), self.promised))
            of.after_a_power_cut(self.left[-1][0], chance)


def test_after_a_power_cut_at_any_moment_of_three_saves_the_newest_that_ended_is_there(tmp_path):
    images, root = Images(tmp_path), tmp_path / "run"
    root.mkdir()
    with disk.forgetting(root, images), Checkpoints(root) as checkpoints:
        for round in (1, 2, 3):
            checkpoints.save(round, state_of(round))
            checkpoints.wait()
            images.promised = round
    for image, promised in images.left:
        round, state = restore(image) or (0, state_of(0))
        assert round >= promised, image
        assert_same(state, state_of(round))
    assert len(images.left) >= 100


def test_after_an_io_error_at_any_write_of_a_save_the_one_before_is_there_and_the_next_succeeds(tmp_path):
    save_all(tmp_path / "before", 1, 2)

    def save(number: int) -> tuple[pathlib.Path, list[str]]:
        root = pathlib.Path(shutil.copytree(tmp_path / "before", tmp_path / str(number)))
        with Checkpoints(root) as checkpoints, disk.failing(root, number) as calls:
            checkpoints.save(3, state_of(3))
            checkpoints.wait()
        return root, calls

    _, calls = save(10**9)
    assert {"mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir"} == set(calls)
    for number in range(len(calls)):
        with pytest.raises(OSError, match="Input/output error"):
            save(number)
        round, state = restore(tmp_path / str(number))
        assert round in (2, 3)
        assert_same(state, state_of(round))
        save_all(tmp_path / str(number), 4)
        assert restore(tmp_path / str(number))[0] == 4
    assert len(calls) >= 35


ci, slow = pytest.mark.ci, pytest.mark.slow
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
        open_workdir(folder, own.settings.to_dict(), overwrite=False)
    run(experiment, workdir, Stop())


def assert_goes_on(whole, workdir):
    """The same command ends as the run that nothing has disturbed."""
    experiment, expected = whole
    for path in workdir.rglob(OWNER):  # its process has ended
        path.unlink()
    go(experiment, workdir)
    for number, before in enumerate(folders(experiment, expected)):
        after = folders(experiment, workdir)[number]
        assert rows(after) == rows(before)
        assert_same_checkpoint(experiment.only([number]), before, after)
        assert (after / "summary.json").exists()
        records = [ClientsLog(folder).read() for folder in (before, after)]
        assert all(np.array_equal(records[1][name], values) for name, values in records[0].items())


@pytest.mark.parametrize(("whole", "every"), RUNS_AND_STEPS, indirect=["whole"])
def test_a_run_goes_on_with_the_same_bits_after_a_power_cut(tmp_path, whole, every):
    images, root = Images(tmp_path, every), tmp_path / "run"
    root.mkdir()
    with disk.forgetting(root, images):
        go(whole[0], root)
    for image, _ in images.left:
        assert_goes_on(whole, image)
        shutil.rmtree(image)
    assert len(images.left) * every >= 600


@pytest.mark.parametrize(("whole", "every"), RUNS_AND_STEPS, indirect=["whole"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_run_goes_on_with_the_same_bits_after_an_error_at_any_write(tmp_path, whole, every, code):
    with disk.failing(tmp_path / "all", 10**9) as calls:
        go(whole[0], tmp_path / "all")
    assert rows(tmp_path / "all" / whole[0].runs[0].name) == rows(whole[1] / whole[0].runs[0].name)
    for number in range(0, len(calls), every):
        root = tmp_path / str(number)
        with contextlib.suppress(OSError, ValueError), disk.failing(root, number, code):
            go(whole[0], root)
        assert_goes_on(whole, root)
        shutil.rmtree(root)
    assert len(calls) >= 300
