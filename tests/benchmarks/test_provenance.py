"""Where a result says that it is from."""

import types

import jax
import pytest

from benchmarks import provenance


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--workdir=/tmp/a b", "--config.data.data_dir=/b"], "--workdir=DIR --config.data.data_dir=DIR"),
        (["--workdir", "/tmp/a b", "--json", "/b"], "--workdir DIR --json FILE"),
    ],
)
def test_a_result_says_where_it_is_from_but_for_names_of_folders(monkeypatch, words, named):
    monkeypatch.setattr("sys.argv", ["/a/benchmarks/tables.py", "fl2_ablation", *words, "--rows=CAT + SACR", "--jobs=2"])
    got = provenance.provenance()
    assert got["command"] == f"python -m benchmarks.tables fl2_ablation {named} '--rows=CAT + SACR' --jobs=2"
    assert got["versions"]["jax"] == jax.__version__
    assert got["device"] == f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    assert got["commit"] is None or len(got["commit"].rstrip("+")) == 40
    assert "cores" in got["machine"]
    monkeypatch.setattr(provenance, "BEGAN", provenance.BEGAN - 100)
    assert 100 <= provenance.provenance()["elapsed_s"] - got["elapsed_s"] < 110


def test_of_an_accelerator_what_jax_was_built_for_is_named(monkeypatch):
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    monkeypatch.setattr(
        jax, "devices", lambda: [types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", client=client)]
    )
    assert provenance.devices(1) == "1 x NVIDIA H200 (cuda 13000)"
