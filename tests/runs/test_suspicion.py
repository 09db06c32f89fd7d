"""A run's command on a folder whose files a disk or a hand has changed: one line and status 2, and nothing more is lost."""

import errno
import os
import pathlib
import shutil

import pytest

import fedjax_ssl
from fedjax_ssl.files import read_json, write_json
from fedjax_ssl.runs import reading
from fedjax_ssl.runs import run as run_module
from fedjax_ssl.runs.folder import FOLDERS, OURS, open_workdir
from fedjax_ssl.runs.loading import run_folders
from fedjax_ssl.runs.log import MetricsLog
from fedjax_ssl.runs.overwrite import remove, remove_all
from tests.commands import content, launch, refused, rows, succeeded
from tests.data.common import message_of

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("own_methods")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, config, finished) -> pathlib.Path:
    """Runs of six rounds: a finished one, and two that were stopped after four."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(finished, folder / "finished")
    for name in ("stopped", "another"):
        succeeded(config, f"--workdir={folder / name}", "--stop_after=4")
    return folder


def damages(whole: bytes):
    """What is no such file at all, and the file with a bit flipped in its middle; `test_files` has all kinds."""
    before, after = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    return [b"null\n", before + bytes([after[0] ^ 8]) + after[1:]]


@pytest.mark.parametrize("name", ["config.json", "run.json", "metrics.jsonl"])
@pytest.mark.parametrize("state", ["finished", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_damaged_file_is_one_line_and_stays_as_it_is(tmp_path, config, runs, state, name):
    folder = shutil.copytree(runs / state, tmp_path / "run")
    whole = (folder / name).read_bytes()
    for damaged in damages(whole):
        (folder / name).write_bytes(damaged)
        before = content(folder)
        said = refused(config, f"--workdir={folder}")
        assert str(folder) in said
        assert name in said
        assert "put the file back, or start anew with --overwrite" in said
        assert content(folder) == before
    (folder / name).write_bytes(whole)
    succeeded(config, f"--workdir={folder}")
    assert rows(folder) == rows(runs / "finished")


@pytest.mark.parametrize(
    ("checkpoints", "lost"),
    [("kept", "has 5 rounds up to the checkpoint's 6"), ("gone", "has 5 of 6 finished rounds")],
)
def test_a_damaged_summary_is_written_anew_from_the_log_and_no_round_trained_again(tmp_path, config, runs, checkpoints, lost):
    folder = shutil.copytree(runs / "finished", tmp_path / "run")
    if checkpoints == "gone":
        shutil.rmtree(folder / "checkpoints")
    whole, log = ((folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl"))
    for damaged in (b"", *damages(whole)):
        (folder / "summary.json").write_bytes(damaged)
        done = succeeded(config, f"--workdir={folder}")
        assert f"{folder / 'summary.json'} is damaged, and is written anew from the log" in done.stderr
        assert [(folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl")] == [whole, log]
    (folder / "metrics.jsonl").write_bytes(b"".join(log.splitlines(True)[:-1]))  # some rounds are gone
    (folder / "summary.json").write_bytes(b"")
    before = content(folder)
    assert lost in refused(config, f"--workdir={folder}")
    assert content(folder) == before


def test_a_damaged_record_of_a_divergence_is_one_line(tmp_path, config, runs):
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    write_json(folder / "diverged.json", {"round": 5, "diverged": "round 5: all 3 clients returned NaN"})
    assert "round 5: all 3 clients returned NaN" in launch(config, f"--workdir={folder}").stderr
    for damaged in damages((folder / "diverged.json").read_bytes()):
        (folder / "diverged.json").write_bytes(damaged)
        assert f"{folder / 'diverged.json'} is damaged: it" in refused(config, f"--workdir={folder}")


def lose(folder, *names):
    for name in names:
        (folder / name).unlink()


def checkpoints_of(folder, another):
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(another / "checkpoints", folder / "checkpoints")


def edit(folder, change):
    log = folder / "metrics.jsonl"
    log.write_bytes(b"".join(change(log.read_bytes().splitlines(keepends=True))))


def pipe(folder, name):
    lose(folder, name)
    os.mkfifo(folder / name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder, _: lose(folder, "config.json"), "has a log of rounds and no config.json"),
        (lambda folder, _: lose(folder, "run.json"), "has a log of rounds and no run.json"),
        (lambda folder, _: lose(folder, "metrics.jsonl"), "metrics.jsonl has 0 rounds up to the checkpoint's 4"),
        (lambda folder, _: edit(folder, lambda lines: lines[:-1]), "metrics.jsonl has 3 rounds up to the checkpoint's 4"),
        (lambda folder, another: shutil.copy(another / "metrics.jsonl", folder), "is not the log of the run whose checkpoints"),
        (checkpoints_of, "is not the log of the run whose checkpoints lie beside it"),
        (lambda folder, _: (lose(folder, "run.json"), (folder / "run.json").mkdir()), "run.json is damaged: it is a folder"),
        (lambda folder, _: pipe(folder, "config.json"), "config.json is damaged: it is no file"),
        (lambda folder, _: pipe(folder, "metrics.jsonl"), "metrics.jsonl is damaged: it is no file"),
    ],
)
def test_a_lost_or_foreign_file_is_one_line(tmp_path, config, runs, change, said):
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    change(folder, runs / "another")
    before = content(folder)
    assert said in refused(config, f"--workdir={folder}")
    assert content(folder) == before


def test_overwrite_starts_anew_whatever_is_there(tmp_path, config, runs):
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    checkpoints_of(folder, runs / "another")
    pipe(folder, "metrics.jsonl")
    succeeded(config, f"--workdir={folder}", "--overwrite")
    assert rows(folder) == rows(runs / "finished")


@pytest.mark.parametrize("name", OURS)
def test_what_is_a_folder_and_no_file_or_the_other_way_round_is_said(tmp_path, name):
    is_folder = name in FOLDERS
    (tmp_path / name).touch() if is_folder else (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} is {'no' if is_folder else 'a'} folder, unlike a run's"):
        open_workdir(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    remove_all([tmp_path], OURS)
    open_workdir(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_overwrite_unlinks_a_link_and_leaves_alone_what_it_leads_to(tmp_path, config, runs):
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    for name in ("checkpoints", "tensorboard", "metrics.jsonl"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    (tmp_path / "checkpoints" / "2").rename(tmp_path / "2")  # a checkpoint on another disk
    (tmp_path / "checkpoints" / "2").symlink_to(tmp_path / "2")
    before = {name: content(tmp_path / name) for name in ("checkpoints", "tensorboard", "2")}
    log = (tmp_path / "metrics.jsonl").read_bytes()
    succeeded(config, f"--workdir={folder}", "--overwrite")
    assert rows(folder) == rows(runs / "finished")
    assert {name: content(tmp_path / name) for name in before} == before
    assert (tmp_path / "metrics.jsonl").read_bytes() == log
    assert not any(path.is_symlink() or path.name.startswith("overwritten") for path in folder.iterdir())


def test_a_checkpoint_that_is_a_link_goes_as_any_other_and_what_it_leads_to_stays(tmp_path, config, runs):
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    older = folder / "checkpoints" / "2"
    older.rename(tmp_path / "2")
    older.symlink_to(tmp_path / "2")
    before = content(tmp_path / "2")
    succeeded(config, f"--workdir={folder}")
    assert not os.path.lexists(older)
    assert content(tmp_path / "2") == before


@pytest.mark.parametrize("call", ["access", "rename"])
def test_where_overwrite_cannot_remove_one_thing_of_any_run_nothing_is_lost(tmp_path, monkeypatch, call):
    """Such as a folder without the right to change it, or one that another disk is mounted on."""
    folders = [tmp_path / name for name in "01"]
    for folder in folders:
        (folder / "checkpoints" / "4").mkdir(parents=True)
        for name in ("config.json", "checkpoints/4/state", "notes.txt"):
            (folder / name).write_text(name)
    before = content(tmp_path)
    last, usual = str(folders[1] / "checkpoints"), getattr(os, call)

    def failing(path, *others, **options):
        if call == "access" and str(path) == f"{last}/4":
            return False
        if call == "rename" and str(path) == last:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return usual(path, *others, **options)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(ValueError, match=f"^--overwrite: {last} cannot be removed .*; nothing was removed$"):
        remove_all(folders, OURS)
    assert content(tmp_path) == before
    assert {path.name for folder in folders for path in folder.iterdir()} == {"checkpoints", "config.json", "notes.txt"}
    monkeypatch.undo()
    (folders[0] / "overwritten.0123456789abcdef").mkdir()  # as a kill leaves it
    (folders[0] / "overwritten.by-me").mkdir()
    remove_all(folders, OURS)
    assert {path.name for folder in folders for path in folder.iterdir()} == {"notes.txt", "overwritten.by-me"}


def test_what_a_kill_within_overwrite_leaves_is_no_run(tmp_path, config, runs, monkeypatch):
    folder = shutil.copytree(runs / "finished", tmp_path / "run")
    monkeypatch.setattr(shutil, "rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        remove_all([folder], OURS)
    monkeypatch.undo()
    (left,) = folder.iterdir()
    assert left.name.startswith("overwritten.")
    with pytest.raises(FileNotFoundError):
        run_folders(folder)
    assert message_of(ValueError, reading.find, [folder]).startswith("DIR: ")
    succeeded(config, f"--workdir={folder}", "--overwrite", "--stop_after=1")
    assert not left.exists()
    assert len(rows(folder)) == 1


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints", "checkpoints/4", "checkpoints/7.tmp"])
def test_a_link_to_nowhere_or_a_file_among_checkpoints_is_said(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch() if "/" in name else (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"{name} is no folder, unlike a run's"):
        open_workdir(tmp_path, {})


def test_what_is_a_users_own_among_checkpoints_is_in_nobodys_way(tmp_path, config, runs):
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    own = [folder / "checkpoints" / name for name in ("notes.txt", "my.tmp", "mine.tmp/notes.txt", "4.corrupt/notes.txt")]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    succeeded(config, f"--workdir={folder}")
    assert all(path.exists() for path in own)


def test_what_killed_writes_leave_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "clients").mkdir()
    left = [".summary.json.0123456789abcdef.tmp", "clients/.round_000002.npz.fedcba9876543210.tmp"]
    others = [".mine.tmp", "0123456789abcdef.tmp", ".owner"]
    for name in (*left, *others):
        (tmp_path / name).touch()
    open_workdir(tmp_path, {})
    assert {path.name for path in content(tmp_path)} == {*others, "config.json"}


def test_a_log_of_another_finished_run_of_the_same_config_is_one_line(tmp_path, config, runs):
    folder, another = (shutil.copytree(runs / name, tmp_path / name) for name in ("finished", "another"))
    succeeded(config, f"--workdir={another}")
    shutil.copy(another / "metrics.jsonl", folder)
    assert "is not the log of the run whose checkpoints lie beside it" in refused(config, f"--workdir={folder}")
    shutil.rmtree(folder / "checkpoints")  # which a finished run need not have
    assert "summary.json is not the summary of the log beside it: put" in refused(config, f"--workdir={folder}")


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_log_and_checkpoints_of_a_run_of_another_config_are_refused_also_where_they_fit_together(tmp_path, config, runs, state):
    another = tmp_path / "another"
    words = [] if state == "finished" else ["--stop_after=4"]
    succeeded(config, f"--workdir={another}", "--config.client.optimizer.learning_rate=0.5", *words)
    for names, said in (
        (("metrics.jsonl", "checkpoints"), "or both are of another config or other data than config.json and run.json"),
        (("run.json",), "run.json is another run's: client.optimizer.learning_rate is 0.5 there and 0.03 in config.json"),
    ):
        folder = shutil.copytree(runs / state, tmp_path / names[0])
        for name in (*names, *(["summary.json"] if state == "finished" else [])):
            remove(folder / name)
            (shutil.copytree if name == "checkpoints" else shutil.copy)(another / name, folder / name)
        before = content(folder)
        assert said in refused(config, f"--workdir={folder}")
        assert said in message_of(ValueError, fedjax_ssl.load, folder)
        assert content(folder) == before


def test_a_run_of_a_version_whose_logs_do_not_say_which_run_they_are_of_goes_on(tmp_path, config, runs):
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    noted = read_json(folder / "run.json")
    write_json(
        folder / "run.json", {key: value for key, value in noted.items() if key not in ("began", "registered", "programs")}
    )
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        found = read_json(manifest)
        write_json(manifest, found | {"log": MetricsLog(folder).digest(found["round"])})
    assert succeeded(config, f"--workdir={folder}", "--stop_after=5").stderr.splitlines()[0] == "going on after round 4"
    succeeded(config, f"--workdir={folder}")
    assert rows(folder) == rows(runs / "finished")


def test_checkpoints_that_are_gone_are_said(tmp_path, config, runs):
    """Few rounds may be those of a run that was killed before its first checkpoint was on disk; that one begins anew."""
    few = shutil.copytree(runs / "stopped", tmp_path / "few")
    shutil.rmtree(few / "checkpoints")
    done = succeeded(config, f"--workdir={few}")
    assert f"{few} has no checkpoint: it begins anew" in done.stderr
    assert rows(few) == rows(runs / "finished")

    many = tmp_path / "many"
    often = (config, f"--workdir={many}", "--config.checkpoint_every=1")
    succeeded(*often, "--stop_after=4")
    shutil.rmtree(many / "checkpoints")
    log = (many / "metrics.jsonl").read_bytes()
    said = refused(*often)
    assert f"{many} has 4 rounds in its log and no checkpoint: put the file back, or start anew with --overwrite" in said
    assert (many / "metrics.jsonl").read_bytes() == log


DAMAGED = "round 3 is damaged: it is not JSON; put the file back"


@pytest.mark.parametrize(
    ("round", "change", "said"),
    [
        (3, lambda lines: [*lines[:-1], lines[-1][:-1]], DAMAGED),
        (3, lambda lines: [*lines[:-1], lines[-1][:-40]], DAMAGED),
        (6, lambda lines: lines[:4], "metrics.jsonl has 4 of 6 finished rounds"),
    ],
)
def test_a_log_that_is_damaged_while_the_run_writes_to_it_is_no_result(tmp_path, config, monkeypatch, round, change, said):
    """A command that ends with 0 has written a summary of a whole log."""
    seen = run_module.seen

    def damaging(found):
        if found[0]["round"] == round:
            edit(tmp_path / "run", change)
        return seen(found)

    monkeypatch.setattr(run_module, "seen", damaging)
    done = launch(config, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_rows_after_the_checkpoint_are_written_again(tmp_path, config, runs):
    """As a kill leaves them: a whole row and a torn one."""
    folder = shutil.copytree(runs / "stopped", tmp_path / "run")
    log = MetricsLog(folder)
    log.append(MetricsLog(runs / "finished").rows()[4] | {"client/loss": 7.0})
    with log.path.open("ab") as file:
        file.write(b'{"round": 6, "client/lo')
    succeeded(config, f"--workdir={folder}")
    assert rows(folder) == rows(runs / "finished")
