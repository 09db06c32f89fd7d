"""More rounds than a run began with: it goes on where nothing depends on their number, else one line says what does."""

import functools
import json

import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl.experiment.build import build
from fedjax_ssl.runs.folder import dependence
from tests import average, tiny
from tests.commands import launch, refused, rows, succeeded
from tests.runs.test_resume import assert_same_checkpoint

pytestmark = pytest.mark.usefixtures("own_methods")
CONSTANT = ("--config.client.optimizer.schedule=constant", "--config.server.training.optimizer.schedule=constant")


def test_a_finished_run_with_more_rounds_equals_a_run_of_so_many_rounds_bit_for_bit(tmp_path, config):
    arguments = (config, "--config.eval_every=4", *CONSTANT)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for workdir, rounds in ((whole, 8), (parts, 6), (parts, 8), (parts, 8)):
        succeeded(*arguments, f"--workdir={workdir}", f"--config.rounds={rounds}")
    experiment = build(json.loads((whole / "config.json").read_text()))
    assert_same_checkpoint(experiment, whole, parts)
    of_whole, of_parts = rows(whole), rows(parts)
    assert {key for key in of_parts[5] if key not in of_whole[5]} == {"eval/accuracy", "eval/loss"}  # once the last round
    for key in ("eval/accuracy", "eval/loss"):
        del of_parts[5][key]
    assert of_parts == of_whole
    summaries = [json.loads((workdir / "summary.json").read_text()) for workdir in (whole, parts)]
    assert summaries[0]["rounds"] == summaries[1]["rounds"] == 8
    assert summaries[0]["eval/accuracy_last5"] == summaries[1]["eval/accuracy_last5"]


def test_other_numbers_of_rounds_are_refused_in_one_line_and_nothing_changes(tmp_path, config):
    arguments = (config, f"--workdir={tmp_path / 'run'}", "--config.rounds=2")
    succeeded(*arguments)
    before = (tmp_path / "run" / "config.json").read_bytes()
    said = refused(*arguments[:2], "--config.rounds=4")
    assert "rounds: got 4 with a run of 2" in said
    assert "whose results depend on their number (client.optimizer.schedule=cosine" in said
    assert "accepted: 2 or more" in refused(*arguments[:2], "--config.rounds=1")
    assert (tmp_path / "run" / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("method", "overrides", "what"),
    [
        ("fixmatch", {}, ""),
        (
            "fixmatch",
            {"server__training__optimizer__schedule": "cosine_7_16"},
            "server.training.optimizer.schedule=cosine_7_16",
        ),
        ("fixmatch", {"client__optimizer__schedule": "step", "client__optimizer__warmup_rounds": 2.0}, ""),
        ("fedavg", {"server__training__optimizer__schedule": "cosine"}, ""),  # its server has no labels to train on
        ("fedsem", {"method__labeled_rounds": 0.5}, "method.labeled_rounds=0.5"),
        ("fedsiam_d", {"method__end_round": 3}, "method.name=fedsiam_d, which reads the number of rounds"),
        ("fedsem", {"method__labeled_rounds": 2, "vary": "method.labeled_rounds", "values": (2, 3)}, ""),
        ("fedsem", {"vary": "method.labeled_rounds", "values": (2, 0.5)}, "method.labeled_rounds=0.5"),
        ("fedcon", {}, "method.name=fedcon, which reads the number of rounds"),
    ],
)
def test_what_depends_on_the_number_of_rounds_is_said(method, overrides, what):
    network = "mlp" if method == "fedcon" else "linear"
    assert dependence(build(tiny.config(method, rounds=6, network=network, **overrides)), before=4) == what


@pytest.mark.parametrize("reads", ["Cohort", "ServerData"])
@pytest.mark.parametrize("says", [False, True])
def test_a_method_gets_the_number_of_rounds_only_where_it_says_that_it_reads_it(reads, says):
    got = []

    @functools.wraps(average.average)
    def reader(**given):
        method = average.average(**given)

        def reading(function):
            def call(*arguments):
                got.extend(one.rounds - 1 for one in arguments if type(one).__name__ == reads)
                return function(*arguments)

            return call

        functions = {name: reading(getattr(method, name)) for name in ("broadcast", "server_update")}
        return method._replace(**functions, requires=method.requires._replace(rounds=says))

    fedjax_ssl.register_method("reader", reader)
    experiment = build(tiny.config("reader", rounds=6, network="linear"))
    if not says:
        assert dependence(experiment, before=4) == ""
        with pytest.raises(
            ValueError, match=r"got None .*accepted: Requires with .*rounds=True where it reads how many rounds"
        ):
            next(experiment.rounds())
        return
    assert dependence(experiment, before=4) == "method.name=reader, which reads the number of rounds"
    next(experiment.rounds())
    assert got
    assert set(got) == {5}


@pytest.mark.ci
@pytest.mark.reliability
def test_data_that_have_moved_are_found_again_and_changed_ones_are_refused(tmp_path, config):
    arrays = {f"{kind}_{part}": value for part, size in (("train", 60), ("test", 20)) for kind, value in data_of(size).items()}
    np.savez(tmp_path / "own.npz", **arrays)
    np.savez(tmp_path / "moved.npz", **arrays)
    arrays["x_train"][7, 3, 3] ^= 1
    np.savez(tmp_path / "other.npz", **arrays)
    arguments = (config, "--config.data.name=npz", f"--workdir={tmp_path / 'run'}", *CONSTANT)
    own, moved, other = (f"--config.data.path={tmp_path / name}.npz" for name in ("own", "moved", "other"))
    written = tmp_path / "run" / "config.json"
    succeeded(*arguments, own, "--config.rounds=2")
    before = written.read_bytes()
    for rounds in (2, 4):  # finished, and to go on
        done = launch(*arguments, other, f"--config.rounds={rounds}")
        assert done.returncode == 2
        line = f"error: {tmp_path / 'run'}: its run began with other data than these; put them back, or use --overwrite"
        assert done.stderr.splitlines()[-1] == line
        assert written.read_bytes() == before
    for rounds in (2, 4):
        done = succeeded(*arguments, moved, f"--config.rounds={rounds}")
        assert ("going on after round 2" in done.stderr) == (rounds == 4)
        assert json.loads(written.read_text())["data"]["path"].endswith("moved.npz")


def data_of(size):
    """Random gray images of 4 classes."""
    rng = np.random.default_rng(size)
    return {"x": rng.integers(0, 256, (size, 8, 8, 1), np.uint8), "y": np.arange(size) % 4}
