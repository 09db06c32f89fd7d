"""Checkpoints survive damage, to any of their files, and kills, at any moment."""

import logging
import os
import pathlib
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from fedjax_ssl.runs.checkpoint import Checkpoints
from tests.commands import content
from tests.runs.test_checkpoint import assert_same, folders, restore, save_all, state_of

pytestmark = pytest.mark.reliability


def data_files(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoint's files, the largest first."""
    return sorted((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)


def flip(path: pathlib.Path, offset: int | None = None) -> None:
    """Another bit in the middle, or at the offset."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 0x10
    path.write_bytes(content)


def rewrite_manifest(checkpoint, change):
    path = checkpoint / "manifest.json"
    path.write_bytes(change(path.read_bytes()))


def replace_content(checkpoint, change):
    """Another well-formed Orbax array in place of the saved one."""
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as checkpointer:
        as_numpy = ocp.args.ArrayRestore(restore_args=ocp.RestoreArgs(restore_type=np.ndarray))
        content = change(checkpointer.restore(checkpoint / "state", args=as_numpy))
        checkpointer.save(checkpoint / "state", args=ocp.args.ArraySave(content), force=True)


def emptied(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    return checkpoint


def piped(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "bit of the data": lambda checkpoint: flip(data_files(checkpoint)[0]),
    "empty folder": emptied,
    "no manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "another shape": lambda checkpoint: rewrite_manifest(
        checkpoint, lambda text: text.replace(b"float32[1000]", b"float32[7]")
    ),
    "a named pipe": lambda checkpoint: piped(data_files(checkpoint)[0]),
    "no JSON": lambda checkpoint: rewrite_manifest(checkpoint, lambda text: b"\0" * len(text)),
    "another round": lambda checkpoint: shutil.copytree(checkpoint.with_name("1"), emptied(checkpoint), dirs_exist_ok=True),
    "silently one bit": lambda checkpoint: replace_content(checkpoint, lambda x: x ^ np.eye(1, x.size, 2000, np.uint8)[0]),
    "silently shorter": lambda checkpoint: replace_content(checkpoint, lambda content: content[:-4]),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_corrupt_newest_falls_back_and_is_moved_aside(tmp_path, caplog, how):
    save_all(tmp_path, 1, 2)
    DAMAGES[how](tmp_path / "checkpoints" / "2")
    with Checkpoints(tmp_path) as checkpoints, caplog.at_level(logging.WARNING):
        caplog.clear()
        round, state = checkpoints.restore(state_of(0))
        (line,) = (record.getMessage() for record in caplog.records)
        assert str(tmp_path / "checkpoints" / "2") in line
        assert line.startswith("skipped corrupt checkpoint")
        assert "\n" not in line
        assert round == 1
        assert_same(state, state_of(1))
        assert folders(tmp_path) == ["1", "2.corrupt"]
        checkpoints.save(2, state_of(2))
    assert folders(tmp_path) == ["1", "2", "2.corrupt"]
    assert_same(restore(tmp_path)[1], state_of(2))
    DAMAGES[how](tmp_path / "checkpoints" / "2")
    assert restore(tmp_path)[0] == 1
    assert folders(tmp_path) == ["1", "2.corrupt", "2.corrupt-2"]


def test_each_file_damaged_in_turn_never_gives_a_wrong_state(tmp_path):
    """A byte flipped, the file cut, the file gone: the newest whole, or the one before; nothing else, and no crash."""
    save_all(tmp_path / "whole", 1, 2)
    outcomes = []
    for path in data_files(tmp_path / "whole" / "checkpoints" / "2"):
        size = path.stat().st_size
        for action in ["flip first", "flip middle", "cut", "delete"]:
            if size == 0 and action != "delete":
                continue
            shutil.copytree(tmp_path / "whole", tmp_path / "copy")
            victim = tmp_path / "copy" / path.relative_to(tmp_path / "whole")
            if action == "cut":
                os.truncate(victim, size // 2)
            elif action == "delete":
                victim.unlink()
            else:
                flip(victim, 0 if action == "flip first" else None)
            round, state = restore(tmp_path / "copy")
            assert_same(state, state_of(round))
            outcomes.append(round)
            shutil.rmtree(tmp_path / "copy")
    assert set(outcomes) == {1, 2}  # some files (a commit marker) carry nothing that a restore needs


def test_half_written_temporary_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints" / "1.tmp").mkdir(parents=True)
    assert restore(tmp_path) is None
    save_all(tmp_path, 1)
    for name in ("2.tmp", "3.tmp"):
        shutil.copytree(tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / name)
    assert restore(tmp_path)[0] == 1
    save_all(tmp_path, 2)
    assert restore(tmp_path)[0] == 2
    assert folders(tmp_path) == ["1", "2"]


def test_all_corrupt_is_an_error_and_nothing_is_touched(tmp_path):
    save_all(tmp_path, 1, 2)
    for name in ("1", "2"):
        DAMAGES["bit of the data"](tmp_path / "checkpoints" / name)
    before = content(tmp_path)
    with pytest.raises(
        ValueError, match=r"every checkpoint in .* is corrupt \(2, 1\); put the file back, or start anew with --overwrite"
    ) as error:
        restore(tmp_path)
    assert "\n" not in str(error.value)
    assert content(tmp_path) == before
