"""More rounds than a run began with: it goes on where nothing depends on their number, else one line says what does."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.runs.extension import _constants, dependence
from tests import tiny
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
        ("fedavg", {"server__training__optimizer__schedule": "cosine"}, ""),  # its server has no labels to train on
        ("fedsem", {"method__labeled_rounds": 0.5}, "method.labeled_rounds=0.5"),
        ("fedsiam_d", {"method__end_round": 3}, "method.name=fedsiam_d, which reads the number of rounds"),
        ("fedcon", {}, "method.name=fedcon, which reads the number of rounds"),
    ],
)
def test_what_depends_on_the_number_of_rounds_is_found_in_the_program(method, overrides, what):
    network = "mlp" if method == "fedcon" else "linear"
    before, after = (build(tiny.config(method, rounds=rounds, network=network, **overrides)) for rounds in (4, 6))
    assert dependence(before, after) == what


def test_an_array_of_the_number_of_rounds_inside_of_a_jitted_step_is_found():
    def factory(options, task):
        def loss(values):
            return jax.jit(lambda x: (x * np.linspace(1, options.rounds, 10)).sum())(values)

        return loss

    one, other, same = (jax.make_jaxpr(factory(SimpleNamespace(rounds=n), None))(jnp.ones(10)) for n in (4, 6, 4))
    held = [[np.asarray(value) for value in _constants(program)] for program in (one, other, same)]
    assert [len(values) for values in held] == [1, 1, 1]
    assert np.array_equal(held[0], held[2])
    assert not np.array_equal(held[0], held[1])


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
