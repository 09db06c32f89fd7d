"""`model.init`: weights of a file, of a run, or of a torch network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import build, models
from fedjax_ssl.experiment import start_weights
from fedjax_ssl.experiment.export import named, named_arrays
from fedjax_ssl.local.task import Weights
from fedjax_ssl.runs.loading import load
from tests import engine, tiny
from tests.commands import refused, succeeded
from tests.models import torch_networks

TORCH = {
    "resnet18": ("resnet", {"depth": 18}, functools.partial(torch_networks.resnet, depth=18), torch_networks.resnet_shapes(18)),
    "resnet50": ("resnet", {"depth": 50}, functools.partial(torch_networks.resnet, depth=50), torch_networks.resnet_shapes(50)),
    "wrn": (
        *("wide_resnet", {"depth": 16, "width": 2, "variant": "usb"}),
        *(functools.partial(torch_networks.wide_resnet, depth=16), torch_networks.wide_resnet_shapes(16, 2)),
    ),
}
ARRAYS = {name: torch_networks.arrays_of(case[3]) for name, case in TORCH.items()}


START = {"server__training__pretrain": 0, "server__training__epochs": 1}


def experiment(**options):
    return tiny.experiment("fixmatch", **START | options)


def fresh(made) -> Weights:
    return jax.device_get(made.simulator.initialize().server.weights)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model's files after a round, and its weights."""
    made, folder = experiment(), tmp_path_factory.mktemp("trained")
    state, _ = next(made.rounds())
    for name in ("model.npz", "model.safetensors"):
        made.save_model(folder / name, state)
    return folder, made, engine.copied(state)


@pytest.mark.parametrize("name", [pytest.param("model.npz", marks=pytest.mark.ci), "model.safetensors"])
def test_a_run_starts_from_the_weights_that_save_model_wrote(trained, name):
    folder, _, state = trained
    started = experiment(model__init=str(folder / name), seed=5)
    assert jax.tree.all(jax.tree.map(np.array_equal, fresh(started).params, state.server.weights.params))
    assert started.start_digest != experiment().start_digest == ""


def test_a_run_starts_from_a_state_in_memory(trained):
    _, made, state = trained
    config = tiny.config("fixmatch", seed=5, **START)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, fresh(build(config, start=(made, state))).params, state.server.weights.params)
    )


def test_a_head_of_another_size_begins_at_random_and_one_line_says_so(trained, caplog):
    arrays = dict(np.load(trained[0] / "model.npz"))
    del arrays["metadata"]
    arrays["Dense_1/kernel"], arrays["Dense_1/bias"] = np.ones((32, 100), np.float32), np.ones(100, np.float32)
    wanted = trained[2].server.weights
    found = start_weights.matched(arrays, wanted, "model.npz")
    assert set(named(wanted)) - set(found) == {"Dense_1/kernel", "Dense_1/bias"}
    (line,) = caplog.messages
    assert line.startswith("model.npz: Dense_1 begins at random, as its size differs: Dense_1/bias is (100,) there and (10,) ")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"Dense_0/kernel": None}, r"got no Dense_0/kernel \(1 of 4 "),
        ({"Conv_9/kernel": np.zeros(3)}, "got Conv_9/kernel, which the network does not have"),
        ({"Dense_0/bias": np.zeros(7)}, r"got Dense_0/bias of shape \(7,\), accepted: \(32,\)"),
    ],
)
def test_weights_of_another_network_are_one_line(trained, change, line):
    arrays = {name: x for name, x in np.load(trained[0] / "model.npz").items() if name != "metadata"} | change
    arrays = {name: x for name, x in arrays.items() if x is not None}
    with pytest.raises(ValueError, match=f"^model.npz: {line}"):
        start_weights.matched(arrays, trained[2].server.weights, "model.npz")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.npz", "which is no file"),
        (".", "which is a folder"),
        ("text.npz", "which cannot be read"),
        ("text.safetensors", "which cannot be read"),
        ("a.pt", "accepted"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, name, said):
    for file in ("text.npz", "text.safetensors", "a.pt"):
        (tmp_path / file).write_text("no arrays")
    with pytest.raises(ValueError, match=r"^model\.init: got ") as caught:
        experiment(model__init=str(tmp_path / name))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def logits_of(name: str, arrays, images) -> np.ndarray:
    """Of images [B, ch, H, W], by our network with the weights of a torch file."""
    network, options, *_ = TORCH[name]
    made = models.build(network, num_classes=10, **options)
    weights = Weights(*jax.eval_shape(lambda key: made.init(key, (8, 8, 3)), jax.random.key(0)))
    every = dict(models.MODELS[network].options(**options))
    found = start_weights.matched(start_weights.from_torch(arrays, network, every), weights, "file")
    params, stats = start_weights.started(made, found).init(jax.random.key(0), (8, 8, 3))
    return made.apply(params, stats, jnp.asarray(images.transpose(0, 2, 3, 1)))[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "wrn" else pytest.mark.slow) for name in TORCH])
