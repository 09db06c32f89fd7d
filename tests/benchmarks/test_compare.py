"""The comparison with peers: who is timed, and what is printed. No peer is installed here."""

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

from benchmarks import compare, jobs, programs
from benchmarks.programs import OURS, Environments

PYTORCH = ["PyTorch", "PyTorch, channels last"]
NAMES = [OURS, *PYTORCH, "pfl, 1 processes", "pfl, 2 processes", "Flower, 1 actors", "Flower, 2 actors"]


def leave(folder: pathlib.Path, change: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data.npz").exists():
        np.savez(folder / "data.npz", **{"w:a": np.ones(3), "w:b": np.zeros((2, 2))})
    np.savez(folder / "weights.npz", a=np.full(3, 1 + change), b=np.full((2, 2), change))


class Programs:
    """Stands in for the programs: they take given seconds a round and change the model by given amounts.

    Attributes:
        jobs: (program, job), in the order in which they were run.
        slow: programs that never end.
        usual: the lowering that ours has where nothing is said; a search finds `found`.
    """

    def __init__(self, seconds, changes):
        self.seconds, self.changes, self.jobs, self.slow, self.usual = seconds, changes, [], (), "found"

    def launch(self, rival, job, folder, environments, timeout):
        self.jobs.append((rival.name, job | rival.own))
        seconds = self.seconds.get(rival.name, self.seconds.get(rival.program))
        turn = sum(name == rival.name and past["warm_up"] > 0 for name, past in self.jobs)
        if seconds == "fails" or (seconds == "fails in turn 2" and turn == 2):
            return {"error": "no such module"}
        seconds = 0.1 if seconds == "fails in turn 2" else seconds
        if rival.program in self.slow:
            raise subprocess.TimeoutExpired(rival.name, timeout)
        leave(folder, self.changes.get(rival.program, 1.0))
        own = {"layout": {"conv": job.get("layout", {}).get("conv", "found")}, "compile_s": 3.0}
        own |= {} if "layout" in job else {"tuning_s": 7.0, "usual_layout": {"conv": self.usual}}
        about = {"versions": {rival.program: "1"}, "device": "2 x cpu"}
        return {
            "seconds": [seconds * (1 + 0.1 * (turn % 2))] * job["rounds"],
            **about,
            **(own if rival.program == OURS else {}),
        }


@pytest.fixture
def compared(monkeypatch, tmp_path, capsys):
    """Compares programs that are stood in for: (exit status, lines, JSON, the programs)."""

    def run(seconds, *words, changes=(), slow=(), missing=None, usual="found"):
        stand_in, path = Programs(seconds, dict(changes)), tmp_path / "result.json"
        stand_in.slow, stand_in.usual = slow, usual
        monkeypatch.setattr(programs, "launch", stand_in.launch)
        monkeypatch.setattr(Environments, "install", lambda self, name: (missing or {}).get(name, ""))
        monkeypatch.setattr(compare.os, "sched_setaffinity", lambda *_: None)
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ["JAX_COMPILATION_CACHE_DIR"])  # main sets its own
        usual = [f"--peers={tmp_path}", f"--json={path}", "--threads=2", "--device=cpu"]
        monkeypatch.setattr("sys.argv", ["compare", *usual, *words])
        status = 0
        try:
            compare.main()
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().out.splitlines()[1:], json.loads(path.read_text()), stand_in

    return run


SECONDS = {OURS: 0.2, "pytorch": 0.3, "pfl, 1 processes": 0.5, "pfl": 0.4, "Flower, 1 actors": 0.9, "flower": 0.8}
SLOWER = {"pfl, 1 processes", "Flower, 1 actors"}  # than two, in the first turn
CNN = ("--only", "cnn")


def test_one_command_has_all_kinds_with_their_own_rounds_and_repeats(compared):
    status, lines, written, _ = compared(SECONDS)
    assert status == 0
    places = [(r["kind"], r["cohort"], r["name"]) for r in written["results"]]
    assert places == [
        *(("cnn", m, name) for m in (10, 50) for name in NAMES),
        *(("fl2", 2, name) for name in (OURS, *PYTORCH)),
    ]
    assert len(lines) == 17
    for r in written["results"]:
        turns, rounds = (6, 5) if r["kind"] == "cnn" else (6, 3)
        assert [len(one) for one in r["seconds"]] == [rounds] * (1 if r["name"] in SLOWER else turns) + [0] * (
            turns - 1 if r["name"] in SLOWER else 0
        )
    assert (written["cnn"]["tolerance"], written["fl2"]["tolerance"]) == (1e-4, 1e-4)
    assert written["command"].startswith("python -m benchmarks.compare --peers=DIR --json=FILE ")
    assert "precision" not in written
    assert written["device"] == "2 x cpu"


