"""No mutation of a config escapes `build` or the command line: one line before anything is compiled, or a legal experiment."""

import contextlib
import tempfile
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings

from fedjax_ssl.experiment import estimate
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.expansion import flattened
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.runs import run
from tests import tiny
from tests.commands import launch, refused
from tests.launch.mutations import command_lines, configs, within_limits
from tests.traced import digest, fields, others, with_value

pytestmark = pytest.mark.reliability

SOME = settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
MANY = settings(SOME, max_examples=2000, derandomize=False)
SMALL = ("mlp", "linear", "cnn")
OVERRIDES = (
    f"seeds={10**12}", f"data.num_clients={10**20}", f"seed={10**20}", "client.optimizer.learning_rate=inf",
    "server.optimizer.learning_rate=1e39", f"model.width={10**10}", "model.width=4096", f"method.prox_mu=1{'0' * 400}",
    f"client.epochs={2**31 - 1}", f"client.batch_size={2**31 - 1}", "log_to=tensorbord", "rounds=" + "9" * 5000,
    "data.strong=" + "x" * 5000,
)  # fmt: skip
COMMANDS = (
    "--config=README.md", "--config=confgs/digits.py:fl2 --config.rounds=3", "--config=~nobody/x.py", "--config=" + "9" * 5000,
    "--config=\udc80", "--config=/", "--config=digits:\0", "--config=digits:fl2,labels=9e9",
)  # fmt: skip
"""What has been a traceback, a hang, a killed process, or was accepted, once."""


def check_line(text: str) -> None:
    assert 0 < len(text) <= 1000
    assert "\n" not in text


def check_build(tree: dict, *, trace: bool = False) -> None:
    with within_limits():
        refusal = None
        try:
            experiment = build(tree)
        except (ValueError, FileNotFoundError) as error:
            refusal = error
        if refusal is not None:
            assert type(refusal) in (ValueError, FileNotFoundError)  # of which UnicodeError is one
            check_line(str(refusal))
        elif trace and experiment.settings.model.name in SMALL and experiment.settings.execution.data == "device":
            check_unread(tree, experiment)


def check_unread(tree: dict, experiment: Experiment) -> None:
    """A setting that is declared as not read, drawn by the config itself, does not change what the run computes."""
    known = fields(experiment.settings)
    keys = [key for key in experiment.unread if key in known and not key.endswith((".labeled_repeats", ".repeats_below"))]
    values = flattened(experiment.settings.to_dict())
    key = keys[sum(map(ord, repr(values))) % len(keys)]
    for value in others(known[key], values[key]):
        other = with_value(experiment.settings.to_dict(), key, value)
        with contextlib.suppress(ValueError):  # a value that does not go with others
            assert digest(other) == digest(tree), f"{key}={value}"
            return


def check_command(words: list[str]) -> None:
    with (
        within_limits(),
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(run, "run"),  # all that comes before is as it is
        mock.patch.object(estimate, "estimate", return_value=mock.Mock(seconds=1.0)),
    ):
        done = launch(*words, f"--workdir={folder}/run")
    assert done.returncode in (0, 2)
    assert done.stdout == ""
    if done.returncode == 2:
        assert done.stderr.startswith("error: ")
        check_line(done.stderr.removesuffix("\n"))


@pytest.mark.ci
@SOME
@given(configs())
def test_no_config_escapes_build(tree):
    check_build(tree)


@SOME
@given(command_lines())
def test_no_command_line_escapes(words):
    check_command(words)


@pytest.mark.slow
@MANY
@given(configs())
def test_no_config_of_many_escapes_build_and_what_it_does_not_read_changes_no_program(tree):
    check_build(tree, trace=True)


@pytest.mark.slow
@MANY
@given(command_lines())
def test_no_command_line_of_many_escapes(words):
    check_command(words)


@pytest.mark.parametrize("words", [*[f"--config=digits:fl2 --config.{one}" for one in OVERRIDES], *COMMANDS])
def test_what_has_escaped_once_is_one_line(words):
    with within_limits():
        check_line(refused(*words.split(" ")).removesuffix("\n"))


def test_a_number_that_python_does_not_write_is_one_line():
    check_build(tiny.config("fl2") | {"rounds": 10**5000})
