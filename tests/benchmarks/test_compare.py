"""The comparison with peers: what they are handed, who is timed, what is printed. No peer is installed here."""

import json
import pathlib

import jax
import numpy as np
import optax
import pytest

import fedjax_ssl
from benchmarks import compare
from fedjax_ssl import models

NAMES = [compare.OURS, "PyTorch", "pfl, 1 processes", "pfl, 2 processes", "Flower, 2 actors"]


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
        monkeypatch.setattr(compare.os, "sched_setaffinity", lambda *_: None)
        monkeypatch.setattr(
            "sys.argv", ["compare", f"--peers={tmp_path}", f"--json={path}", "--only", "cnn", "--threads=2", *words]
        )
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
    assert [line[10:34].strip() for line in lines] == NAMES * 2
    ratios = {(r["cohort"], r["name"]): r["times_ours"] for r in written["results"]}
    assert ratios == {(m, name): pytest.approx(s) for m in (10, 50) for name, s in zip(NAMES, (1, 1.5, 2, 2, 4), strict=True)}
    assert [len(r["seconds"]) for r in written["results"]] == [12] * 10
    assert [r["images_per_s"] for r in written["results"]][::5] == [pytest.approx(m * 50 / 0.2) for m in (10, 50)]
    assert "--peers" not in written["command"]
    checked, timed = jobs[0][1], jobs[5][1]
    assert (checked["batch_size"], checked["dropout"], checked["cohort"]) == (10, False, checked["clients"])
    assert (timed["batch_size"], timed["dropout"], timed["cohort"], timed["clients"]) == (10, True, 10, 1000)
    assert [job["processes"] for _, job in jobs[:5]] == [1, 1, 1, 2, 2]


def test_a_peer_whose_model_differs_is_not_timed(compared):
    status, lines, written, jobs = compared(SECONDS, {"pfl": 1.001}, "--cohort", "10", "--repeats=1")
    assert status == 1
    assert lines[2][34:].strip() == "its model differs by 1.0e-03"
    assert [program for program, _ in jobs].count("pfl") == 2
    assert "round_s" not in written["results"][2]
    assert written["results"][1]["difference"] == 0.0


def test_a_peer_that_fails_says_why_and_the_others_go_on(compared):
    status, lines, _, _ = compared(SECONDS | {"flower": "fails"}, {}, "--cohort", "10")
    assert status == 1
    assert lines[4][34:].strip() == "no such module"
    assert lines[3].split()[-2] == "2.00"


def test_nothing_is_compared_where_ours_fails(compared):
    status, lines, written, jobs = compared(SECONDS | {compare.OURS: "fails"}, {}, "--cohort", "10")
    assert status == 1
    assert [line[34:].strip() for line in lines] == ["no such module", *["not compared, as fedjax_ssl failed"] * 4]
    assert len(jobs) == 5
    assert not any("round_s" in result for result in written["results"])


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_is_run_by_its_own_interpreter_away_from_the_gpu(tmp_path, fails):
    python = tmp_path / "pfl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    ends = 'echo "ValueError: what is wrong" >&2; echo "===" >&2; exit 1' if fails else ""
    python.write_text(f"""#!/bin/sh
for folder; do :; done
echo "{{\\"seconds\\": [1.5], \\"words\\": \\"$*\\", \\"jax\\": \\"$JAX_PLATFORMS\\"}}" > $folder/report.json
{ends}
""")
    python.chmod(0o755)
    job = {"kind": "cnn", "device": "cpu", "processes": 2}
    report = compare.launch("pfl", job, tmp_path / "job", tmp_path)
    if fails:
        assert report == {"error": "ValueError: what is wrong"}
        return
    assert json.loads((tmp_path / "job" / "job.json").read_text()) == job
    assert (report["seconds"], report["jax"]) == ([1.5], "cpu")
    assert report["words"].startswith("-m torch.distributed.run --standalone --nproc_per_node=2 ")
    assert report["words"].endswith(f"run_pfl.py {tmp_path / 'job'}")


def test_the_cnn_here_is_federated_averaging_on_what_the_peers_are_handed(tmp_path, monkeypatch):
    checked = compare.CNN_CHECKED | {
        "cohort": 10,
        "clients": 10,
        "per_client": 4,
        "batch_size": 2,
        "rounds": 1,
        "learning_rate": 0.2,
    }
    job = compare.CNN | checked | {"warm_up": 0, "precision": "float32"}
    monkeypatch.setattr(fedjax_ssl, "tune", lambda experiment: experiment)
    report = compare.run_cnn(job, tmp_path)
    assert len(report["seconds"]) == 1
    assert report["layout"]["conv"] == "winograd"
    with np.load(tmp_path / "data.npz") as data:
        images, labels = data["images"], data["labels"]
        inputs = (np.float32(images) / 255 - data["mean"]) / data["std"]
    assert all(len(np.unique(one.reshape(4, -1), axis=0)) == 1 for one in images)
    assert sorted(labels[:, 0]) == list(range(10))
    model = models.build("emnist_cnn", num_classes=10, conv="grouped", variant="plain")
    start, _ = model.init(jax.random.key(0), (32, 32, 3))
    with np.load(tmp_path / "data.npz") as data:
        names = compare.torch_weights(start)
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
        [(np.asarray(value) - flat[name]).ravel() for name, value in sorted(compare.torch_weights(mean).items())]
    )
    got = compare.change(tmp_path)
    assert np.linalg.norm(got - expected) < 1e-4 * np.linalg.norm(expected)
