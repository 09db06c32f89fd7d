"""The benchmark of FedDure's meta-gradient: its table, and one of its programs on a network that compiles in seconds."""

import json
import sys

from benchmarks import meta_gradient

SMALL = {"linear": ({"name": "linear"}, (4, 4, 1), 2, 3, 2)}


def test_a_program_runs_the_steps_of_a_client(monkeypatch):
    monkeypatch.setattr(meta_gradient, "NETWORKS", SMALL)
    output = meta_gradient.program("linear", "direct", 0)()
    assert output.metrics["client/loss"].weight == 2 * 2
    assert output.metrics["client/unlabeled_loss"].weight == 2 * 3


def test_it_prints_a_table_and_writes_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(meta_gradient, "NETWORKS", SMALL)
    monkeypatch.setattr(meta_gradient, "program", lambda *_: lambda: sum(range(1000)))
    monkeypatch.setattr(sys, "argv", ["meta_gradient", "--repeats=2", f"--json={tmp_path / 'out.json'}"])
    meta_gradient.main()
    table = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "out.json").read_text())
    assert [line["case"] for line in written["results"]] == list(meta_gradient.CASES)
    assert len(table) == 1 + len(meta_gradient.CASES) + 1
    for line in written["results"]:
        assert line["spread_ms"][0] <= line["step_ms"] <= line["spread_ms"][1]
    assert written["results"][0]["step_ratio"] == written["results"][0]["processor_ratio"] == 1
    assert written["versions"]["jax"]
    assert set(written["meta_gradient_x_plain"]["linear"]) == {"direct", "nested"}


def test_the_meta_gradients_cost_is_what_a_step_has_more_than_one_without_f_reg():
    lines = [{"case": case, "processor_ms": ms} for case, ms in (("plain", 4), ("direct", 10), ("nested", 16), ("no_f", 6))]
    assert meta_gradient.meta_cost(lines, "direct") == 1
    assert meta_gradient.meta_cost(lines, "nested") == 2.5
