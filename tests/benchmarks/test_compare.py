"""The comparison with peers: who is timed, and what the peers are handed. No peer is installed here."""

import types

import jax
import numpy as np
import pytest

from benchmarks import compare, harness, programs
from benchmarks.compare import OURS
from fedjax_ssl import models

SECONDS = {OURS: 0.2, "PyTorch": 0.7, "PyTorch, channels last": 0.6, "pfl, 1 processes": 0.5, "pfl, 2 processes": 0.4}
SECONDS |= {"Flower, 1 actors": 0.9, "Flower, 2 actors": 0.8}


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Compares programs that take given seconds a round and change the model by given amounts: (results, what was run)."""

    def run(seconds, changes=()):
        ran = []

        def report(name, job, folder):
            ran.append((name, job))
            np.savez(folder / "weights.npz", a=np.full(3, 1 + dict(changes).get(name, 1.0)))
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
        results = compare.compared("cnn", own, 3, tmp_path, tmp_path / "scratch")
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
        assert compare.rows(one)[0][4] == ratio  # the interval has no length
    checks = [job for _, job in ran if not job["warm_up"]]
    assert len(checks) == len(SECONDS)  # once for all cohorts
    assert {(job["clients"], job["cohort"], job["dropout"]) for job in checks} == {(10, 10, False)}
    timed = [name for name, job in ran if job["warm_up"] and job["cohort"] == 10]
    assert timed[0] == OURS
    assert sorted(timed[7:12]) == sorted(timed[12:]) == [name for name in sorted(SECONDS) if "1 " not in name]
    assert timed[7:12] != timed[12:]


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


@pytest.mark.slow
def test_feddures_clients_have_both_kinds_of_images_and_a_regulator_of_their_own(tmp_path):
    job = job_of("feddure", cohort=2)
    session = programs.Session()
    session.build(compare.config_of(job), {"count": 200, "shape": (8, 8, 3)})
    session.write_start(str(tmp_path))
    with np.load(tmp_path / "data.npz") as data:
        assert (data["images"].shape, data["unlabeled"].shape) == ((2, 10, 8, 8, 3), (2, 90, 8, 8, 3))
        regulators = session.experiment.start()[0].clients.w
        assert np.array_equal(data["f:hidden.weight"][1].T, regulators["hidden"]["kernel"][1])
        assert np.array_equal(data["f:output.bias"][0], regulators["output"]["bias"][0])
        assert data["w:convs.7.weight"].shape == (512, 512, 3, 3)


@pytest.mark.ci
def test_weights_have_pytorchs_names_and_layouts():
    params, stats = models.build("wide_resnet", num_classes=10, depth=10).init(jax.random.key(0), (32, 32, 3))
    got = programs.torch_wide_resnet(types.SimpleNamespace(params=params, stats=stats))
    norm = ("weight", "bias", "running_mean", "running_var")
    blocks = {f"blocks.{b}.norm{i}.{key}" for b in range(3) for i in (1, 2) for key in norm}
    convs = {f"blocks.{b}.{name}.weight" for b in range(3) for name in ("conv1", "conv2", "shortcut")}
    assert set(got) == blocks | convs | {"conv.weight", "linear.weight", "linear.bias", *(f"norm.{key}" for key in norm)}
    assert got["blocks.1.conv1.weight"][5, 7, 0, 2] == params["Block_1"]["Conv_0"]["kernel"][0, 2, 7, 5]
    params, _ = models.build("emnist_cnn", num_classes=10).init(jax.random.key(0), (32, 32, 3))
    got = programs.torch_cnn(types.SimpleNamespace(params=params))
    channel, row, column = 5, 3, 9
    ours = params["Dense_0"]["kernel"][(row * 14 + column) * 64 + channel, 100]
    assert got["linear1.weight"][100, (channel * 14 + row) * 14 + column] == ours


def job_of(kind, **changes):
    fixed = {"kind": kind, "warm_up": 0, "precision": "float32", "checked": True, "device": "cpu"}
    return compare.JOBS[kind] | compare.CHECKED[kind] | fixed | changes


@pytest.mark.slow
@pytest.mark.parametrize("part", [{"rho": 0.101}, {"confidence": 0.5}])
def test_no_part_of_fl2_can_be_otherwise_within_the_tolerance(tmp_path, part):
    folders = [tmp_path / name for name in ("whole", "other", "again")]
    for folder, own in zip(folders, ({}, part, {}), strict=True):
        folder.mkdir()
        assert "error" not in compare.run_ours(job_of("fl2", cohort=2, **own), folder)
    assert compare.difference(folders[0], folders[2]) < compare.TOLERANCE / 3
    assert compare.difference(folders[0], folders[1]) > 10 * compare.TOLERANCE
