"""Fetching files: over bad connections, from servers that are no use, onto a full disk, by two processes at once."""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedjax_ssl.data import download, sources
from fedjax_ssl.data.catalog import ORIGINALS
from fedjax_ssl.experiment import build
from fedjax_ssl.runs import provenance
from launch import config_file, prepare
from tests.data import archives
from tests.data.common import message_of, picture

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8).tobytes()
NAME = "cifar-10-binary.tar.gz"


@pytest.fixture
def files(server):
    return archives.serve(server, "cifar10", {NAME: CONTENT})


def obtain(folder, **more):
    return download.obtain("cifar10", folder, **more)[NAME]


def names(folder):
    """What is in the dataset's folder, but for the lock."""
    path = pathlib.Path(folder, "originals", "cifar10")
    return sorted(entry.name for entry in path.iterdir() if entry.suffix != ".lock") if path.is_dir() else []


def test_a_file_is_fetched_once_and_what_how_much_and_which_terms_are_said_first(server, kept, files, capsys):
    assert obtain(kept).read_bytes() == CONTENT
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith(f"cifar10: fetching 3.0 MB, from 127.0.0.1:{server.server_port} to {kept}/originals/cifar10; terms:")
    assert obtain(kept, download=False).read_bytes() == CONTENT
    assert (len(server.asked), names(kept), capsys.readouterr().err) == (1, [NAME], "")


def test_cut_connections_are_resumed_where_they_ended(server, kept, files):
    server.cut = 1_200_000
    assert obtain(kept).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=1200000-", "bytes=2400000-"]
    assert server.sent == len(CONTENT)


def test_a_server_that_does_not_know_ranges_sends_all_again(server, kept, files):
    place = download.places("cifar10", kept)[0]
    part = download.part_of(place.path)
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:5000])
    server.knows_ranges = False
    assert obtain(kept).read_bytes() == CONTENT
    assert server.asked == [(f"cifar10/{NAME}", "bytes=5000-")]


def test_what_arrived_is_kept_for_the_next_call_and_not_taken_for_the_file(server, kept, files, monkeypatch):
    server.cut = 1000
    place = download.places("cifar10", kept)[0]
    message = message_of(download.RefusedError, download.fetch, place, (0.0, 0.0))
    assert "3.0 kB of it are kept: the same command goes on from there" in message
    assert names(kept) == [f".{NAME}.part"]
    message = message_of(FileNotFoundError, obtain, kept, download=False)
    assert "neither prepared by TFDS nor as its original files, and data.download is false" in message
    server.cut, server.asked, server.busy = None, [], 1
    assert obtain(kept).read_bytes() == CONTENT
    assert server.asked == [(f"cifar10/{NAME}", "bytes=3000-")] * 2


BEGUN = {"other": bytes(100), "too_long": CONTENT + b"more", "last_byte": CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_a_beginning_of_another_file_is_fetched_anew(kept, files, begun):
    part = download.part_of(download.places("cifar10", kept)[0].path)
    part.parent.mkdir(parents=True)
    part.write_bytes(begun)
    assert obtain(kept).read_bytes() == CONTENT


OTHER = bytes(len(CONTENT))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, "text/html", b"gone"), "answers with HTTP status 404: set FEDJAX_SSL_MIRROR to another copy"),
        (
            (200, "text/html; charset=utf-8", b"<html>log in"),
            "answers with 12 bytes of text/html, and 3,000,000 bytes are expected",
        ),
        ((200, "application/gzip", b"short"), "answers with 5 bytes of application/gzip, and 3,000,000 bytes are expected"),
        ((200, "application/gzip", OTHER), "has another file (3,000,000 bytes, sha256:"),
    ],
)
def test_another_answer_than_the_file_is_one_line_and_leaves_nothing(server, kept, files, answer, expected):
    server.answers[f"cifar10/{NAME}"] = answer
    assert expected in message_of(FileNotFoundError, obtain, kept)
    assert (names(kept), len(server.asked)) == ([], 1)


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: bytes(1) + content[1:], lambda _: b""])
def test_a_damaged_file_is_noticed_and_fetched_anew(server, kept, files, damage, capsys):
    path = obtain(kept)
    path.write_bytes(damage(CONTENT))
    os.utime(path, ns=(1, 1))
    assert f"{path} is damaged, and data.download is false" in message_of(FileNotFoundError, obtain, kept, download=False)
    assert obtain(kept).read_bytes() == CONTENT
    assert f"({NAME} there is damaged)" in capsys.readouterr().err


