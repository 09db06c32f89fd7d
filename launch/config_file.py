"""Configs and sweeps by name or path: the nested dicts that a config file makes, with overrides, and the table of a sweep."""

import functools
import operator
import os
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_ssl.runs import streams

from . import command

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
CONFIGS_PACKAGE = f"{__package__}".rpartition("launch")[0] + "configs"  # `fedjax_ssl.configs`, or `configs` in a checkout
SWEEPS = CONFIGS / "sweeps"
FOR_EXAMPLE = "for example --config=digits:fl2"


class Config(NamedTuple):
    """What `--config` and its overrides, `words`, say as nested dicts, and its name with its argument, such as `digits-fl2`."""

    tree: dict[str, Any]
    name: str
    words: list[str]


def read(file: str, overrides: Mapping[str, str] | None = None) -> Config:
    """The config that a file makes, with overrides: dotted keys -> values as text. ValueError: it fails, or one does not fit.

    `file` is a name in `configs` or a path, with its argument after a colon; it is executed, and may register methods.
    """
    path, colon, argument = file.partition(":")
    tree = _made(path, argument if colon else None)
    from fedjax_ssl import moved
    from fedjax_ssl.options import from_text, unknown_key

    other, model = (overrides or {}).get("model.name", ""), tree.get("model")
    if other and isinstance(model, dict) and other != model.get("name", other):  # another network has other options
        from fedjax_ssl.experiment.settings import ModelSettings
        from fedjax_ssl.models import MODELS

        common = {key: value for key, value in model.items() if key in ModelSettings.model_fields}
        tree["model"] = common | (dict(MODELS[other].options()) if other in MODELS else {})
    known = keys(tree)
    for key, text in (overrides or {}).items():
        if key not in known:
            raise ValueError(unknown_key(f"config.{key}", [f"config.{one}" for one in known]))
        *groups, name = key.split(".")
        group = functools.reduce(operator.getitem, groups, tree)
        if isinstance(group[name], dict):
            if said := moved.line(f"config.{key}", [f"config.{one}" for one in known]):
                raise ValueError(said)
            raise ValueError(f"config.{key}: got {text!r}, accepted: a value for a key of this group: {', '.join(group[name])}")
        group[name] = from_text(f"config.{key}", text, group[name])
    words = [f"--config={file}", *(f"--config.{key}={text}" for key, text in (overrides or {}).items())]
    return Config(tree, re.sub(r"[^\w.=]+", "-", "-".join(filter(None, [pathlib.Path(path).stem, argument]))), words)


def smaller(word: str) -> str:
    """What `--config=FILE` is with `small` in its argument; empty for one that has no such size, or lies elsewhere."""
    path, _, argument = word.removeprefix("--config=").partition(":")
    own = f"{argument},small" if argument else "small"
    try:
        return f"{path}:{own}" if path in names() and _made(path, own) else ""
    except ValueError:
        return ""


def is_config(word: str) -> bool:
    """Whether a word names a config, or a config file, with its argument."""
    path = word.partition(":")[0]
    return path in names() or (path.endswith(".py") and os.path.isfile(os.path.expanduser(path)))


@streams.lasting()  # a config may print
def _made(path: str, argument: str | None) -> dict[str, Any]:
    """The nested dicts that a config file's `get_config` returns."""
    file = pathlib.Path(os.path.expanduser(path))  # unlike pathlib's, these functions take any text
    if not file.suffix:  # something else of the same name, such as a folder of results, is no config
        file = CONFIGS / f"{path}.py"
    if file.suffix != ".py" or not os.path.isfile(file):
        meant = command.hint(file.stem, names()) or f"; {FOR_EXAMPLE}"
        raise ValueError(f"--config: got {path}, accepted: the name of a config, or the path of a config file{meant}")
    is_ours = file.resolve().parent == CONFIGS.resolve()
    if not is_ours:
        sys.path.insert(0, str(file.resolve().parent))  # what lies beside it can be imported, as beside a script
    try:
        defined = runpy.run_path(str(file.absolute()), run_name=f"{CONFIGS_PACKAGE}.{file.stem}" if is_ours else file.stem)
    except (Exception, SystemExit) as error:
        raise ValueError(f"--config: {_where(error, file)}") from None
    if not callable(get_config := defined.get("get_config")):
        raise ValueError(f"--config: got {path}, accepted: a config file, which defines get_config; {FOR_EXAMPLE}")
    try:
        config = get_config() if argument is None else get_config(argument)
    except (Exception, SystemExit) as error:
        has_line = isinstance(error, command.WRONG_INPUT) and str(error)
        raise ValueError(f"--config: {error if has_line else _where(error, file)}") from None
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise ValueError(f"--config: got a get_config that returns {type(config).__name__}, accepted: a ConfigDict, or a dict")
    try:
        return _plain(config)
    except RecursionError:
        raise ValueError(f"--config: got a config that contains itself from {path}, accepted: nested dicts that end") from None


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    if strange := [key for key in config if not isinstance(key, str)]:
        raise ValueError(f"--config: got the key {strange[0]!r}, accepted: text")
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in config.items()}


def _where(error: BaseException, file: pathlib.Path) -> str:
    """An error inside a config file, with its line and its text, if it has one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if pathlib.Path(frame.filename) == file.absolute()]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{file}{f', line {line}' if line else ''}: {type(error).__name__}{f': {error}' if str(error) else ''}"


def keys(config: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys of nested dicts, each group before its own."""
    nested = [[prefix + k, *(keys(v, f"{prefix}{k}.") if isinstance(v, dict) else [])] for k, v in config.items()]
    return [key for several in nested for key in several]


def names() -> list[str]:
    """The configs that `--config` knows by name."""
    return [file.stem for file in sorted(CONFIGS.glob("*.py")) if "def get_config" in file.read_text()]


def sweep(name: str, small: bool) -> Any:
    """The table of a sweep's file, by its name or path, or its small version; ValueError where it is none."""
    from fedjax_ssl.runs.sweep import from_file

    path = pathlib.Path(name).expanduser()
    path = path if path.suffix or path.is_file() else SWEEPS / f"{name}.toml"
    if not path.is_file():
        known = sweep_names()
        raise ValueError(f"FILE: got {name}, accepted: a TOML file, or one of {', '.join(known)}{command.hint(name, known)}")
    return from_file(path, small)


def sweep_names() -> list[str]:
    """The sweeps that are known by name."""
    return sorted(path.stem for path in SWEEPS.glob("*.toml"))
