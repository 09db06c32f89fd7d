"""CSV files as the package reads and writes them."""

import csv
import os
import socket

import pytest

from fedjax_ssl import csv_files
from fedjax_ssl.data.text_encoder import hugging_face_encoder
from fedjax_ssl.files import regular
from launch import arguments


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_spaces_and_empty_lines_are_in_no_cell(tmp_path, mark):
    path = tmp_path / "a.csv"
    path.write_bytes(mark + b'"id", label \r\n\r\n1,"a, b"\n' + mark + b"2,c\n")
    assert csv_files.lines(path) == [(1, ["id", "label"]), (3, ["1", "a, b"]), (4, ["2", "c"])]


def test_no_text_is_a_formula_and_numbers_stay(tmp_path):
    row = ["=1+1", "+x", "-x", "@x", "\tx", "-1", "+.5e-3", "-inf", -1, "", "a=b", "'=x"]
    written = csv_files.written([row])
    (read,) = csv.reader([written])
    assert read == ["'=1+1", "'+x", "'-x", "'@x", "'\tx", *map(str, row[5:])]


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    assert regular(tmp_path / "link") == tmp_path / "link"
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "socket"))
        for path, kind in (("pipe", "named pipe"), ("socket", "socket"), (".", "folder"), ("/dev/null", "device")):
            with pytest.raises(ValueError, match=f"is a {kind}: give a regular file"):
                regular(tmp_path / path)
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"--out: got .*pipe, accepted: a file in a folder that exists"):
        arguments.output("--out", str(tmp_path / "pipe"))
    assert arguments.output("--out", str(tmp_path / "link")) == tmp_path / "link"
    with pytest.raises(ValueError, match="is a named pipe"):
        hugging_face_encoder(str(tmp_path), "cls", 8)
