"""The jobs of the comparison, as they run here, and what the peers are handed."""

import jax
import numpy as np
import optax
import pytest

from benchmarks import compare, jobs
from fedjax_ssl import build, models
from fedjax_ssl.experiment.layout import resolve
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.models.convolution import LOWERINGS
from tests import tiny


def test_the_cnns_weights_are_in_pytorchs_layout():
    params, _ = models.build("emnist_cnn", num_classes=10).init(jax.random.key(0), (32, 32, 3))
    params = jax.tree.map(np.asarray, params)
    got = jobs.torch_weights(params)
    features = np.random.default_rng(0).normal(size=(14, 14, 64)).astype(np.float32)
    expected = features.ravel() @ params["Dense_0"]["kernel"]
    np.testing.assert_allclose(got["linear1.weight"] @ features.transpose(2, 0, 1).ravel(), expected, rtol=1e-4, atol=1e-4)
    patch = np.random.default_rng(1).normal(size=(3, 3, 32))
    expected = np.einsum("ijc,ijcf->f", patch, params["Conv_1"]["kernel"])
    np.testing.assert_allclose(np.einsum("cij,fcij->f", patch.transpose(2, 0, 1), got["conv2.weight"]), expected, rtol=1e-5)
    np.testing.assert_array_equal(got["linear2.weight"], params["Dense_1"]["kernel"].T)
    assert {name: np.shape(value) for name, value in got.items() if name.endswith("bias")} == {
        "conv1.bias": (32,), "conv2.bias": (64,), "linear1.bias": (128,), "linear2.bias": (10,)
    }  # fmt: skip


def test_a_wide_resnets_weights_have_pytorchs_names():
    params, stats = models.build("wide_resnet", num_classes=10, depth=10).init(jax.random.key(0), (32, 32, 3))
    got = jobs.torch_wide_resnet(params, stats)
    norm = ("weight", "bias", "running_mean", "running_var")
    blocks = {f"blocks.{b}.norm{i}.{key}" for b in range(3) for i in (1, 2) for key in norm}
    convs = {f"blocks.{b}.{name}.weight" for b in range(3) for name in ("conv1", "conv2", "shortcut")}
    ends = {"conv.weight", "linear.weight", "linear.bias", *(f"norm.{key}" for key in norm)}
    assert set(got) == blocks | convs | ends
    np.testing.assert_array_equal(got["blocks.1.conv1.weight"][5, 7, 0, 2], params["Block_1"]["Conv_0"]["kernel"][0, 2, 7, 5])
    assert not any("running" in name for name in jobs.torch_wide_resnet(params))


def test_the_cnn_here_is_federated_averaging_on_what_the_peers_are_handed(tmp_path):
    checked = jobs.CNN_CHECKED | {
        "cohort": 10,
        "clients": 10,
        "per_client": 4,
        "batch_size": 2,
        "rounds": 1,
        "learning_rate": 0.2,
    }
    layout = resolve(Settings())._asdict() | {"devices": 2}
    job = jobs.CNN | checked | {"kind": "cnn", "warm_up": 0, "precision": "float32", "layout": layout}
    report = jobs.run(job, tmp_path)
    assert len(report["seconds"]) == 1
    assert report["layout"] == layout
    assert not {"tuning_s", "usual_layout"} & report.keys()  # no search
    assert report["versions"].keys() >= {"python", "jax"}
    assert (report["device"], report["compile_s"] > 0) == ("2 x cpu", True)
    with np.load(tmp_path / "data.npz") as data:
        images, labels = data["images"], data["labels"]
        inputs = (np.float32(images) / 255 - data["mean"]) / data["std"]
    assert all(len(np.unique(one.reshape(4, -1), axis=0)) == 1 for one in images)
    assert sorted(labels[:, 0]) == list(range(10))
    model = models.build("emnist_cnn", num_classes=10, conv="grouped", variant="plain")
    start, _ = model.init(jax.random.key(0), (32, 32, 3))
    with np.load(tmp_path / "data.npz") as data:
        names = jobs.torch_weights(start)
        flat = {name: data[f"w:{name}"] for name in names}
    kernel = flat["linear1.weight"].T.reshape(64, 14, 14, 128).transpose(1, 2, 0, 3).reshape(12544, 128)
    start = {
        "Conv_0": {"kernel": flat["conv1.weight"].transpose(2, 3, 1, 0), "bias": flat["conv1.bias"]},
        "Conv_1": {"kernel": flat["conv2.weight"].transpose(2, 3, 1, 0), "bias": flat["conv2.bias"]},
        "Dense_0": {"kernel": kernel, "bias": flat["linear1.bias"]},
        "Dense_1": {"kernel": flat["linear2.weight"].T, "bias": flat["linear2.bias"]},
    }

    @jax.jit
    def trained(params, x, y):
        def loss(params):
            logits, _ = model.apply(params, {}, x, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        for _ in range(2):  # two batches of the same image
            params = jax.tree.map(lambda w, g: w - job["learning_rate"] * g, params, jax.grad(loss)(params))
        return params

    ends = [trained(start, x[:2], y[:2]) for x, y in zip(inputs, labels, strict=True)]
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *ends)
    expected = np.concatenate(
        [(np.asarray(value) - flat[name]).ravel() for name, value in sorted(jobs.torch_weights(mean).items())]
    )
    got = compare.change(tmp_path)
    assert np.linalg.norm(got - expected) < 1e-4 * np.linalg.norm(expected)