def test_a_torch_file_gives_the_logits_of_its_network(name):
    images = np.random.default_rng(1).normal(size=(3, 3, 8, 8)).astype(np.float32)
    expected = TORCH[name][2](torch_networks.InNumPy(ARRAYS[name]), images)
    np.testing.assert_allclose(logits_of(name, ARRAYS[name], images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH)
def test_a_torch_file_gives_the_logits_that_torch_computes(name):
    torch = pytest.importorskip("torch")
    images = np.random.default_rng(1).normal(size=(3, 3, 32, 32)).astype(np.float32)
    expected = TORCH[name][2](torch_networks.InTorch(ARRAYS[name]), torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(logits_of(name, ARRAYS[name], images), expected, rtol=1e-4, atol=1e-4)


def test_a_stem_of_another_size_begins_at_random(caplog):
    arrays = torch_networks.arrays_of(torch_networks.resnet_shapes(18, classes=1000, stem=7))
    made = models.build("resnet", num_classes=10)
    weights = Weights(*jax.eval_shape(lambda key: made.init(key, (8, 8, 3)), jax.random.key(0)))
    found = start_weights.matched(start_weights.from_torch(arrays, "resnet", {"depth": 18}), weights, "imagenet")
    assert set(named(weights)) - set(found) == {"Conv_0/kernel", "Dense_0/kernel", "Dense_0/bias"}
    assert "imagenet: Conv_0 and Dense_0 begin at random" in caplog.text


def test_weights_of_usb_need_its_form_of_the_network():
    with pytest.raises(ValueError, match=r"biases, as USB's, with model.variant=fl2, accepted: model.variant=usb"):
        start_weights.from_torch(ARRAYS["wrn"], "wide_resnet", TORCH["wrn"][1] | {"variant": "fl2"})


@pytest.mark.slow
def test_a_command_starts_from_a_runs_folder_and_does_not_go_on_from_other_weights(tmp_path, fixmatch):
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    succeeded(fixmatch, f"--workdir={first}", "--stop_after=2")
    started = succeeded(fixmatch, f"--workdir={second}", f"--config.model.init={first}", "--config.rounds=2", "--config.seed=7")
    assert started.returncode == 0
    succeeded(fixmatch, f"--workdir={third}", f"--config.model.init={first}", "--stop_after=2")
    succeeded(fixmatch, f"--workdir={first}")  # which changes its newest state
    line = refused(fixmatch, f"--workdir={third}", f"--config.model.init={first}")
    assert "its run started from other weights than model.init has" in line


def test_only_the_trainable_parameters_are_trained_sent_and_kept(trained):
    folder, whole, _ = trained
    made = experiment(model__init=str(folder / "model.npz"), model__trainable="Dense_1", rounds=2)
    (_, row), (last, _) = ((engine.copied(now), row) for now, row in made.rounds())
    before, after = np.load(folder / "model.npz"), named_arrays(made, last)
    for name in ("Dense_0/kernel", "Dense_0/bias", "Dense_1/kernel", "Dense_1/bias"):
        assert np.array_equal(before[name], after[name]) == name.startswith("Dense_0")
    assert row["comm/bytes_up"] == 4 * (32 * 10 + 10) * row["client/participants"]
    assert list(last.server.weights.params) == ["Dense_1"]
    assert made.num_params == whole.num_params
    images = made.problem.test.images[:20]
    hidden = np.maximum(features(made, images) @ after["Dense_0/kernel"] + after["Dense_0/bias"], 0)
    np.testing.assert_allclose(made.predict(last, images), hidden @ after["Dense_1/kernel"] + after["Dense_1/bias"], rtol=1e-4)


def features(made, images):
    return np.asarray(made.views.plain(images)).reshape(len(images), -1)


def test_no_gradient_is_computed_for_parameters_that_are_not_trained():
    model = models.build("cnn", num_classes=10, width=16)
    params, stats = model.init(jax.random.key(0), (16, 16, 1))
    arrays = {name: np.asarray(x) for name, x in named(Weights(params, ())).items()}
    head = start_weights.started(model, arrays, {name: x for name, x in arrays.items() if "Dense" not in name})

    def flops(own, params):
        def loss(params, images):
            return jnp.sum(own.apply(params, stats, images)[0] ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(params, jnp.ones((8, 16, 16, 1))).compile()
        return compiled.cost_analysis()["flops"]

    forward = jax.jit(lambda images: model.apply(params, stats, images)[0]).lower(jnp.ones((8, 16, 16, 1))).compile()
    assert flops(head, head.init(jax.random.key(0), (16, 16, 1))[0]) < 1.2 * forward.cost_analysis()["flops"]
    assert flops(model, params) > 2 * forward.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model__trainable": "Dense_1"}, "got Dense_1 with random weights, accepted: with model.init"),
        ({"model__trainable": "Conv", "model__init": "model.npz"}, "got Conv, which no parameter has, accepted: a regular"),
        ({"model__trainable": "(", "model__init": "model.npz"}, r"got \(, which no parameter has"),
    ],
)
def test_a_pattern_that_trains_nothing_is_one_line(trained, monkeypatch, options, line):
    monkeypatch.chdir(trained[0])
    with pytest.raises(ValueError, match=rf"^model\.trainable: {line}"):
        experiment(**options)


@pytest.mark.slow
def test_a_run_that_trains_the_head_alone_is_loaded_with_the_weights_that_it_began_with(tmp_path, trained, fixmatch):
    folder, second = tmp_path / "first", tmp_path / "second"
    succeeded(fixmatch, f"--workdir={folder}", "--config.rounds=2")
    made, state = load(folder)
    made.save_model(tmp_path / "start.npz", state)
    trainable = ("--config.model.trainable=bias", f"--config.model.init={tmp_path / 'start.npz'}", "--config.rounds=2")
    succeeded(fixmatch, f"--workdir={second}", *trainable)
    loaded, last = load(second)
    assert np.array_equal(named_arrays(loaded, last)["Dense_0/kernel"], named_arrays(made, state)["Dense_0/kernel"])
    changed = dict(np.load(tmp_path / "start.npz"))
    np.savez(tmp_path / "start.npz", **changed | {"Dense_0/kernel": 2 * changed["Dense_0/kernel"]})
    with pytest.raises(ValueError, match=r"^model\.init: got other weights than the run in "):
        load(second)
