"""A command whose output nobody reads any more, as in `| head`, ends quietly."""

import contextlib
import os
import subprocess
import sys

import pytest

from launch import command, prepare
from tests.experiment.commands import ROOT


@pytest.fixture
def closed():
    """The end of a pipe that is written to, whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    with contextlib.suppress(OSError):
        os.close(writing)


@pytest.mark.parametrize("words", [["launch.run", "--help"], ["launch.main", "explain", "configs"]])
@pytest.mark.parametrize("also_errors", [False, True])
def test_a_closed_pipe_ends_a_command_without_a_word(closed, words, also_errors):
    errors = closed if also_errors else subprocess.PIPE
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=closed, stderr=errors, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, None if also_errors else "")


def test_it_is_not_taken_for_wrong_input(closed, capsys):
    with open(closed, "w", buffering=1) as stdout, contextlib.redirect_stdout(stdout):  # written line by line
        assert command.ended(prepare.main, ["prepare", "--list"]) == 141
    assert capsys.readouterr().err == ""
