"""Fixtures shared by the tests of experiments."""

import contextlib
import pathlib

import pytest

from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import MODELS
from tests.experiment import average
from tests.experiment.commands import CONFIG, FIXMATCH, succeeded


@contextlib.contextmanager
def _put_back():
    """Within it methods and networks may be registered."""
    before = dict(METHODS), dict(MODELS)
    yield
    for registry, names in zip((METHODS, MODELS), before, strict=True):
        registry.clear()
        registry.update(names)


@pytest.fixture(scope="module")
def own_methods():
    """The method `average` is there, and what else a module's tests register; not for those of other modules."""
    with _put_back():
        average.register()
        yield


def _file(tmp_path_factory, name: str, text: str) -> str:
    path = tmp_path_factory.mktemp("config") / name
    path.write_text(text)
    return f"--config={path}"


@pytest.fixture(scope="session")
def config(tmp_path_factory) -> str:
    """The argument that names small.py, a config of the method `average`."""
    return _file(tmp_path_factory, "small.py", CONFIG)


@pytest.fixture(scope="session")
def fixmatch(tmp_path_factory) -> str:
    """The same of a method whose clients and server train a network."""
    return _file(tmp_path_factory, "fixmatch.py", FIXMATCH)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, config) -> pathlib.Path:
    """The folder of a run of small.py, for all who only read it."""
    folder = tmp_path_factory.mktemp("finished")
    with _put_back():
        succeeded(config, f"--workdir={folder}")
    return folder
