"""A server of datasets' files, and a folder to keep them in."""

import pytest

from fedjax_ssl.data import download
from tests.data.server import serving


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    with serving(folder) as server:
        monkeypatch.setenv(download.MIRROR, server.address)
        server.patch = monkeypatch
        yield server


@pytest.fixture
def kept(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    return str(folder)
