"""Fixtures shared by the tests of experiments."""

import pytest

from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import MODELS
from tests.experiment import average
from tests.experiment.commands import CONFIG, FIXMATCH


@pytest.fixture(scope="module")
def own_methods():
    """The method `average` is there, and what else a module's tests register; not for those of other modules."""
    before = dict(METHODS), dict(MODELS)
    average.register()
    yield
    for registry, names in zip((METHODS, MODELS), before, strict=True):
        registry.clear()
        registry.update(names)


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
