"""Runs as their folders hold them: damage is named and not used."""

import numpy as np
import pytest

from fedjax_ssl.files import write_json
from fedjax_ssl.report import groups
from fedjax_ssl.runs import reading
from fedjax_ssl.runs.log import MetricsLog
from tests.folders import write


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"round": 2, "eval/acc', "it is not JSON"),
        ("[2]", "it is no JSON object"),
        ('{"round": 2, "eval/accuracy": 0.2}', "it has no checksum"),
        ('{"round": 2, "eval/accuracy": 0.2, "checksum": "0123456789abcdef"}', "its content does not match its checksum"),
        ({"round": 1, "eval/accuracy": 0.2}, "round 1 after round 1"),
    ],
)
def test_a_damaged_row_is_named_and_not_used(tmp_path, line, why):
    log = write(tmp_path / "run") / "metrics.jsonl"
    lines = log.read_text().splitlines()
    if isinstance(line, dict):  # as a faulty program would write it
        MetricsLog(tmp_path).append(line)
        line = (tmp_path / "metrics.jsonl").read_text().strip()
        (tmp_path / "metrics.jsonl").unlink()
    log.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
    before = log.read_bytes()
    (run,) = reading.find([tmp_path]).runs
    assert run.problems[0] == f"metrics.jsonl, line 2: {why}: not used"
    assert run.problems[1].startswith("metrics.jsonl lacks round 2")
    np.testing.assert_array_equal(run.columns["eval/accuracy"], [0.1, 0.3])
    assert run.is_finished
    assert log.read_bytes() == before


def test_a_summary_that_the_log_contradicts_is_not_used(tmp_path):
    folder = write(tmp_path / "run")
    write_json(folder / "summary.json", {"rounds": 3, "eval/accuracy": 0.9, "device": "2 x cpu"})
    (run,) = reading.find([tmp_path]).runs
    assert run.summary == {}
    assert run.problems == ("summary.json: eval/accuracy is 0.9, and the last row's eval/accuracy is 0.3: not used",)


def test_unfinished_diverged_and_unreadable_runs_are_told_apart(tmp_path):
    write(tmp_path / "done")
    write(tmp_path / "early", rounds=2, summary=False, seed=1)
    gone = write(tmp_path / "gone", rounds=1, summary=False, seed=2)
    write_json(gone / "diverged.json", {"round": 2, "diverged": "round 2: client/loss is NaN"})
    (write(tmp_path / "unreadable") / "config.json").write_text("{")
    (write(tmp_path / "without") / "config.json").unlink()
    write_json(write(tmp_path / "older") / "config.json", {"rounds": 3, "server": {"pretrain": 0}})
    found = reading.find([tmp_path, tmp_path / "done"])
    assert [run.state for run in found.runs] == ["finished", "unfinished: round 2 of 3", "diverged in round 2"]
    assert found.unreadable == (
        f"{tmp_path.name}/older: an earlier version wrote it: server.pretrain: this key is server.training.pretrain now",
        f"{tmp_path.name}/unreadable: config.json is damaged: it is not JSON",
        f"{tmp_path.name}/without: config.json is missing",
    )
    (group,) = groups.group(found.runs).groups
    assert ([run.name for run in group.runs], len(group.used)) == ([run.name for run in found.runs], 1)


def test_a_run_may_be_in_a_folder_with_the_name_of_one_of_a_runs_folders(tmp_path):
    write(tmp_path / "clients" / "0")
    write(tmp_path / "clients" / "0" / "checkpoints" / "copy")  # but what is in a run's own folders is none
    assert [run.name for run in reading.find([tmp_path]).runs] == [f"{tmp_path.name}/clients/0"]