def test_without_a_network_it_is_one_line(kept, monkeypatch):
    monkeypatch.setattr(download, "WAITS", ())
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(download.MIRROR, "http://127.0.0.1:9/")  # nobody listens
    place = download.places("cifar10", kept)[0]
    message = message_of(download.RefusedError, download.fetch, place, (0.0,))
    assert "cannot be fetched from http://127.0.0.1:9/cifar10/" in message
    assert f"or put the file at {place.path}" in message
    assert message.count("(") == message.count(")")  # of what requests says some are cut
    monkeypatch.setenv(download.MIRROR, "no address")
    assert "correct the address" in message_of(FileNotFoundError, obtain, kept)
    assert names(kept) == []


def test_a_full_disk_is_one_line(server, kept, files):
    server.patch.setitem(ORIGINALS, "cifar10", [file._replace(size=10**18) for file in files])
    assert "1000000000.00 GB are needed and" in message_of(OSError, obtain, kept)
    assert server.asked == []
    server.patch.setitem(ORIGINALS, "cifar10", files)
    part = download.part_of(download.places("cifar10", kept)[0].path)
    part.symlink_to("/dev/full")  # the kernel's own disk that has no room
    message = message_of(OSError, obtain, kept)
    assert message.startswith(
        f"cifar10: cannot write to {kept}/originals/cifar10 (No space left on device): make room, or give"
    )
    part.unlink()
    assert names(kept) == []


