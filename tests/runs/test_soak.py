"""Long runs: killed every few seconds, a run ends with the bits of one that nothing has disturbed; memory does not grow."""

import multiprocessing
import os
import pathlib
import random
import signal
import sys
import time

import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.files import read_json
from fedjax_ssl.runs.checkpoint import Checkpoints
from fedjax_ssl.runs.log import MetricsLog
from launch import config_file
from tests.commands import rows
from tests.runs.test_resume import assert_same_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.reliability, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
CONFIG = "digits:fixmatch,labels_at=clients"
QUICK = {"model.name": "mlp", "client.epochs": "0", "client.steps": "2", "eval_every": "50", "checkpoint_every": "20"}


def begin(workdir: pathlib.Path, overrides: dict[str, str]) -> None:
    """`launch.run`, in a process that has imported all it needs."""
    from launch import run as program

    os.environ.pop("XLA_FLAGS", None)
    words = [f"--config={CONFIG}", f"--workdir={workdir}", *(f"--config.{key}={value}" for key, value in overrides.items())]
    os.dup2(os.open(f"{workdir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.exit(program.main(["launch.run", *words]))


def started(workdir: pathlib.Path, overrides: dict[str, str]) -> multiprocessing.Process:
    ready = multiprocessing.get_context("forkserver")
    ready.set_forkserver_preload(["launch.run", "fedjax_ssl.experiment.build", "fedjax_ssl.runs.run"])
    process = ready.Process(target=begin, args=(workdir, overrides))
    process.start()
    return process


def done(workdir: pathlib.Path) -> int:
    """The newest checkpoint's round."""
    return max(Checkpoints(workdir, read_only=True).rounds(), default=0)


def size(workdir: pathlib.Path) -> int:
    """The log's bytes."""
    log = MetricsLog(workdir).path
    return log.stat().st_size if log.exists() else 0


def killed(process: multiprocessing.Process, workdir: pathlib.Path, chance: random.Random, longest: float) -> bool:
    """Kills a run some seconds after it goes on, or, one time in four, while it starts; whether it had not ended by then."""
    before, starts = size(workdir), chance.random() < 0.25
    while process.is_alive() and not starts and size(workdir) == before:
        process.join(0.05)
    process.join(chance.uniform(0, longest))
    lives = process.is_alive()
    if lives:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return lives


@pytest.mark.parametrize(("where", "rounds", "seconds"), [("device", 2000, 30), ("disk", 2000, 30), ("device", 60_000, 1800)])
def test_a_run_that_is_killed_every_few_seconds_ends_with_the_same_bits_and_memory_is_flat(tmp_path, where, rounds, seconds):
    overrides = QUICK | {"rounds": str(rounds), "execution.data": where}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process, resident = started(whole, overrides), {}
    while process.is_alive():
        time.sleep(0.2)
        resident[len(MetricsLog(whole).path.read_bytes().splitlines()) if size(whole) else 0] = pages(process)
    assert process.exitcode == 0, pathlib.Path(f"{whole}.log").read_text()
    after = np.array([(number, held) for number, held in resident.items() if number > rounds / 4 and held])
    if rounds >= 10_000:  # else it is over before the allocator has all that it keeps
        slope = np.polyfit(*after.T, 1)[0]
        print(f"{rounds} rounds: {after[-1, 1] / 1e6:.0f} MB, growing by {slope:.0f} bytes a round")
        assert slope < 500  # the log's rows in memory for a report at the end are more
    chance, kills, newest, end = random.Random(rounds), 0, 0, time.monotonic() + seconds
    while (time.monotonic() < end or kills < 3) and not (parts / "summary.json").exists():
        process = started(parts, overrides)
        kills += killed(process, parts, chance, longest=6 if rounds >= 10_000 else 2)
        assert process.exitcode in (0, -signal.SIGKILL)
        assert done(parts) >= newest, "a checkpoint is lost"
        newest = done(parts)
    process = started(parts, overrides)
    process.join()
    print(f"{kills} kills, {newest} of {rounds} rounds by then")
    assert process.exitcode == 0
    assert kills >= (seconds / 30 if rounds >= 10_000 else 3)
    assert newest > 0
    assert rows(parts) == rows(whole)
    assert read_json(parts / "summary.json")["eval/accuracy"] == read_json(whole / "summary.json")["eval/accuracy"]
    assert_same_checkpoint(build(config_file.read(CONFIG, overrides).tree), whole, parts)


def pages(process: multiprocessing.Process) -> int:
    """Resident bytes; 0 of a process that has ended."""
    try:
        return int(pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
