"""What the commands share: `--config` and its overrides, and one line for whatever is wrong with the input."""

from __future__ import annotations

import difflib
import importlib.util
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from absl import flags

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
FOR_EXAMPLE = "for example --config=digits:fl2"
CONFIG_HELP = """  --config: The config: a name or a file's path, with its argument after a colon.
  --config.KEY: A key's value, such as --config.client.epochs=1; `python -m launch.explain --config=...` prints them all."""
WRONG_INPUT = (ValueError, OSError)
MAY_WAIT = ("xla_cpu_collective_call_warn_stuck_timeout_seconds", "xla_cpu_collective_call_terminate_timeout_seconds")
"""XLA's flags for how long a CPU device waits for the others before it says so, and before it ends the process."""
MAY_WAIT_BELOW = (0, 13)
"""The first JAX on which they were not tried, and are not set: XLA ends a process for a flag that it does not know."""


def use_all_cores() -> None:
    """Makes a JAX device of each CPU core, for clients to run beside each other; XLA_FLAGS and JAX_NUM_CPU_DEVICES go first.

    The small operations of one client leave most of a machine idle: see the devices in `benchmarks/results/scaling.json`. To be
    called before JAX is used.
    """
    import jax

    from fedjax_ssl.experiment.provenance import cores

    flags = os.environ.get("XLA_FLAGS", "")
    # Devices add up what their clients return. One that waits there for longer than a minute, as clients have more or less to
    # train, would end the process: XLA takes it to be stuck.
    waiting = [f for f in MAY_WAIT if f not in flags] if jax.__version_info__ < MAY_WAIT_BELOW else []
    os.environ["XLA_FLAGS"] = " ".join([flags, *(f"--{flag}={24 * 3600}" for flag in waiting)]).strip()

    if "JAX_NUM_CPU_DEVICES" not in os.environ and "xla_force_host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", cores())


