"""Mutations of a config, for tests that none escapes: what may stand in place of a value, and where."""

import contextlib
import faulthandler
import resource
import tempfile
import time
from collections.abc import Iterator
from unittest import mock

from hypothesis import strategies as st

from configs import digits
from fedjax_ssl.experiment import run
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.runs import flattened
from fedjax_ssl.models import MODELS, default_options
from fedjax_ssl.simulation.program import Program
from launch.completion import choices
from tests import tiny
from tests.experiment.commands import launch

SECONDS, BYTES = 30, 3 << 30  # a mutation takes a small part of both
NUMBERS = (0, -1, 1, 2, 7, 1000, 10**6, 2**31 - 1, 2**31, 10**12, 10**20, -(10**20), 10**400, True, 0.5, -0.5, 0.9999, 1e-30, 1e-300,
           1e30, 1e38, 1e300, float("nan"), float("inf"), -float("inf"))  # fmt: skip
WORDS = st.text(max_size=6) | st.sampled_from(
    ["", " ", "\n", "\0", "..", "/", "README.md", "ü", "\udc80", "'", "{}", "[0]", "9" * 5000]
)
ODD = st.one_of(
    st.none(), st.sampled_from(NUMBERS), WORDS, st.lists(st.sampled_from(NUMBERS), max_size=3), st.just((0.1,) * 100_000),
    st.dictionaries(WORDS, st.sampled_from(NUMBERS), max_size=2), st.binary(max_size=3), st.just({1: 2}), st.just(object()),
)  # fmt: skip


def keys(tree, prefix=""):
    for key, value in tree.items():
        if not isinstance(key, str):
            continue
        yield prefix + key
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


def with_network(tree, name):
    tree["model"] = {key: tree["model"][key] for key in ("norm", "norm_momentum")} | {"name": name, **default_options(name)}
    if name == "wide_resnet":
        tree["model"]["depth"] = 10
    if name == "mnist_cnn":
        tree["data"]["image_size"] = 16
    return tree


CHOICES = choices()


WHOLE = (0, 1, 2, 3, 7, 60, 1000, 10**4, 10**5, 10**6, 10**7, 2**31 - 1)
REAL = (0.0, 0.1, 0.5, 0.9999, 1.0, 3.0, 1000.0, 1e-30, 1e-300, 1e30, 1e38, 1e300)


def fitting(key, value):
    """A value of the kind that a key has, or anything."""
    if key in CHOICES:
        like = CHOICES[key]
    elif isinstance(value, int):
        like = WHOLE
    elif isinstance(value, float):
        like = REAL
    elif isinstance(value, tuple):
        like = [(), (0.5,), (0.1, 0.5), (1.0,), (1e-30,) * 3, (0.3,) * 8]
    else:
        return ODD
    return st.sampled_from([0, 1, 1]).flatmap(lambda fits: st.sampled_from(like) if fits else ODD)


@st.composite
def configs(draw):
    """A small config of any method and network, with one to three mutations."""
    tree = with_network(tiny.config(draw(st.sampled_from(sorted(tiny.METHODS)))), draw(st.sampled_from(sorted(MODELS))))
    what = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        key = draw(st.sampled_from(sorted(keys(tree))))
        *groups, name = key.split(".")
        group = tree
        for one in groups:
            group = group[one]
        action = draw(st.sampled_from(["set", "set", "set", "set", "delete", "add"]))
        if action == "delete":
            del group[name]
            what.append(f"del {key}")
            continue
        if action == "add":
            name = draw(WORDS | st.integers() | st.none())
        group[name] = draw(fitting(key, group.get(name)))
        what.append(f"{'.'.join(groups)}.{name!r}={str(group[name])[:60]!r}")
    if isinstance(tree.setdefault("data", {}), dict):
        tree["data"]["download"] = False
    return tree, what


@st.composite
def commands(draw):
    method, network = draw(st.sampled_from(sorted(tiny.METHODS))), draw(st.sampled_from(sorted(MODELS)))
    tree = with_network(digits.get_config(method).to_dict(), network)
    words = [f"--config=digits:{method}", f"--config.model.name={network}", "--config.data.download=false"]
    if network == "mnist_cnn":
        words.append("--config.data.image_size=16")
    if network == "wide_resnet":
        words.append("--config.model.depth=10")
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        key = draw(st.sampled_from(sorted(keys(tree))))
        value = draw(fitting(key, flattened(tree).get(key)))
        if isinstance(value, tuple | list):
            value = ",".join(map(str, value))
        suffix = draw(st.sampled_from(["", "", "", "", "", ".x", "[0]", "x"]))
        form = draw(st.sampled_from(["{}={}", "{}={}", "{}={}", "{} {}", "no{}", "{}"]))
        word = form.format(f"config.{key}{suffix}", str(value))
        words += ["--" + one for one in [word]] if form != "{} {}" else [f"--config.{key}{suffix}", str(value)]
    if draw(st.integers(0, 9)) == 0:
        words.append(draw(WORDS))
    if draw(st.integers(0, 9)) == 0:
        words[0] = draw(
            st.sampled_from(
                [
                    "--config=",
                    "--config",
                    "--confg=digits",
                    "--config=README.md",
                    "--config=digts:fl2",
                    "--config=digits:fl2,x",
                    "--config=digits:,,=",
                    "--config=.",
                    "--config=/",
                    "--config=digits.py",
                ]
            )
            | WORDS.map(lambda x: f"--config={x}")
        )
    return words
