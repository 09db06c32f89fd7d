"""Rounds of five networks, and turns of layouts and checkouts."""

import shutil
import sys

import pytest

from benchmarks import harness, round_time
from fedjax_ssl.experiment.settings import Settings


@pytest.mark.parametrize("name", round_time.WORKLOADS)
def test_a_workload_is_a_config_with_as_many_images_as_it_asks_for(name):
    workload = round_time.WORKLOADS[name]
    settings = Settings.from_dict(round_time.config_of(workload, "strategy=chunked,chunk_size=2", 4, 3))
    assert (settings.execution.strategy, settings.execution.chunk_size, settings.client.steps) == ("chunked", 2, 3)
    assert workload.images == workload.batch_size + workload.method.get("unlabeled_batch_size", workload.batch_size)
    assert (settings.eval_every, settings.rounds) == (10**6, 10**6)


@pytest.mark.slow
def test_a_real_run_in_two_checkouts(monkeypatch, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(harness.ROOT / "fedjax_ssl", other / "fedjax_ssl", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["--workloads", "fl2_cnn", "--layouts", "usual", "conv=none", "--cohort", "2", f"--compare-with={other}"]
    monkeypatch.setattr(round_time, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["round_time.py", *words, f"--json={tmp_path / 'results.json'}"])
    with pytest.raises(SystemExit, match="1"):
        round_time.main()
    (run,) = harness.load(tmp_path / "results.json")
    this, copy, *failed = run["results"]
    assert ["execution.conv: got 'none'" in one["error"] for one in failed] == [True, True]
    assert this["repeats"] == copy["repeats"] >= round_time.LEAST
    assert 0.1 < copy["ratio"] < 10
    assert (copy["case"]["code"], copy["program_bytes"], copy["commit"]) == ("other", this["program_bytes"], None)
    assert 0 < this["share"] < 1.5
    assert run["ceilings"]["flops"]["float32 default"] > 1e8
