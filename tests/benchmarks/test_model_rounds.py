"""What the benchmark of networks writes down, and when it fails."""

import json
import types

import pytest

from benchmarks import model_rounds

ROW = {
    "dataset": "mnist", "parameters": 10, "compile_s": 1.0, "round_s": 0.2, "quartiles_s": [0.1, 0.3], "peak_gb": 1.0,
    "loss": [2.0, 1.9, 1.8],
}  # fmt: skip


@pytest.mark.parametrize("stuck", [False, True])
def test_results_say_where_they_are_from_and_how_they_were_measured(monkeypatch, tmp_path, stuck):
    def run(command, **_):
        network = command[-1].partition("=")[2]
        row = ROW | {"network": network} | ({"loss": [2.0, 1.0, 2.0]} if stuck and network == "mlp" else {})
        return types.SimpleNamespace(returncode=0, stdout=f"a line of something else\n{json.dumps(row)}\n")

    path = tmp_path / "out.json"
    monkeypatch.setattr(model_rounds.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["model_rounds.py", "--data_dir=x", "--only=m", f"--json={path}"])
    if stuck:
        with pytest.raises(SystemExit, match="the loss did not fall: mlp"):
            model_rounds.main()
    else:
        model_rounds.main()
    written = json.loads(path.read_text())
    assert {"commit", "machine", "device", "versions"} < written.keys()
    assert (written["warm_up_rounds"], written["timed_rounds"]) == (1, 3)
    assert [row["network"] for row in written["results"]] == ["mnist_cnn", "mlp"]
    assert written["results"][0]["quartiles_s"] == [0.1, 0.3]
