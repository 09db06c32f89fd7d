"""Mutations of configs: what may stand in place of a value, and where, for every key, method and network."""

import contextlib
import copy
import pathlib
import resource
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from hypothesis import strategies as st

from configs import digits
from fedjax_ssl.experiment.expansion import flattened
from fedjax_ssl.methods import METHODS
from fedjax_ssl.models import MODELS
from fedjax_ssl.options import as_text
from fedjax_ssl.simulation.program import Program
from launch import completion
from tests import tiny

SECONDS, BYTES = 60, 3 << 30  # far more than any mutation takes
STATM = pathlib.Path("/proc/self/statm")

NAN, INF = float("nan"), float("inf")
WHOLE = (0, 1, 2, 3, 7, 60, 1000, 10**4, 10**5, 10**6, 10**7, 2**31 - 1)
REAL = (0.0, 0.1, 0.5, 0.9999, 1.0, 3.0, 1000.0, 1e-30, 1e30, 1e38)
TUPLES = ((), (0.5,), (0.1, 0.5), (1.0,), (1e-30,) * 3, (0.3,) * 8)
NUMBERS = (True, -1, 2**31, 10**12, 10**20, -(10**20), 10**400, -0.5, 1e-300, 1e300, NAN, INF, -INF, *WHOLE, *REAL)
TEXT = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["", " ", "\n", "\0", "..", "/", "~", "README.md", "ü", "\udc80", "'", "{}", "[0]", "9" * 5000]),
)
ODD = st.one_of(
    st.none(), st.sampled_from(NUMBERS), TEXT, st.lists(st.sampled_from(NUMBERS), max_size=3), st.just((0.1,) * 100_000),
    st.dictionaries(TEXT, st.sampled_from(NUMBERS), max_size=2), st.binary(max_size=3), st.just(object()),
    st.builds(lambda: {1: 2}),  # a new one each time, as what follows may change it
)  # fmt: skip
WORDS = completion.keys()
TINY = {name: tiny.config(name) for name in METHODS}
DIGITS = {name: digits.get_config(name).to_dict() for name in METHODS}
NETWORKS = {name: dict(model.options()) for name, model in MODELS.items()} | {"wide_resnet": {"depth": 10}}


def keys(tree: dict, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a config, those of groups too."""
    for key, value in tree.items():
        if isinstance(key, str) and "." not in key:
            yield prefix + key
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{key}.")


def fitting(key: str, value: object) -> st.SearchStrategy:
    """A value of the kind that a key has, or anything."""
    kinds = ((int, WHOLE), (float, REAL), (tuple, TUPLES))
    like = WORDS.get(key) or next((of_kind for kind, of_kind in kinds if isinstance(value, kind)), None)
    return st.sampled_from((ODD, *[st.sampled_from(like)] * 2)).flatmap(lambda drawn: drawn) if like else ODD


def with_network(tree: dict, name: str) -> dict:
    """A copy of a config with the network `name`."""
    tree = copy.deepcopy(tree)
    norms = {key: tree["model"][key] for key in ("norm", "norm_momentum")}
    tree["model"] = {"name": name, **norms, **NETWORKS[name]}
    if name == "mnist_cnn":
        tree["data"]["image_size"] = 16
    return tree


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config of any method and network in which one to three keys have another value, are removed or added."""
    tree = with_network(TINY[draw(st.sampled_from(list(TINY)))], draw(st.sampled_from(list(NETWORKS))))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        *groups, name = draw(st.sampled_from(list(keys(tree)))).split(".")
        group = tree
        for one in groups:
            group = group[one]
        action = draw(st.sampled_from(["change"] * 8 + ["remove", "add"]))
        old = group.pop(name)
        if action == "change":
            group[name] = draw(fitting(".".join([*groups, name]), old))
        elif action == "add":
            group[draw(TEXT | st.integers() | st.none())] = draw(ODD)
    if isinstance(tree.setdefault("data", {}), dict):
        tree["data"]["download"] = False
    return tree


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Words after `launch.run`: any method and network, one to three overrides, sometimes another word or config."""
    method, network = draw(st.sampled_from(list(DIGITS))), draw(st.sampled_from(list(NETWORKS)))
    tree = flattened(with_network(DIGITS[method], network))
    config = draw(st.sampled_from([f"digits:{method}"] * 9 + ["README.md", "digts:fl2", "digits:,,=", "/", ""]) | TEXT)
    words = [f"--config={config}", f"--config.model.name={network}", "--config.data.download=false"]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        key = draw(st.sampled_from(list(tree)))
        value = as_text(draw(fitting(key, tree[key])))
        suffix = draw(st.sampled_from([""] * 8 + [".x", "[0]", "x"]))
        form = draw(st.sampled_from(["--config.{}={}"] * 8 + ["--config.{} {}", "--noconfig.{}", "--config.{}"]))
        words += [word.format(key + suffix, value) for word in form.split()]
    return words + draw(st.sampled_from([[]] * 9 + [["--"]]) | st.lists(TEXT, max_size=1))


@contextlib.contextmanager
def within_limits() -> Iterator[None]:
    """Within it nothing may be compiled, memory grows by no more than BYTES, and TimeoutError comes after SECONDS of work."""

    def stop(*_: object) -> None:
        raise TimeoutError

    jax.devices()  # its threads, of which a machine of many cores has many, reserve memory as they begin
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, stop)
    if STATM.exists():  # on Linux
        size = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with mock.patch.object(Program, "compiled", side_effect=AssertionError("a program is compiled")):
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
