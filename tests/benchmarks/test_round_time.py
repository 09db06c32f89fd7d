"""Rounds of five networks: their arithmetic, and turns of layouts and checkouts."""

import argparse
import shutil
import sys

import pytest

from benchmarks import harness, programs, round_time
from fedjax_ssl.experiment.settings import Settings

MOST = {"flops": {"float32 default": 1e9, "bfloat16 default": 2e9}, "bandwidth": 1e9}


def test_a_forward_passs_arithmetic_is_its_direct_convolutions():
    got = programs.Session().forward_flops({"name": "emnist_cnn", "variant": "plain"}, (32, 32, 3))
    products = 30 * 30 * 32 * 9 * 3 + 28 * 28 * 64 * 9 * 32 + 12544 * 128 + 128 * 10
    assert 2 * products < got < 1.02 * 2 * products  # besides them sums of biases, ReLU and pooling


@pytest.mark.parametrize("name", round_time.WORKLOADS)
def test_a_workload_is_a_config_with_as_many_images_as_it_asks_for(name):
    workload = round_time.WORKLOADS[name]
    settings = Settings.from_dict(round_time.config_of(workload, "strategy=chunked,chunk_size=2", 4, 3))
    settings.method_options()
    assert (settings.execution.strategy, settings.execution.chunk_size, settings.client.steps) == ("chunked", 2, 3)
    assert workload.images == workload.batch_size + workload.method.get("unlabeled_batch_size", workload.batch_size)
    assert (settings.eval_every, settings.rounds) == (10**6, 10**6)


class Stand(harness.Worker):
    """A worker whose rounds take as long as its checkout's name says; the layout `conv=none` fails."""

    def __init__(self, package):
        self.package, self.seconds = package, 2.0 if package == harness.ROOT else 3.0

    def ask(self, request, **arguments):
        if request == "build":
            if arguments["config"]["execution"] == {"conv": "none"}:
                raise harness.WorkerError("no such conv")
            self.seconds *= 2 if arguments["config"]["execution"] else 1
            return {"package": str(self.package)}
        if request in ("rounds", "evaluate"):
            self.passes = getattr(self, "passes", 0) + arguments["number"]
            costs = {"cost/forward_passes": 5 * self.passes, "cost/backward_passes": 2 * self.passes}
            return [{"seconds": self.seconds, **costs}] * arguments["number"]
        return {"about": {"program_bytes": 1, "compile_s": 2.0, "device": "2 x cpu"}, "forward_flops": 1e8}[request]

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("evaluations", [None, [10]])
def test_layouts_and_checkouts_take_turns_and_are_compared_with_the_first(monkeypatch, tmp_path, evaluations):
    monkeypatch.setattr(round_time, "Worker", Stand)
    monkeypatch.setattr(round_time, "SECONDS", 0.0)
    layouts = ["usual", "conv=none", "dtype=bfloat16"]
    arguments = argparse.Namespace(layouts=layouts, compare_with=tmp_path, cohort=4, on_cpu=True, evaluations=evaluations)
    found = round_time.measure("fl2_cnn", arguments, MOST)
    cases = [(one["case"]["layout"], one["case"]["code"]) for one in found]
    assert cases == [(layout, code) for layout in layouts for code in ("this", "other")]
    assert [one.get("error") for one in found] == [None, None, "no such conv", "no such conv", None, None]
    assert [one["ratio"] for one in found if "ratio" in one] == [1.0, 1.5, 2.0, 3.0]
    flops = 1e8 * round_time.EVALUATED if evaluations else 1e8 * (5 + 2 * 2)
    assert found[0]["share"] == pytest.approx(flops / 2.0 / 1e9)
    assert found[4]["share"] == pytest.approx(flops / 4.0 / 2e9)
    of = "evaluate" if evaluations else "rounds"
    assert [round_time.rows(one)[0][:3] for one in found] == [[of, "fl2_cnn", "4, 4"]] * 6
    assert round_time.rows(found[1])[0][3:6] == ["usual, at unknown", "3 (3 to 3)", "1.5 (1.5 to 1.5)"]


@pytest.mark.slow
def test_a_real_run_in_two_checkouts(monkeypatch, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(harness.ROOT / "fedjax_ssl", other / "fedjax_ssl", ignore=shutil.ignore_patterns("__pycache__"))
    words = ["--workloads", "fl2_cnn", "--layouts", "usual", "--cohort", "2", f"--compare-with={other}"]
    monkeypatch.setattr(round_time, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["round_time.py", *words, f"--json={tmp_path / 'results.json'}"])
    round_time.main()
    (run,) = harness.load(tmp_path / "results.json")
    this, copy = run["results"]
    assert this["repeats"] == copy["repeats"] >= round_time.LEAST
    assert 0.1 < copy["ratio"] < 10
    assert (copy["case"]["code"], copy["program_bytes"], copy["commit"]) == ("other", this["program_bytes"], None)
    assert 0 < this["share"] < 1.5
    assert run["ceilings"]["flops"]["float32 default"] > 1e8
