"""The comparison with peers: who is timed, and what the peers are handed. No peer is installed here."""

import jax
import numpy as np
import optax
import pytest

from benchmarks import compare, harness, programs
from benchmarks.compare import OURS
from fedjax_ssl import models

SECONDS = {OURS: 0.2, "pfl, 1 processes": 0.5, "pfl, 2 processes": 0.4, "Flower, 1 actors": 0.9, "Flower, 2 actors": 0.8}


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Compares programs that take given seconds a round and change the model by given amounts: (results, what was run)."""

    def run(seconds, changes=(), repeats=3):
        ran = []

        def report(name, job, folder):
            ran.append((name, job))
            change = dict(changes).get(name, 1.0)
            np.savez(folder / "weights.npz", a=np.full(3, 1 + change))
            if isinstance(seconds[name], str):
                return {"error": seconds[name]}
            turn = sum(past == name and of["warm_up"] for past, of in ran)
            return {"seconds": [seconds[name] * (1 + turn % 2)] * job["rounds"], "device": "2 x cpu"}

        def ours(job, folder):
            np.savez(folder / "data.npz", **{"w:a": np.ones(3)})
            return report(OURS, job, folder)

        monkeypatch.setattr(compare, "run_ours", ours)
        monkeypatch.setattr(compare, "run_peer", lambda rival, job, folder, peers: report(rival.name, job, folder))
        own = {"device": "cpu", "threads": 2, "precision": "float32"}
        results = compare.compared("cnn", own, repeats, tmp_path, tmp_path / "scratch")
        return {(r["case"]["cohort"], r["case"]["name"]): r for r in results}, ran

    return run


def test_programs_take_turns_and_the_fastest_number_of_processes_goes_on(compared):
    results, ran = compared(SECONDS)
    assert list(results) == [(m, name) for m in (10, 50) for name in SECONDS]
    for (_, name), one in results.items():
        assert [len(turn) for turn in one["turns"]] == [5] * (1 if "1 " in name else 3)
        assert one["ratio"] == pytest.approx(SECONDS[name] / 0.2)  # of turns of which each other one is twice as long
        assert one["least_and_greatest"] == pytest.approx([one["ratio"]] * 2)
        assert one["difference"] == 0.0
        ratio = harness.number(one["ratio"])
        assert compare.rows(one)[0][4] == f"{ratio} ({ratio} to {ratio})"
    checks = [job for _, job in ran if not job["warm_up"]]
    assert len(checks) == len(SECONDS)  # once for all cohorts
    assert {(job["clients"], job["cohort"], job["dropout"]) for job in checks} == {(10, 10, False)}
    timed = [name for name, job in ran if job["warm_up"] and job["cohort"] == 10]
    assert timed[0] == OURS
    assert sorted(timed[5:8]) == sorted(timed[8:]) == [name for name in sorted(SECONDS) if "1 " not in name]
    assert timed[5:8] != timed[8:]


def test_what_disagrees_or_fails_says_why_and_the_others_go_on(compared):
    results, _ = compared(SECONDS | {"pfl, 2 processes": "no such module"}, changes={"pfl, 1 processes": 1.001})
    errors = {name: one["error"] for (cohort, name), one in results.items() if cohort == 50 and "error" in one}
    assert errors == {"pfl, 1 processes": "its model differs by 1.0e-03", "pfl, 2 processes": "no such module"}
    results, ran = compared(SECONDS | {OURS: "no such module"})
    assert {one["error"] for one in results.values()} == {"no such module", "not compared, as fedjax_ssl failed"}
    assert {name for name, _ in ran} == {OURS}


def test_a_peer_that_cannot_be_installed_says_why(tmp_path):
    (tmp_path / "pfl").write_text("no folder")
    assert compare.run_peer(compare.Rival("pfl", "pfl"), {}, tmp_path, tmp_path)["error"].startswith("not installed: ")


def test_a_wide_resnets_weights_have_pytorchs_names():
    weights = models.build("wide_resnet", num_classes=10, depth=10).init(jax.random.key(0), (32, 32, 3))
    got = programs.torch_wide_resnet(type("Weights", (), dict(zip(("params", "stats"), weights, strict=True))))
    norm = ("weight", "bias", "running_mean", "running_var")
    blocks = {f"blocks.{b}.norm{i}.{key}" for b in range(3) for i in (1, 2) for key in norm}
    convs = {f"blocks.{b}.{name}.weight" for b in range(3) for name in ("conv1", "conv2", "shortcut")}
    assert set(got) == blocks | convs | {"conv.weight", "linear.weight", "linear.bias", *(f"norm.{key}" for key in norm)}
    np.testing.assert_array_equal(
        got["blocks.1.conv1.weight"][5, 7, 0, 2], weights[0]["Block_1"]["Conv_0"]["kernel"][0, 2, 7, 5]
    )


def params_of(arrays):
    """The CNN's parameters from PyTorch's layouts."""

    def conv(name):
        return {"kernel": arrays[f"{name}.weight"].transpose(2, 3, 1, 0), "bias": arrays[f"{name}.bias"]}

    kernel = arrays["linear1.weight"].T.reshape(64, 14, 14, 128).transpose(1, 2, 0, 3).reshape(12544, 128)
    dense = {"Dense_0": {"kernel": kernel, "bias": arrays["linear1.bias"]}}
    return {"Conv_0": conv("conv1"), "Conv_1": conv("conv2"), **dense} | {
        "Dense_1": {"kernel": arrays["linear2.weight"].T, "bias": arrays["linear2.bias"]}
    }


@pytest.mark.slow
def test_the_cnn_here_is_federated_averaging_on_what_the_peers_are_handed(tmp_path):
    job = compare.JOBS["cnn"] | compare.CHECKED["cnn"] | {"kind": "cnn", "warm_up": 0, "precision": "float32", "checked": True}
    job |= {"cohort": 10, "clients": 10, "per_client": 4, "batch_size": 2, "rounds": 1, "learning_rate": 0.2, "device": "cpu"}
    report = compare.run_ours(job, tmp_path)
    assert len(report["seconds"]) == 1
    with np.load(tmp_path / "data.npz") as data, np.load(tmp_path / "weights.npz") as end:
        images, labels = data["images"], data["labels"]
        inputs = (np.float32(images) / 255 - data["mean"]) / data["std"]
        start = params_of({name.removeprefix("w:"): data[name] for name in data.files if name.startswith("w:")})
        got = params_of(end)
    assert all(len(np.unique(one.reshape(4, -1), axis=0)) == 1 for one in images)
    assert sorted(labels[:, 0]) == list(range(10))
    model = models.build("emnist_cnn", num_classes=10, conv="xla", variant="plain")

    @jax.jit
    def trained(params, x, y):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, {}, x, train=True)[0], y).mean()

        for _ in range(2):  # two batches of the same image
            params = jax.tree.map(lambda w, g: w - job["learning_rate"] * g, params, jax.grad(loss)(params))
        return params

    ends = [trained(start, x[:2], y[:2]) for x, y in zip(inputs, labels, strict=True)]
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *ends)
    both = [
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.tree.map(np.subtract, one, start))]) for one in (got, mean)
    ]
    assert np.linalg.norm(both[0] - both[1]) < 1e-4 * np.linalg.norm(both[1])


@pytest.mark.slow
@pytest.mark.parametrize("part", [{"rho": 0.101}, {"confidence": 0.5}])
def test_no_part_of_fl2_can_be_otherwise_within_the_tolerance(tmp_path, part):
    job = compare.JOBS["fl2"] | compare.CHECKED["fl2"] | {"kind": "fl2", "warm_up": 0, "precision": "float32", "checked": True}
    job |= {"cohort": 2, "device": "cpu"}
    folders = [tmp_path / name for name in ("whole", "other", "again")]
    for folder, own in zip(folders, ({}, part, {}), strict=True):
        folder.mkdir()
        assert "error" not in compare.run_ours(job | own, folder)
    assert compare.difference(folders[0], folders[2]) < compare.TOLERANCE / 3
    assert compare.difference(folders[0], folders[1]) > 10 * compare.TOLERANCE
