"""A run in a folder, used afterwards: loaded, predicting, inspected, its model saved; the folder is only read."""

import json
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import build
from fedjax_ssl.data import sources
from fedjax_ssl.experiment.personalization import personalized
from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.runs.log import MetricsLog
from tests import tiny
from tests.commands import launch, succeeded
from tests.data.common import message_of
from tests.engine import same_bits

pytestmark = pytest.mark.usefixtures("own_methods")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, config):
    """The folder of a finished run, whose images are padded."""
    folder = tmp_path_factory.mktemp("finished")
    options = ("--config.rounds=2", "--config.data.image_size=10")
    succeeded(config, f"--workdir={folder / 'run'}", *options)
    return folder / "run"


@pytest.fixture(scope="module")
def loaded(finished):
    return fedjax_ssl.load(finished)


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


def test_a_loaded_run_evaluates_as_it_was_logged_and_its_folder_is_only_read(finished):
    before = contents(finished)
    experiment, state = fedjax_ssl.load(str(finished))
    test = experiment.problem.test
    accuracy = np.mean(experiment.predict(state, test.images).argmax(1) == test.labels)
    assert accuracy == pytest.approx(MetricsLog(finished).rows()[-1]["eval/accuracy"])
    assert int(state.round) == 2
    assert contents(finished) == before


def test_a_stopped_run_goes_on_from_its_loaded_state_bit_for_bit(tmp_path, config):
    arguments = (config, f"--workdir={tmp_path / 'run'}")
    launch(*arguments, "--stop_after=2")
    experiment, state = fedjax_ssl.load(tmp_path / "run")
    *_, (state, row) = experiment.rounds(state)
    launch(*arguments)
    assert same_bits(state, fedjax_ssl.load(tmp_path / "run")[1])
    assert row["eval/accuracy"] == MetricsLog(tmp_path / "run").rows()[-1]["eval/accuracy"]


@pytest.mark.slow
def test_a_run_of_several_whose_tables_are_wider_is_loaded_on_fewer_devices(tmp_path):
    config = tiny.config("fedsem", seeds=2, rounds=2, network="linear", data__name="digits", data__partition="dirichlet")
    (tmp_path / "several.py").write_text(f"def get_config():\n    return {config!r}\n")
    succeeded(f"--config={tmp_path / 'several.py'}", f"--workdir={tmp_path / 'runs'}")
    for seed in "01":
        noted = read_json(tmp_path / "runs" / seed / "run.json")
        noted["layout"] |= {"devices": 5, "strategy": "sharded", "runs_at_once": 9}  # of another machine
        write_json(tmp_path / "runs" / seed / "run.json", noted)
        experiment, state = fedjax_ssl.load(tmp_path / "runs" / seed)
        assert experiment.settings.seed == int(seed)
        assert experiment.predict(state, experiment.problem.test.images[:2]).shape == (2, 10)
    said = message_of(ValueError, fedjax_ssl.load, tmp_path / "runs")
    assert "holds 2 runs, accepted: a run's own folder: " in said
    assert str(tmp_path / "runs" / "1") in said


def damage_config(folder):
    (folder / "config.json").write_text("{")


def unknown_method(folder):
    write_json(folder / "config.json", read_json(folder / "config.json") | {"method": {"name": "mine"}})


def other_seed(folder):
    write_json(folder / "config.json", read_json(folder / "config.json") | {"seed": 5})


def in_memory(folder):
    config = read_json(folder / "config.json")
    config["data"] |= {"name": "arrays"}
    write_json(folder / "config.json", config)


def damage_checkpoint(folder):
    for path in (folder / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: shutil.rmtree(folder / "checkpoints"), ["has no checkpoint"]),
        (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
        (shutil.rmtree, ["is no folder"]),
        (damage_config, ["config.json is damaged: it is not JSON"]),
        (
            unknown_method,
            ["method.name: got mine", "small.py, the config file that registers it", "fedjax_ssl.register_method('mine', ...)"],
        ),
        (other_seed, ["run.json is another run's: seed is 0 there and 5 in config.json"]),
        (in_memory, ["data.name: got arrays", "dataset=..."]),
        (damage_checkpoint, ["is corrupt"]),
    ],
)
def test_what_cannot_be_loaded_is_one_line(tmp_path, finished, change, words):
    folder = shutil.copytree(finished, tmp_path / "run")
    change(folder)
    said = message_of((ValueError, FileNotFoundError), fedjax_ssl.load, folder)
    assert all(word in said for word in words), said


def test_predict_takes_what_the_dataset_takes_and_refuses_the_rest(loaded):
    experiment, state = loaded
    padded = experiment.problem.test.images[:3]
    stored = padded[:, 1:-1, 1:-1]
    logits = experiment.predict(state, padded)
    for same in (stored, stored[..., 0]):
        np.testing.assert_array_equal(experiment.predict(state, same), logits)
    assert experiment.predict(state, stored[:0]).shape == (0, 10)
    for wrong in (stored.astype(np.float32), stored[:, :7], np.repeat(stored, 3, -1), stored[0], []):
        said = message_of(ValueError, experiment.predict, state, wrong)
        assert said.startswith("examples: got ")
        assert "accepted: images uint8 [B, 8, 8, 1] or [B, 10, 10, 1]" in said