def alone(strategy):
    """What the clients of a small (FL)^2 change in the model in round 1, and that, by a server that stays as it is."""
    config = tiny.config("fl2", network="linear", execution__strategy=strategy, client__batch_size=16)
    experiment = jobs.clients_alone(build(config))
    state, row = experiment.start()
    before = jax.device_get(state.server.weights)
    rounds = experiment.rounds(state, row)
    state, _ = next(rounds)
    first = jax.device_get(state.server.own)
    state, row = next(rounds)
    assert (row["round"], row["client/non_finite"]) == (2, 0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.server.weights), before)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(first)])


def test_clients_alone_start_every_round_from_the_same_model_in_any_layout():
    scanned, separate = alone("scan"), alone("separate")
    assert np.linalg.norm(scanned) > 0
    assert np.linalg.norm(separate - scanned) < 1e-5 * np.linalg.norm(scanned)


PARTS = {
    "CAT": {"method.threshold": "fixed"},
    "consistency": {"method.consistency": "none"},
    "perturbation": {"method.rho": 1e-6},
    "ASAM": {"method.perturbation": "sam"},
    "a hundredth of rho": {"method.rho": 0.101},
    "a hundredth of the consistency": {"method.consistency_weight": 0.99},
    "examples of the consistency": {"method.consistency_on": "accepted"},
    "LSAA": {"method.aggregation": "uniform"},
    "momentum": {"client.optimizer.momentum": 0.0, "client.optimizer.nesterov": False},
    "Nesterov": {"client.optimizer.nesterov": False},
    "weight decay": {"client.optimizer.weight_decay": 0.0},
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The change that (FL)^2's checked job makes in the model, with some settings overridden."""
    job = jobs.FL2 | jobs.FL2_CHECKED | {"kind": "fl2", "warm_up": 0, "precision": "float32"}
    job["layout"] = resolve(Settings())._asdict() | {"devices": 2}

    def run(**overrides):
        config, folder = jobs.fl2_config(job), tmp_path_factory.mktemp("job")
        config.update_from_flattened_dict(overrides)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(jobs.KINDS, "fl2", jobs.KINDS["fl2"]._replace(config=lambda job: config))
            jobs.run(job, folder)
        return compare.change(folder)

    return run, run()


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_fl2_can_be_left_out_within_the_tolerance(checked, part):
    run, whole = checked
    differs = np.linalg.norm(run(**PARTS[part]) - whole) / np.linalg.norm(whole)
    assert differs > 15 * jobs.KINDS["fl2"].tolerance


@pytest.mark.slow
@pytest.mark.parametrize("conv", [name for name in LOWERINGS if name != "winograd"])
def test_rounding_decides_nothing_in_the_checked_job(checked, tmp_path, conv):
    job = jobs.FL2 | jobs.FL2_CHECKED | {"kind": "fl2", "warm_up": 0, "precision": "float32"}
    jobs.run(job | {"layout": resolve(Settings())._asdict() | {"devices": 1, "strategy": "vmap", "conv": conv}}, tmp_path)
    _, whole = checked
    assert np.linalg.norm(compare.change(tmp_path) - whole) < 3e-5 * np.linalg.norm(whole)
