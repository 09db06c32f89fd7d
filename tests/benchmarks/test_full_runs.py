"""Whole experiments: what is run, what a total is reckoned from, and going on where a call stopped."""

import json
import pathlib

import pytest

from benchmarks import full_runs, programs
from benchmarks.programs import Environments
from fedjax_ssl.data import sources


def test_all_but_what_is_done_once_grows_with_the_rounds():
    whole = full_runs.reckoned(10, 10, 30.0, 5.0)
    assert (whole["total_s"], whole["extrapolated"]) == (30.0, False)
    part = full_runs.reckoned(10, 40, 30.0, 5.0)
    assert (part["total_s"], part["extrapolated"]) == (5.0 + 4 * 25.0, True)


@pytest.fixture
def ran(monkeypatch, tmp_path, capsys):
    """A call whose programs are stood in for: (exit status, lines, JSON, what was started)."""

    def call(name, *words, rounds=40, ends=0, prepares=0, job=None, broken=()):
        started, path = [], tmp_path / "result.json"

        def run(command, log, timeout, environment=None, ask_first=0.0):
            started.append(command)
            log.write_text("ValueError: what is wrong\n")
            if "--prepare" in command and prepares:
                return prepares
            if "--prepare" in command:
                found = {"tuning_s": 8.0, "layout": {}, "device": "1 x some GPU", "rounds": 40}
                (tmp_path / "w" / name / "found.json").write_text(json.dumps(found | ({"job": job} if job else {})))
                return 0
            folder = pathlib.Path(next(word for word in command if word.startswith("--workdir=")).partition("=")[2])
            folder.mkdir(exist_ok=True)
            rows = [
                {"round": n, "time/round_s": 1.0, "time/total_s": 7.0 + n, "time/compile_s": 5.0} for n in range(1, rounds + 1)
            ]
            rows[-1]["eval/accuracy"] = 0.7
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "layout.json").write_text('{"layout": {"conv": "grouped"}}')
            return ends

        def launch(rival, job, folder, environments, timeout):
            started.append((rival.name, job | rival.own))
            if rival.own["processes"] in broken:
                return {"error": "no such backend"}
            seconds = {1: 0.3, 2: 0.2}[rival.own["processes"]]
            times = [seconds + (0.5 if n % job["eval_every"] == 0 else 0.0) for n in range(rival.own["rounds"])]
            times[0] += 0.0 if rival.own["warm_up"] else 5.0  # it evaluates clients, and chooses algorithms
            return {"seconds": times, "accuracy": 0.69, "versions": {}}

        monkeypatch.setattr(programs, "run", run)
        monkeypatch.setattr(programs, "launch", launch)
        monkeypatch.setattr(Environments, "install", lambda self, name: "")
        usual = ["full_runs", name, f"--workdir={tmp_path / 'w'}", f"--json={path}", "--processes", "1", "2"]
        monkeypatch.setattr("sys.argv", [*usual, *words])
        status = 0
        try:
            full_runs.main()
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().out.splitlines(), json.loads(path.read_text()), started

    return call


def test_a_whole_run_is_launch_run_in_the_layout_that_was_looked_for(ran):
    status, lines, written, (prepare, run) = ran("fl2", "--data_dir=DIR", "--config.execution.dtype=bfloat16")
    config = "--config=configs/fl2_cifar10.py:paper,labels=40,split=iid"
    asked = ["--config.execution.tune=always", "--config.data.data_dir=DIR", "--config.execution.dtype=bfloat16"]
    assert status == 0
    for command in (prepare, run):
        assert [word for word in command if word.startswith("--config")] == [config, *asked]
    assert run[1:3] == ["-m", "launch.run"]
    assert not any("stop_after" in word for word in run)
    ours = written["results"][programs.OURS]
    assert (ours["total_s"], ours["compile_s"], ours["tuning_s"], ours["accuracy"]) == (47.0, 5.0, 8.0, [0.7])
    assert (ours["extrapolated"], written["device"], written["random_images"]) == (False, "1 x some GPU", False)
    assert lines[1].split() == ["fedjax_ssl", "40/40", "47", "5", "70.0"]
    assert "81.5" in lines[2]


def test_a_few_rounds_give_a_total_that_is_marked(ran):
    _, lines, written, (_, run) = ran("fl2", "--rounds=10", rounds=10)
    assert "--stop_after=10" in run
    assert written["results"][programs.OURS]["extrapolated"]
    assert lines[1].split() == ["fedjax_ssl", "10/40", "~47", "5", "70.0"]