def test_ratios_are_of_a_turns_medians_with_the_least_and_the_most_of_them(compared):
    _, _, written, _ = compared(SECONDS | {"pytorch": 0.4}, *CNN, "--cohort", "10", "--repeats=3", "--rounds=2")
    pytorch = written["results"][1]
    assert pytorch["ratios"] == pytest.approx([2.0] * 3)
    assert pytorch["times_ours"] == pytest.approx(2.0)
    assert pytorch["least_and_most"] == pytest.approx([2.0, 2.0])
    assert pytorch["images_per_s"] == pytest.approx(10 * 50 / 0.44)  # the median of .44, .44, .40, .40, .44, .44
    ours, theirs = {"seconds": [[1.0, 2.0, 3.0], [1.0], [4.0]]}, {"seconds": [[8.0], [3.0], [4.0]]}
    got = compare.summary(theirs, 100, ours)
    assert (got["ratios"], got["times_ours"], got["least_and_most"]) == ([4.0, 3.0, 1.0], 3.0, [1.0, 4.0])


def test_the_check_and_every_repeat_have_the_layout_that_was_found_for_the_timed_job(compared):
    _, _, written, stand_in = compared(SECONDS, *CNN, "--cohort", "50", "--repeats=2")
    ours = [job for name, job in stand_in.jobs if name == OURS]
    tuned, checked, *timed = ours
    assert (tuned["cohort"], tuned["clients"], tuned["rounds"], tuned["dropout"]) == (50, 1000, 0, True)
    assert "layout" not in tuned
    assert (checked["cohort"], checked["dropout"], checked["layout"]) == (10, False, {"conv": "found"})
    assert [(job["cohort"], job["rounds"], job["layout"]) for job in timed] == [(50, 5, {"conv": "found"})] * 2
    r = written["results"][0]
    assert (r["layout"], r["tuning_s"], r["compile_s"]) == ({"conv": "found"}, 7.0, 3.0)
    assert (r["versions"], r["device"], r["difference"]) == ({OURS: "1"}, "2 x cpu", 0.0)


def test_ours_runs_in_the_usual_layout_too_where_a_search_finds_another(compared):
    seconds = SECONDS | {"fedjax_ssl, usual layout": 0.3}
    status, _, written, stand_in = compared(seconds, *CNN, "--cohort", "10", "--repeats=2", usual="plain")
    assert status == 0
    assert [r["name"] for r in written["results"]] == [*NAMES, "fedjax_ssl, usual layout"]
    ours, *_, usual = written["results"]
    assert (ours["times_ours"], usual["times_ours"]) == (1.0, pytest.approx(1.5))
    assert usual["difference"] == 0.0
    assert ours["tuning_s"] == 7.0
    assert "tuning_s" not in usual
    jobs_of = {
        name: [job["layout"]["conv"] for n, job in stand_in.jobs if n == name and "layout" in job]
        for name in (OURS, usual["name"])
    }
    assert jobs_of == {OURS: ["found"] * 3, usual["name"]: ["plain"] * 3}  # a check and two turns
    _, _, written, _ = compared(seconds | {OURS: "fails in turn 2"}, *CNN, "--cohort", "10", usual="plain")
    assert not any("round_s" in result for result in written["results"])


def test_programs_take_turns_in_balanced_orders_and_peers_are_checked_once(compared):
    _, _, _, stand_in = compared(SECONDS, *CNN, "--repeats=5")
    for cohort in (10, 50):
        timed = [name for name, job in stand_in.jobs if job["warm_up"] and job["cohort"] == cohort]
        first, later = timed[: len(NAMES)], timed[len(NAMES) :]
        able = sorted(set(NAMES) - SLOWER)
        turns = [later[i : i + len(able)] for i in range(0, len(later), len(able))]
        assert sorted(first) == sorted(NAMES)
        assert [sorted(turn) for turn in turns] == [able] * 4
        assert len({turn.index(OURS) for turn in turns}) == 4
        assert first[0] == OURS
    checks = [name for name, job in stand_in.jobs if not job["warm_up"] and job["rounds"]]
    assert checks == [*NAMES, OURS]


def test_the_check_has_as_many_clients_in_each_process(compared):
    _, _, _, stand_in = compared(SECONDS, *CNN, "--processes", "1", "4", "--repeats=1")
    checks = [job for _, job in stand_in.jobs if not job["warm_up"] and job["rounds"]]
    assert {(job["clients"], job["cohort"]) for job in checks} == {(20, 20)}