def test_predict_takes_features():
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    y = np.arange(40) % 2
    data = sources.from_features(train_features=x, train_labels=y, test_features=x[:4], test_labels=y[:4])
    experiment = fedjax_ssl.build(
        tiny.config("fixmatch", network="mlp", data__weak="default", data__strong="default", data__num_labels=4), data
    )
    state, _ = experiment.start()
    logits = experiment.predict(state, x[:3])
    np.testing.assert_array_equal(experiment.predict(state, x[:3, None]), logits)
    with pytest.raises(ValueError, match=r"got float32 \[3, 5\], accepted: features float32 \[B, 6\] or \[B, V, 6\]"):
        experiment.predict(state, x[:3, :5])


def test_a_saved_model_gives_its_logits_again_with_numpy_and_plain_flax(tmp_path):
    class Plain(nn.Module):
        num_classes: int

        @nn.compact
        def __call__(self, x, train: bool = False):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
            return nn.Dense(self.num_classes)(x.mean((1, 2)))

    experiment = fedjax_ssl.build(tiny.config("fedavg", labels_at="clients"), model=Plain)
    state, _ = experiment.start()
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: rng.uniform(0.5, 1, x.shape).astype(np.float32), state.server.weights)
    state = state._replace(server=state.server._replace(weights=weights))  # so that no statistics are those of the start
    experiment.save_model(tmp_path / "model.npz", state)
    with np.load(tmp_path / "model.npz") as archive:
        arrays = dict(archive)
    about = json.loads(str(arrays.pop("metadata")))
    assert set(arrays) == {
        "Conv_0/kernel", "Conv_0/bias", "BatchNorm_0/scale", "BatchNorm_0/bias", "Dense_0/kernel", "Dense_0/bias",
        "batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var",
    }  # fmt: skip
    variables: dict = {"params": {}, "batch_stats": {}}
    for name, array in arrays.items():
        group = "batch_stats" if name.startswith("batch_stats/") else "params"
        layer, leaf = name.removeprefix("batch_stats/").split("/")
        variables[group].setdefault(layer, {})[leaf] = array
    images = experiment.problem.test.images[:5]
    inputs = (images / 255 - np.array(about["mean"])) / np.array(about["std"])
    logits = Plain(about["num_classes"]).apply(variables, inputs.astype(np.float32))
    np.testing.assert_allclose(logits, experiment.predict(state, images), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"accepted: NAME.npz or NAME.safetensors"):
        experiment.save_model(tmp_path / "model.bin", state)
    safetensors = pytest.importorskip("safetensors.numpy")
    experiment.save_model(tmp_path / "model.safetensors", state)
    for name, array in safetensors.load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, arrays.pop(name))
    assert not arrays


def test_a_state_that_is_gone_or_of_other_runs_is_one_line_wherever_it_is_given(tmp_path):
    experiment = tiny.experiment("fedavg", network="linear", data__client_test_fraction=0.2)
    state, _ = experiment.start()
    images = experiment.problem.test.images[:2]
    new, _ = next(experiment.rounds(state))
    uses = {
        "predict": lambda state: experiment.predict(state, images),
        "inspect": lambda state: experiment.inspect(state, 0),
        "save_model": lambda state: experiment.save_model(tmp_path / "model.npz", state),
        "rounds": lambda state: next(experiment.rounds(state)),
        "copied": fedjax_ssl.copied,
        "start": lambda state: build(experiment.settings, start=(experiment, state)),
        "personalized": lambda state: personalized(experiment, state, 1),
        "split": experiment.simulator.split,
        "evaluate": experiment.simulator.evaluate,
        "round": experiment.simulator.round,
    }
    for name, use in uses.items():
        said = message_of(ValueError, use, state)
        assert "state: got one that a round has consumed, accepted: the newest, or a copy" in said, name
    several = jax.tree.map(lambda x: jax.numpy.stack([x, x]), new)
    for name in ("predict", "inspect", "save_model", "rounds"):
        assert message_of(ValueError, uses[name], several).startswith("state: got that of several runs, accepted: one run's: ")
        assert message_of(ValueError, uses[name], (new, {})).startswith("state: got tuple, accepted: a state")


def test_inspect_shows_the_global_models_predictions_where_a_method_makes_no_pseudo_labels(loaded):
    """Pseudo-labels are in `test_clients`."""
    experiment, state = loaded
    found = experiment.inspect(state, 2)
    table = experiment.problem.data.unlabeled
    np.testing.assert_array_equal(found.ids, table.index[2][: table.count[2]])
    np.testing.assert_array_equal(found.true_label, experiment.problem.train.labels[found.ids])
    logits = experiment.predict(state, experiment.problem.train.images[found.ids])
    np.testing.assert_array_equal(found.pseudo_label, logits.argmax(1))
    assert found.accepted is None
    with pytest.raises(ValueError, match="client: got 6, accepted: a number from 0 to 5"):
        experiment.inspect(state, 6)
