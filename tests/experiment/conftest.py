"""Fixtures shared by the tests of experiments."""

import pytest

from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import MODELS
from tests.experiment import average


@pytest.fixture(scope="module")
def own_methods():
    """The method `average` is there, and what else a module's tests register; not for those of other modules."""
    before = dict(METHODS), dict(MODELS)
    average.register()
    yield
    for registry, names in zip((METHODS, MODELS), before, strict=True):
        registry.clear()
        registry.update(names)