def test_pfl_runs_as_many_rounds_in_its_best_number_of_processes(ran, tmp_path):
    (tmp_path / "w" / "pfl").mkdir(parents=True)
    (tmp_path / "w" / "pfl" / "data.npz").write_bytes(b"")
    job = {"eval_every": 10, "device": "cuda"}
    status, lines, written, started = ran("pfl", f"--peers={tmp_path}", "--trial=4", job=job)
    assert status == 0
    assert "--config.execution.rounds_per_dispatch=10" in started[1]
    runs = [(own["processes"], own["warm_up"], own["rounds"], own["eval_every"]) for _, own in started[2:]]
    assert runs == [(1, 2, 4, 10), (2, 2, 4, 10), (2, 0, 40, 10)]
    assert written["results"]["pfl"]["total_s"] == pytest.approx(40 * 0.2 + 4 * 0.5 + 5)
    assert written["times_ours"] == pytest.approx(15 / 47)
    assert lines[2].split() == ["pfl", "40/40", "15", "0", "69.0"]
    _, _, again, started = ran("pfl", f"--peers={tmp_path}", "--trial=4", job=job)
    assert len(started) == 1  # launch.run, which knows what it has done
    assert again["results"]["pfl"] == written["results"]["pfl"]


def test_a_number_of_processes_that_pfl_cannot_have_is_passed_over_and_it_may_run_fewer_rounds(ran, tmp_path):
    (tmp_path / "w" / "pfl").mkdir(parents=True)
    (tmp_path / "w" / "pfl" / "data.npz").write_bytes(b"")
    words, job = ("pfl", f"--peers={tmp_path}", "--trial=4", "--pfl_rounds=8"), {"eval_every": 4, "device": "cuda"}
    status, _, written, _ = ran(*words, job=job, broken=(1, 2))
    assert (status, written["results"]["pfl"]) == (1, {"error": "no such backend"})
    status, lines, written, _ = ran(*words, job=job, broken=(2,))
    assert (status, written["results"]["pfl"]["failed"]) == (0, {"2": "no such backend"})
    assert lines[2].split() == ["pfl", "8/40", "~22", "0", "69.0"]  # 40 (.3 + .5 / 4), and its first round's 5 s once
    assert lines[1].split()[1] == "40/40"


def test_what_the_budget_ends_goes_on_with_the_same_command(ran):
    status, lines, written, started = ran("fl2", "--budget=1")
    assert (status, started) == (0, [])
    assert "left_out" in written["results"][programs.OURS]
    status, lines, _, started = ran("fl2", "--budget=100", rounds=20, ends=143)
    assert (status, len(started)) == (0, 2)
    assert lines[1].split()[:3] == ["fedjax_ssl", "20/40", "~47"]
    assert "the same command goes on" in lines[1]
    _, _, written, started = ran("fl2")
    assert [command[2] for command in started] == ["launch.run"]
    assert "left_out" not in written["results"][programs.OURS]


def test_another_experiment_has_its_own_folder_and_other_settings_are_refused(ran, monkeypatch, tmp_path, capsys):
    ran("fl2")
    (tmp_path / "w" / "pfl").mkdir(parents=True)
    (tmp_path / "w" / "pfl" / "data.npz").write_bytes(b"")
    job = {"eval_every": 10, "device": "cuda"}
    _, _, written, started = ran("pfl", f"--peers={tmp_path}", "--trial=4", job=job)
    assert "--prepare" in started[0]
    assert written["experiment"] == "pfl"
    monkeypatch.setattr("sys.argv", ["full_runs", "fl2", f"--workdir={tmp_path / 'w'}", "--config.execution.dtype=bfloat16"])
    with pytest.raises(SystemExit) as ended:
        full_runs.main()
    assert ended.value.code == 2
    assert "holds another run: --config=configs/fl2_cifar10.py" in capsys.readouterr().err


def test_a_mistyped_command_leaves_nothing_in_the_way(ran):
    assert ran("fl2", "--config.no.such.key=1", prepares=2)[0] == 1
    status, _, written, _ = ran("fl2")
    assert status == 0
    assert "total_s" in written["results"][programs.OURS]


def test_an_error_is_named(ran):
    status, lines, _, _ = ran("fl2", ends=2)
    assert status == 1
    assert "ValueError: what is wrong" in lines[1]


def test_random_images_take_the_place_of_the_dataset(monkeypatch, tmp_path):
    monkeypatch.setattr(full_runs, "RANDOM", {"train": 20, "test": 10})
    path = full_runs.random_file(tmp_path)
    data = sources.load("npz", path=str(path))
    assert (data.train_images.shape, data.test_images.shape) == ((20, 32, 32, 3), (10, 32, 32, 3))
    assert data.num_classes == 10
