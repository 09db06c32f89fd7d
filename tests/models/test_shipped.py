"""One round of each network with the options as they ship equals the plain reference; and the networks' README is true."""

import itertools
import json
import math
import os
import pathlib
import re

import jax
import numpy as np
import pytest

from fedjax_ssl import models
from fedjax_ssl.models import registry
from fedjax_ssl.options import choices
from fedjax_ssl.simulation.program import ON_CPU
from tests.engine import run_python
from tests.models import shipped

ROOT = pathlib.Path(__file__).parents[2]
DEEP = ("wrn28_2", "resnet9", "resnet9_fedmatch", "resnet9_semifl", "resnet18")
"""Noise of 1e-7 in the parameters changes the reference's own update by up to 4e-3, where ReLUs and pools decide otherwise."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in (*shipped.CASES, "digits_fedavg", "digits_fl2")],
)
def test_a_round_with_the_options_that_ship_equals_the_plain_reference(name):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # without the tests' own
    environment |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    got = json.loads(run_python("-m", "tests.models.shipped", name, environment=environment).splitlines()[-1])
    assert (got["layout"]["conv"], got["layout"]["strategy"]) == ("cpu", "sharded")
    assert got["compiler"] == ON_CPU
    assert got["moved"] > 1e-4
    assert got["apart"] < (1e-2 if name in DEEP else 1e-4)
    np.testing.assert_allclose(*got["losses"], rtol=1e-4 if name in DEEP else 1e-5)


def test_every_network_is_run_as_it_ships():
    assert {case.model for case in shipped.CASES.values()} | {"cnn"} == set(registry.BUILT_IN) - {"linear"}


def test_the_readme_counts_parameters_and_names_the_normalization():
    text = (ROOT / "fedjax_ssl" / "models" / "README.md").read_text()
    table = text.split("| `model.name` |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table]
    for above, row in itertools.pairwise(rows):
        row[0] = row[0] or above[0]
    assert {row[0] for row in rows} == set(registry.BUILT_IN)
    for name in registry.BUILT_IN:
        for option, field in models.MODELS[name].options.model_fields.items():
            assert re.search(rf"`{option}[`=]", text), option
            assert all(re.search(rf"`{word}`|={word}`", text) for word in choices(field) if not word.isdecimal()), option
    for name, _, _, options, shape, count, normalization in rows:
        given = {key: int(value) if value.isdecimal() else value for key, value in re.findall(r"(\w+)=(\w+)", options)}
        network = models.build(name, num_classes=10, **given)
        params, stats = jax.eval_shape(
            lambda key, size=shape, of=network: of.init(key, tuple(map(int, size.split("x")))), jax.random.key(0)
        )
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == int(count.replace(",", "")), name
        assert normalization == ("batch" if stats else "none"), name
