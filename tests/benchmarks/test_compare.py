"""The comparison with peers: what they are handed, who is timed, what is printed. No peer is installed here."""

import json
import pathlib

import jax
import numpy as np
import pytest

from benchmarks import compare
from fedjax_ssl import models

NAMES = [compare.OURS, "PyTorch", "pfl", "Flower"]


def test_the_cnns_weights_are_in_pytorchs_layout():
    params, _ = models.build("emnist_cnn", num_classes=10).init(jax.random.key(0), (32, 32, 3))
    params = jax.tree.map(np.asarray, params)
    got = compare.torch_weights(params)
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
    got = compare.torch_wide_resnet(params, stats)
    norm = ("weight", "bias", "running_mean", "running_var")
    blocks = {f"blocks.{b}.norm{i}.{key}" for b in range(3) for i in (1, 2) for key in norm}
    convs = {f"blocks.{b}.{name}.weight" for b in range(3) for name in ("conv1", "conv2", "shortcut")}
    ends = {"conv.weight", "linear.weight", "linear.bias", *(f"norm.{key}" for key in norm)}
    assert set(got) == blocks | convs | ends
    np.testing.assert_array_equal(got["blocks.1.conv1.weight"][5, 7, 0, 2], params["Block_1"]["Conv_0"]["kernel"][0, 2, 7, 5])
    assert not any("running" in name for name in compare.torch_wide_resnet(params))


def leave(folder: pathlib.Path, change: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data.npz").exists():
        np.savez(folder / "data.npz", **{"w:a": np.ones(3), "w:b": np.zeros((2, 2))})
    np.savez(folder / "weights.npz", a=np.full(3, 1 + change), b=np.full((2, 2), change))


@pytest.fixture
def compared(monkeypatch, tmp_path, capsys):
    """Compares programs that take given seconds a round and change the model by given amounts: (exit status, lines, JSON)."""

    def run(seconds, changes, *words):
        jobs = []

        def launch(program, job, folder, peers):
            jobs.append((program, job))
            if seconds[program] == "fails":
                return {"error": "no such module"}
            leave(folder, changes.get(program, 1.0))
            return {"seconds": [seconds[program]] * job["rounds"], "versions": {}}

        path = tmp_path / "result.json"
        monkeypatch.setattr(compare, "install", lambda peers, torch: None)
        monkeypatch.setattr(compare, "launch", launch)
        monkeypatch.setattr("sys.argv", ["compare", f"--peers={tmp_path}", f"--json={path}", "--only", "cnn", *words])
        status = 0
        try:
            compare.main()
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().out.splitlines()[1:], json.loads(path.read_text()), jobs

    return run


SECONDS = {compare.OURS: 0.2, "pytorch": 0.3, "pfl": 0.4, "flower": 0.8}


def test_ratios_are_to_ours_at_each_cohort(compared):
    status, lines, written, jobs = compared(SECONDS, {}, "--rounds=4", "--repeats=3")
    assert status == 0
    assert [line.split()[2] for line in lines] == NAMES * 2
    ratios = {(r["cohort"], r["name"]): r["times_ours"] for r in written["results"]}
    assert ratios == {
        (m, name): pytest.approx(s / 0.2) for m in (10, 50) for name, s in zip(NAMES, SECONDS.values(), strict=True)
    }
    assert [len(r["seconds"]) for r in written["results"]] == [12] * 8
    assert [r["images_per_s"] for r in written["results"]][::4] == [pytest.approx(m * 50 / 0.2) for m in (10, 50)]
    checked, timed = jobs[0][1], jobs[4][1]
    assert (checked["batch_size"], checked["dropout"], checked["cohort"]) == (checked["per_client"], False, checked["clients"])
    assert (timed["batch_size"], timed["dropout"], timed["cohort"], timed["clients"]) == (10, True, 10, 1000)


def test_a_peer_whose_model_differs_is_not_timed(compared):
    status, lines, written, jobs = compared(SECONDS, {"pfl": 1.001}, "--cohort", "10", "--repeats=1")
    assert status == 1
    assert lines[2].split(maxsplit=3)[3] == "its model differs by 1.0e-03"
    assert [program for program, _ in jobs].count("pfl") == 1
    assert "round_s" not in written["results"][2]
    assert written["results"][1]["difference"] == 0.0


def test_a_peer_that_fails_says_why_and_the_others_go_on(compared):
    status, lines, _, _ = compared(SECONDS | {"flower": "fails"}, {}, "--cohort", "10")
    assert status == 1
    assert lines[3].split(maxsplit=3)[3] == "no such module"
    assert lines[2].split()[-2] == "2.00"


def test_the_cnn_here_runs_as_it_is_handed(tmp_path):
    job = compare.CNN | compare.CNN_CHECKED | {"clients": 2, "cohort": 2, "per_client": 4, "batch_size": 4, "warm_up": 1}
    seconds = compare.run_cnn(job, tmp_path)
    assert len(seconds) == 2
    with np.load(tmp_path / "data.npz") as data:
        assert data["images"].shape == (2, 4, 32, 32, 3)
        assert len(np.unique(data["images"].reshape(8, -1), axis=0)) == 8
    assert 0 < np.linalg.norm(compare.change(tmp_path)) < 1
