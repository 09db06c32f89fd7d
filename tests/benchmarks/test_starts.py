"""The benchmark of starts: what it runs, and what it reads from the runs."""

import json
import pathlib
import sys
import types

import pytest

from benchmarks import starts


@pytest.fixture
def commands(monkeypatch):
    """The commands that were run, each with its cache; a run leaves a log in place of training."""
    seen = []

    def run(command, *, env, **_):
        options = dict(word.split("=", 1) for word in command[3:])
        folder, cache = pathlib.Path(options["--workdir"]), pathlib.Path(env["JAX_COMPILATION_CACHE_DIR"])
        seen.append((options, cache.exists()))
        cache.mkdir(exist_ok=True)
        folder = folder / "0" if "--config.seeds" in options else folder
        folder.mkdir(parents=True)
        rows = [{"time/round_s": s, "time/compile_s": 7.0, "time/total_s": 100 + s} for s in (-9.0, 1.0, 3.0, 2.0)]
        (folder / "layout.json").write_text(json.dumps({"layout": {"devices": 2}}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(starts, "subprocess", types.SimpleNamespace(run=run))
    return seen


def test_the_first_start_has_an_empty_cache_and_later_ones_have_its(commands, tmp_path, monkeypatch, capsys):
    path = tmp_path / "starts.json"
    monkeypatch.setattr(sys, "argv", ["starts", "--again=2", "--rounds=4", f"--json={path}"])
    starts.main()
    assert [there for _, there in commands] == [False, True, True] * 2
    assert [options.get("--config.seeds") for options, _ in commands] == [None] * 3 + ["4"] * 3
    assert {options["--config.rounds"] for options, _ in commands} == {"4"}
    assert len({options["--workdir"] for options, _ in commands}) == 6
    written = json.loads(path.read_text())
    assert {"command", "commit", "machine", "versions"} <= written.keys()
    one, several = written["results"]
    assert (one["case"], several["case"]) == ("1 seed", "4 seeds")
    assert one["first"]["round_s"] == 2.0  # without the round that compiles
    assert len(several["later"]) == 2
    assert several["later"][0]["compile_s"] == 7.0
    assert one["first"]["wall_s"] - one["first"]["start_s"] == pytest.approx(11.0)  # from the first round's end to the last's
    assert written["device"].startswith("2 x ")
    assert capsys.readouterr().out.count("2.00") >= 4


def test_a_run_that_fails_ends_it(monkeypatch, tmp_path):
    monkeypatch.setattr(starts, "CONFIG", "configs/digits.py:no_such_method")
    with pytest.raises(starts.subprocess.CalledProcessError):
        starts.start(tmp_path, tmp_path / "cache", {"rounds": 2})