def keep_programs() -> None:
    """Keeps compiled programs in `~/.cache/fedjax_ssl`, so that a run starts faster the second time; JAX_COMPILATION_CACHE_DIR
    goes first, and empty keeps none. What is in that folder can be removed at any time. Where it cannot be made, none is kept.
    """
    import jax

    from fedjax_ssl.experiment.provenance import cache_folder

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = cache_folder()
        if folder is None:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def refuse(error: Exception) -> int:
    """Prints what is wrong in one line on standard error; returns exit status 2."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


class Config(NamedTuple):
    """What `--config` and its overrides say.

    Attributes:
        tree: nested dicts of plain values.
        name: the config file's name with its argument, fit for a folder: `configs/digits.py:fl2` is `digits-fl2`.
    """

    tree: dict[str, Any]
    name: str


def parse(argv: list[str]) -> Config:
    """Parses a command line: `--config` and its overrides are returned, other flags are set.

    `--help` prints what the command is and its flags, and exits with status 0.

    Raises:
        ValueError: one clear line for whatever is wrong.
    """
    if {"--help", "-h"} & set(argv):
        print(f"{sys.modules['__main__'].__doc__}\n{CONFIG_HELP}\n{flags.FLAGS.main_module_help()}")
        sys.exit(0)
    file, overrides, others = _sorted(argv[1:])
    try:
        rest = flags.FLAGS([argv[0], *others])[1:]
    except flags.Error as error:
        raise ValueError(str(error)) from None
    if rest:
        raise ValueError(f"{rest[0]}: not a flag; a value is given as --config.key=value")
    return read(file, overrides)


def read(file: str, overrides: Mapping[str, str] | None = None) -> Config:
    """The config that a file makes, with overrides.

    Args:
        file: name of a file in `configs` (`digits`), or the path of any, with its argument after a colon. The file is executed:
            it may register methods and networks.
        overrides: dotted keys -> values as text.

    Raises:
        ValueError: there is no such file, it fails, or an override does not fit.
    """
    path, colon, argument = file.partition(":")
    tree = _made(_module(path), argument if colon else None)
    for key, text in (overrides or {}).items():
        _set(tree, key, text)
    return Config(tree, re.sub(r"[^\w.=]+", "-", "-".join(filter(None, [pathlib.Path(path).stem, argument]))))


def _sorted(words: list[str]) -> tuple[str, dict[str, str], list[str]]:
    """The config file, the overrides, and all other words of a command line."""
    file, words = "", list(words)
    overrides: dict[str, str] = {}
    others: list[str] = []
    while words:
        word = words.pop(0)
        match = re.fullmatch(r"--?(no)?config(?:\.([^=]*))?(?:=(.*))?", word, re.DOTALL)
        if match is None:
            others.append(word)
            continue
        negated, key, value = match.groups()
        if value is None and (negated or not words or words[0].startswith("--")):
            value = "false" if negated else "true"  # a switch without a value
            if key is None:
                raise ValueError(f"--config: missing; {FOR_EXAMPLE}")
        elif value is None:
            value = words.pop(0)
        if key is None:
            file = value
        else:
            overrides.pop(key, None)
            overrides[key] = value
    if not file:
        raise ValueError(f"--config: missing; {FOR_EXAMPLE}")
    return file, overrides, others


def _module(path: str) -> ModuleType:
    """A config file, executed."""
    file = pathlib.Path(path)
    if not file.suffix and not file.exists():
        file = CONFIGS / f"{path}.py"
    if file.suffix != ".py" or not file.is_file():
        near = difflib.get_close_matches(file.stem, config_names(), 1)
        hint = f"; did you mean {near[0]}?" if near else f"; {FOR_EXAMPLE}"
        raise ValueError(f"--config: got {path}, accepted: the name of a config, or the path of a config file{hint}")
    is_ours = file.resolve().parent == CONFIGS.resolve()
    spec = importlib.util.spec_from_file_location(f"configs.{file.stem}" if is_ours else file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if not is_ours:
        sys.path.insert(0, str(file.resolve().parent))  # what lies beside it can be imported, as beside a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--config: {_where(error, file)}") from None
    if not callable(getattr(module, "get_config", None)):
        raise ValueError(f"--config: got {path}, accepted: a config file, which defines get_config; {FOR_EXAMPLE}")
    return module


def _made(module: ModuleType, argument: str | None) -> dict[str, Any]:
    """The nested dicts that a module's `get_config` returns."""
    try:
        config = module.get_config() if argument is None else module.get_config(argument)
    except Exception as error:
        is_plain = isinstance(error, ValueError | OSError)
        raise ValueError(f"--config: {error if is_plain else _where(error, pathlib.Path(module.__file__ or ''))}") from None
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise ValueError(f"--config: got a get_config that returns {type(config).__name__}, accepted: a ConfigDict, or a dict")
    return _plain(config)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in config.items()}


def _where(error: Exception, file: pathlib.Path) -> str:
    """An error inside a config file, with the line of it."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if pathlib.Path(frame.filename) == file.absolute()
    ]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{file}{f', line {line}' if line else ''}: {type(error).__name__}: {error}"


def _set(tree: dict[str, Any], key: str, text: str) -> None:
    """Sets a value of nested dicts from text, as the type of what is there."""
    from fedjax_ssl.options import from_text, unknown_key

    known = _keys(tree)
    if key not in known:
        raise ValueError(unknown_key(f"config.{key}", [f"config.{one}" for one in known]))
    *path, name = key.split(".")
    for group in path:
        tree = tree[group]
    if isinstance(tree[name], dict):
        raise ValueError(f"config.{key}: got {text!r}, accepted: a value for a key of this group: {', '.join(tree[name])}")
    tree[name] = from_text(f"config.{key}", text, tree[name])


def _keys(config: dict[str, Any], prefix: str = "") -> list[str]:
    nested = [[prefix + k, *(_keys(v, f"{prefix}{k}.") if isinstance(v, dict) else [])] for k, v in config.items()]
    return [key for keys in nested for key in keys]


def config_names() -> list[str]:
    """The configs that `--config` knows by name."""
    return [file.stem for file in sorted(CONFIGS.glob("*.py")) if "def get_config" in file.read_text()]