def test_a_folder_that_cannot_be_written_to_is_one_line(files, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write to" in message_of(OSError, obtain, str(tmp_path / "file"))


def test_a_size_that_nobody_publishes_is_the_servers(server, kept):
    (file,) = archives.serve(server, "bloodmnist", {"bloodmnist.npz": CONTENT})
    server.patch.setitem(ORIGINALS, "bloodmnist", [file._replace(size=0)])
    server.cut = 1_200_000
    assert download.obtain("bloodmnist", kept)["bloodmnist.npz"].read_bytes() == CONTENT


@pytest.mark.parametrize("says_size", [False, True])
def test_an_answer_without_an_end_is_bounded_where_no_size_is_known(server, kept, says_size):
    (file,) = archives.serve(server, "bloodmnist", {"bloodmnist.npz": CONTENT})
    server.patch.setitem(ORIGINALS, "bloodmnist", [file._replace(size=0)])
    server.patch.setattr("fedjax_ssl.data.transfer.MOST", 2_000_000)
    server.has_no_end = not says_size
    message = message_of(FileNotFoundError, download.obtain, "bloodmnist", kept)
    said = "answers with 3,000,000 bytes of" if says_size else "sends more than 2,000,000 bytes of a file whose size nobody"
    assert said in message
    assert not list(pathlib.Path(kept, "originals", "bloodmnist").glob(".*.part"))


def test_a_named_pipe_in_the_place_of_a_file_is_one_line(kept, monkeypatch, tmp_path):
    path = download.places("cifar10", kept)[0].path
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert message_of(ValueError, obtain, kept) == f"{path} is a named pipe: give a regular file"
    os.mkfifo(tmp_path / "sums.json")
    monkeypatch.setenv(download.CHECKSUMS, str(tmp_path / "sums.json"))
    assert "sums.json is a named pipe" in message_of(ValueError, obtain, kept)
    for folder in ("mnist", "cifar10/3.0.2"):
        pathlib.Path(kept, folder).mkdir(parents=True)
        os.mkfifo(pathlib.Path(kept, folder, "dataset_info.json"))
        assert "dataset_info.json is a named pipe" in message_of(ValueError, sources.load, folder.split("/")[0], data_dir=kept)


def test_data_are_kept_in_the_folder_that_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_SSL_DATA", str(tmp_path / "env"))
    assert (download.folder(str(tmp_path)), download.folder()) == (tmp_path, tmp_path / "env")
    monkeypatch.delenv("FEDJAX_SSL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download.folder() == tmp_path / "fedjax_ssl" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert download.folder() == tmp_path / "home" / ".cache" / "fedjax_ssl" / "data"
    assert download.folder("~/x") == tmp_path / "home" / "x"


@pytest.fixture
def small(server, kept, tmp_path, monkeypatch):
    """A server of a small CIFAR-10 and MNIST, with their checksums, for commands."""
    train, test = ((picture(size, 32, 32, 3, seed=size), np.arange(size) % 10) for size in (200, 50))
    entries = archives.serve(server, "cifar10", archives.cifar10(train, test))
    table = {f"cifar10/{file.name}": {"size": file.size, "checksum": file.checksum} for file in entries}
    (tmp_path / "checksums.json").write_text(json.dumps(table))
    monkeypatch.setenv(download.CHECKSUMS, str(tmp_path / "checksums.json"))
    monkeypatch.setenv(download.DATA, kept)
    return server


def test_prepare_fetches_and_lists(small, kept, tmp_path, capsys):
    assert prepare.main(["prepare", "cifar10"]) == 0
    out, err = capsys.readouterr()
    assert f"bytes in {kept}/originals/cifar10, SHA256 as {tmp_path}/checksums.json has it" in out
    assert "terms: none stated; cite the report" in err
    assert prepare.main(["prepare", "cifar10", f"--data_dir={tmp_path}/made"]) == 0
    assert pathlib.Path(tmp_path, "made", "originals", "cifar10", NAME).is_file()
    assert prepare.main(["prepare", "mnist"]) == 2
    assert "HTTP status 404" in capsys.readouterr().err.splitlines()[-1]
    damaged = pathlib.Path(kept, "mnist", "3.0.1")  # of TFDS
    damaged.mkdir(parents=True)
    for name in ("features.json", "dataset_info.json"):
        (damaged / name).write_text("{")
    assert prepare.main(["prepare", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "  yes  " in lines["cifar10"]
    assert f"{kept}/originals/cifar10" in lines["cifar10"]
    assert "  no  " in lines["svhn_cropped"]
    assert "  damaged  " in lines["mnist"]
    assert lines["svhn_cropped"].endswith("for non-commercial use only")


def test_checksums_of_ones_own_have_to_be_such(small, kept, tmp_path):
    for text in ("{", "[]", '{"cifar10/%s": {"size": 1}}' % NAME, '{"cifar10/%s": {"size": 1, "checksum": "no:1"}}' % NAME):  # noqa: UP031
        (tmp_path / "checksums.json").write_text(text)
        assert "FEDJAX_SSL_CHECKSUMS: got" in message_of(ValueError, download.obtain, "cifar10", kept)


def test_a_config_fetches_its_data_unless_it_is_told_not_to(small, kept):
    overrides = {"data.num_clients": "4", "data.num_labels": "20", "cohort_size": "2"}
    tree = config_file.read("fl2_cifar10", overrides).tree
    tree["model"] = {"name": "linear"}
    tree["data"]["download"] = False
    message = message_of(FileNotFoundError, build.build, tree)
    assert "data.download is false: give a folder that has it (--config.data.data_dir=DIR), run " in message
    assert small.asked == []
    tree["data"]["download"] = True
    experiment = build.build(tree)
    assert experiment.problem.train.images.shape == (200, 32, 32, 3)
    assert len(small.asked) == 1
    assert provenance.data_digests(experiment) == provenance.data_digests(build.build(tree))


def test_two_that_fetch_at_once_fetch_once(server, kept, files, capsys, monkeypatch):
    say, waits = download._say, threading.Event()

    def noted(text):
        say(text)
        if "another process fetches it: waiting" in text:
            waits.set()

    monkeypatch.setattr(download, "_say", noted)
    server.between = lambda: waits.wait(60)  # the first has a part until the second is there
    with ThreadPoolExecutor(2) as threads:  # whose locks are those of processes
        assert len(set(threads.map(lambda _: obtain(kept), range(2)))) == 1
    assert (len(server.asked), names(kept)) == (1, [NAME])
    assert "another process fetches it: waiting" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_process_leaves_what_the_next_one_goes_on_with(small, kept, monkeypatch):
    monkeypatch.setattr("tests.data.server._PIECE", 1 << 19)  # of 750 kB
    killed = threading.Event()
    small.between = lambda: killed.wait(60)  # after the first piece
    argv = [sys.executable, "-m", "launch.prepare", "cifar10"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    path = pathlib.Path(kept, "originals", "cifar10", NAME)
    part = download.part_of(path)
    while not (part.exists() and part.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    killed.set()
    assert names(kept) == [f".{NAME}.part"]
    assert subprocess.run(argv, capture_output=True).returncode == 0
    assert small.asked[1][1].startswith("bytes=")
    assert path.read_bytes() == (small.folder / "cifar10" / NAME).read_bytes()
