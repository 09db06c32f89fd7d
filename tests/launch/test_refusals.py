"""Each wrong input of a command, a config or its settings is one line, before anything runs: `refusals.txt` has them all.

A line there is `WHAT -> the line`, in which `...` stands for any text. WHAT is a command without `python -m launch.`, or two
that say the same (`run|preview`); `build METHOD KEY=VALUE ...`, for a config of `tests.tiny`; or `settings KEY=VALUE ...`.
"""

import ast
import contextlib
import importlib
import pathlib
import re
import shlex
from functools import partial

import cv2
import numpy as np
import pytest

from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.settings import Settings
from tests import tiny
from tests.commands import CONFIG, refused, succeeded

pytestmark = [pytest.mark.usefixtures("own_methods"), pytest.mark.reliability]
LINES = [tuple(line.split(" -> ", 1)) for line in pathlib.Path(__file__).with_name("refusals.txt").read_text().splitlines()]
FILES = {
    "small.py": CONFIG,
    "README.md": "# hello",
    "without.py": "x = 1",
    "syntax.py": "def get_config(:",
    "imports.py": "import nothing_of_that_name\n",
    "divides.py": "def get_config():\n    return 1 / 0",
    "seven.py": "def get_config():\n    return 7",
    "empty.py": "def get_config():\n    return {}",
    "key.py": "def get_config():\n    return {1: 2}",
    "value.py": "class A: ...\ndef get_config():\n    return {'rounds': A()}",
    "itself.py": "def get_config():\n    config = {'rounds': 1}\n    config['method'] = config\n    return config",
    "silent.py": "def get_config():\n    raise ValueError",
    "exits.py": "def get_config():\n    raise SystemExit(3)",
    "texts.csv": "1,a\n1,b\n2,c\n2,d\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Config files, data that do not fit, `none` without a run and `runs` with two."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    images = np.zeros((2, 8, 8), np.uint8)
    np.savez(folder / "floats.npz", x_train=np.zeros((9, 3)), y_train=np.zeros(9, int), x_test=[[0.0]], y_test=[0])
    np.savez(folder / "wrong.npz", x_test=images[:, :5, :5], y_test=np.zeros(2, int))
    np.savez(folder / "labels.npz", x_test=images, y_test=np.array([0, 10]))
    for name in ("two/0", "two/12", "words/cat", "words/dog"):
        (folder / name).mkdir(parents=True)
        cv2.imwrite(str(folder / name / "0.png"), images[0])
    (folder / "none").mkdir()
    (folder / "digits").touch()  # which does not hide the config of that name
    options = ("--config.data.name=digits", "--config.rounds=1", "--config.seeds=2", "--workdir=runs")
    succeeded("--config=small.py", *options, cwd=folder)
    return folder


def raised(kind, words):
    """What a config of one of `tests.tiny`'s methods, or settings alone, are refused with."""
    overrides = {key: literal(value) for key, value in (word.split("=", 1) for word in words if "=" in word)}
    if kind == "build":
        call = partial(build, tiny.config(words[0], **overrides))
    else:
        (group,) = {key.split(".")[0] for key in overrides}
        call = partial(Settings.from_dict, {group: {key.split(".")[1]: value for key, value in overrides.items()}})
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        call()
    return str(error.value)


def literal(text):
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def said(what, folder):
    kind, *words = shlex.split(what)
    if kind in ("build", "settings"):
        with contextlib.chdir(folder):
            return {raised(kind, words)}
    programs = [importlib.import_module(f"launch.{name}") for name in kind.split("|")]
    return {refused(*words, cwd=folder, program=one).removeprefix("error: ").removesuffix("\n") for one in programs}


@pytest.mark.parametrize(("what", "line"), LINES, ids=[what for what, _ in LINES])
def test_what_is_wrong_is_said_in_one_line(folder, what, line):
    before = sorted(folder.rglob("*"))
    (found,) = said(what, folder)
    assert len(found) < 1000
    assert "\n" not in found
    assert re.fullmatch(".*".join(map(re.escape, line.split("..."))), found), found
    assert sorted(folder.rglob("*")) == before