def test_of_a_budget_a_kinds_first_cohort_in_which_its_peers_are_checked_has_more(compared):
    _, _, _, stand_in = compared(SECONDS, "--budget=500", "--repeats=1")
    limits = [job["tuning_limit_s"] for _, job in stand_in.jobs if "tuning_limit_s" in job]
    assert limits == pytest.approx([500 * 3 / 8 / 8, 500 * 2 / 5 / 8, 500 / 8], rel=0.02)  # those stood in for take no time


@pytest.mark.parametrize("processes", [["1", "2"], ["1"], ["1", "2", "4"]])
def test_in_the_first_turn_all_rivals_come_before_our_second_layout(compared, processes):
    seconds = SECONDS | {compare.USUAL: 0.3}
    _, _, _, stand_in = compared(seconds, *CNN, "--processes", *processes, "--repeats=1", usual="plain")
    for cohort in (10, 50):
        timed = [name for name, job in stand_in.jobs if job["warm_up"] and job["cohort"] == cohort]
        assert (timed[0], timed[-1]) == (OURS, compare.USUAL)


def test_a_peer_whose_model_differs_is_not_timed(compared):
    status, lines, written, stand_in = compared(SECONDS, *CNN, "--cohort", "10", "--repeats=1", changes={"pfl": 1.001})
    assert status == 1
    assert lines[3][34:].strip() == "its model differs by 1.0e-03"
    assert [name for name, _ in stand_in.jobs].count("pfl, 2 processes") == 1
    assert "round_s" not in written["results"][3]
    assert written["results"][1]["difference"] == 0.0


@pytest.mark.parametrize("how", ["fails", "fails in turn 2"])
def test_a_peer_that_fails_says_why_and_the_others_go_on(compared, how):
    status, lines, written, _ = compared(SECONDS | {"flower": how}, *CNN, "--cohort", "10")
    assert status == 1
    assert lines[6][34:].strip() == "no such module"
    assert written["results"][4]["times_ours"] == pytest.approx(2.0)


def test_a_peer_that_cannot_be_installed_is_an_error_of_its_own(compared):
    status, lines, _, stand_in = compared(SECONDS, *CNN, "--cohort", "10", missing={"flower": "not installed: no wheel"})
    assert status == 1
    assert [line[34:].strip() for line in lines[5:]] == 2 * ["not installed: no wheel"]
    assert not any(name.startswith("Flower") for name, _ in stand_in.jobs)


@pytest.mark.parametrize("how", ["fails", "fails in turn 2"])
def test_nothing_is_compared_where_ours_fails(compared, how):
    status, lines, written, stand_in = compared(SECONDS | {OURS: how}, *CNN, "--cohort", "10")
    assert status == 1
    assert [line[34:].strip() for line in lines] == ["no such module", *["not compared, as fedjax_ssl was not timed"] * 6]
    assert not any("round_s" in result for result in written["results"])
    assert stand_in.jobs[-1][0] == OURS  # nothing is run after it for nothing


def test_what_takes_longer_than_the_timeout_is_an_error_than_the_budget_is_left_out(compared):
    status, lines, _, _ = compared(SECONDS, *CNN, "--cohort", "10", slow=("flower",))
    assert (status, lines[5][34:].strip()) == (1, "took longer than --timeout, 1200 s")
    status, lines, _, stand_in = compared(SECONDS, *CNN, "--cohort", "10", "--budget=60", slow=("flower",))
    assert (status, lines[5][34:].strip()) == (0, "left out, --budget was used up meanwhile")
    assert stand_in.jobs[0][1]["tuning_limit_s"] == pytest.approx(7.5, abs=1)
    status, lines, written, stand_in = compared(SECONDS, *CNN, "--cohort", "10", "--budget=1")
    assert (status, stand_in.jobs) == (0, [])
    assert "left_out" in written["results"][0]


def test_a_gpu_has_its_own_defaults(monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "has_gpu", lambda: True)
    monkeypatch.setattr("sys.argv", ["compare", f"--peers={tmp_path}", "--threads=16"])
    arguments = compare.parsed()
    assert (arguments.device, arguments.precision, arguments.processes) == ("cuda", "tensorfloat32", [4, 5, 8])
    assert jobs.KINDS["fl2"].cohorts == {"cpu": [2], "cuda": [10]}
    monkeypatch.setattr(compare, "has_gpu", lambda: False)
    arguments = compare.parsed()
    assert (arguments.device, arguments.precision, arguments.processes) == ("cpu", "float32", [1, 16])
