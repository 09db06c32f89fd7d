"""A command whose output nobody reads any more, as in `| head`, ends quietly."""

import os
import subprocess
import sys

import pytest

from tests.experiment.commands import ROOT


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "launch.run", "--help"],  # written as the process ends
        ["-u", "-m", "launch.prepare", "--list"],  # written at once, where the command looks for what is wrong
        ["-m", "launch.main", "explain", "configs"],
    ],
)
def test_a_closed_pipe_ends_a_command_without_a_word(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
