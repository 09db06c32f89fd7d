"""Where a result says that it is from."""

import jax
import pytest

from benchmarks import provenance


@pytest.mark.parametrize(
    "words", [["--workdir=/tmp/a b", "--config.data.data_dir=/b"], ["--workdir", "/tmp/a b", "--json", "/b"]]
)
def test_a_result_says_where_it_is_from_but_for_folders(monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["/a/benchmarks/tables.py", "fl2_ablation", *words, "--rows=CAT + SACR", "--jobs=2"])
    got = provenance.provenance()
    assert got["command"] == "python -m benchmarks.tables fl2_ablation '--rows=CAT + SACR' --jobs=2"
    assert got["versions"]["jax"] == jax.__version__
    assert got["device"] == f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    assert got["commit"] is None or len(got["commit"].rstrip("+")) == 40
    assert "cores" in got["machine"]
