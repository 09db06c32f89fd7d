"""The benchmark of starts: what it runs, and what it reads from the runs."""

import pathlib
import subprocess
import types

import pytest

from benchmarks import starts
from fedjax_ssl.experiment.files import MetricsLog, write_json


def test_the_first_start_has_an_empty_cache_and_later_ones_have_its(monkeypatch):
    seen = []

    def run(command, *, env, **_):
        options = dict(word.split("=", 1) for word in command[3:])
        folder, cache = pathlib.Path(options["--workdir"]), pathlib.Path(env["JAX_COMPILATION_CACHE_DIR"])
        seen.append((options, cache.exists()))
        cache.mkdir(exist_ok=True)
        folder = folder / "0" if "--config.seeds" in options else folder
        for number, s in enumerate((-9.0, 1.0, 3.0, 2.0), start=1):
            MetricsLog(folder).append({"round": number, "time/round_s": s, "time/compile_s": 7.0, "time/total_s": 100 + s})
        write_json(folder / "summary.json", {"device": "2 x cpu"})

    monkeypatch.setattr(starts, "subprocess", types.SimpleNamespace(run=run))
    monkeypatch.setattr(starts, "LATER", 2)
    one, several = map(starts.measure, (1, 4))
    assert [there for _, there in seen] == [False, True, True] * 2
    assert [options.get("--config.seeds") for options, _ in seen] == [None] * 3 + ["4"] * 3
    assert len({options["--workdir"] for options, _ in seen}) == 6
    assert (one["case"], several["case"], one["device"]) == ({"seeds": 1}, {"seeds": 4}, "2 x cpu")
    assert (one["first"]["round_s"], len(several["later"])) == (2.0, 2)  # without the round that compiles
    assert one["first"]["wall_s"] - one["first"]["start_s"] == pytest.approx(11.0)  # from the first round's end to the last's
    assert starts.rows(several)[1][0] == "4 seeds, later"


@pytest.mark.slow
def test_a_real_start_and_one_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(starts, "ROUNDS", 2)
    monkeypatch.setattr(starts, "LATER", 1)
    one = starts.measure(1)
    assert one["first"]["wall_s"] > one["first"]["start_s"] > one["first"]["compile_s"] > one["later"][0]["compile_s"] > 0
    monkeypatch.setattr(starts, "CONFIG", "configs/digits.py:no_such_method")
    with pytest.raises(subprocess.CalledProcessError):
        starts.start(tmp_path, tmp_path / "cache", 1)
