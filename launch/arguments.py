"""The words of a command line: `--config` and its overrides, arguments as `argparse` reads them, one line for a mistake."""

import argparse
import contextlib
import difflib
import functools
import pathlib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from . import command, config_file, devices


class Parser(argparse.ArgumentParser):
    """The arguments of a command, with its module's docstring as help; what is wrong with them is a ValueError of one line.

    With `has_config` its help has the words of `--config`, which `parse` reads.
    """

    def __init__(self, name: str, description: str | None, *, has_config: bool = False) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(command.program(name), description=description, formatter_class=as_written, allow_abbrev=False)
        if has_config:
            self.add_argument("--config", help="the config: a name or a file's path, with its argument after a colon")
            keys = (
                f"a key's value, such as --config.client.epochs=1; `{command.program('explain')} --config=...` prints them all"
            )
            self.add_argument("--config.KEY", metavar="VALUE", help=keys)

    def parse_args(self, args: Any = None, namespace: Any = None, meant: Callable[[Sequence[str]], str] | None = None) -> Any:
        """The arguments; ValueError names the first that is none of the command's, or is given twice.

        `meant` says what to type in place of such arguments; "": nobody knows.
        """
        words = Counter(str(word).partition("=")[0] for word in args or ())
        options, strange = self.parse_known_args(args, namespace)
        for action in self._actions:
            if not isinstance(action, argparse._AppendAction) and sum(words[one] for one in action.option_strings) > 1:
                raise ValueError(f"{action.option_strings[-1]}: got it twice, accepted: once")
        if not strange:
            return options
        known = {option[2:]: option for option in self._option_string_actions if option.startswith("--")}
        name, is_option = strange[0].partition("=")[0].lstrip("-"), strange[0].startswith("-")
        near = {like: difflib.get_close_matches(name, known, 1, like) if is_option else [] for like in (0.8, 0.6)}
        hint = known[near[0.8][0]] if near[0.8] else meant(strange) if meant else ""
        hint = hint or (known[near[0.6][0]] if near[0.6] else "")
        raise ValueError(f"{strange[0]}: unknown argument, {f'did you mean {hint}?' if hint else accepted(known.values())}")

    def print_help(self, file: Any = None) -> None:
        """Prints the help; unlike argparse's, it does not hide that nobody reads it any more."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Raises a ValueError in place of a usage of many lines."""
        raise ValueError(message.removeprefix("argument "))


def accepted(words: Iterable[str]) -> str:
    """What ends an error: the words that are accepted."""
    return f"accepted: {', '.join(words)}"


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number, of at least so much, in the digits 0 to 9."""

    def number(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a whole number >= {least}")
        return int(text)

    return number


def output(option: str, given: str, *suffixes: str) -> pathlib.Path:
    """The path of a file to write; ValueError, before hours are lost, where it cannot be, or has none of the suffixes."""
    path = pathlib.Path(given).expanduser()
    if (suffixes and path.suffix not in suffixes) or not path.parent.is_dir() or (path.exists() and not path.is_file()):
        file = " ".join(["a file", " or ".join(f"NAME{suffix}" for suffix in suffixes)]).strip()
        raise ValueError(f"{option}: got {given}, accepted: {file} in a folder that exists")
    return path


def parse(parser: Any, words: Sequence[str], *, computes: bool = False) -> tuple[config_file.Config, Any]:
    """The config of a command's words, and its other arguments; ValueError has one line for a mistake.

    A command that `computes` uses all cores.
    """
    file, overrides, others = split_words(words)
    options = parser.parse_args(others, meant=functools.partial(meant, file))
    if not file:
        raise ValueError(f"--config: missing; {config_file.FOR_EXAMPLE}")
    if computes:
        devices.use_all_cores()  # before the config, which may use JAX
    return config_file.read(file, overrides), options


def meant(file: str, strange: Sequence[str]) -> str:
    """What to type in place of words that are no arguments: `--config=...`, or a key of the config `file`; "": nobody knows."""
    word, *after = strange
    key, equals, value = word.lstrip("-").partition("=")
    if not word.startswith("-") and not file and config_file.is_config(word):
        return f"--config={word}"
    if not equals:
        value = after[0] if after and not after[0].startswith("-") else "VALUE"
    try:
        keys = config_file.keys(config_file.read(file or "digits").tree)
    except ValueError:  # which is said once the words are right
        return ""
    found = [one for one in keys if key == one] or [one for one in keys if one.rpartition(".")[2] == key]
    if found and (equals or word.startswith("-")):
        return " or ".join(f"--config.{one}={shlex.quote(value)}" for one in found)
    if equals and file:  # a config's argument, after its colon
        with contextlib.suppress(ValueError):
            config_file.read(longer := f"{file}{',' if ':' in file else ':'}{key}={value}")
            return f"--config={shlex.quote(longer)}"
    return ""


def split_words(words: Sequence[str]) -> tuple[str, dict[str, str], list[str]]:
    """The config file, the overrides, and all other words of a command line; ValueError where one is given twice."""
    overrides: dict[str, str] = {}
    others: list[str] = []
    file, words = "", list(words)
    while words:
        word = words.pop(0)
        match = re.fullmatch(r"--?(no)?config(?:\.([^=]*))?(?:=(.*))?", word, re.DOTALL)
        if match is None:
            others.append(word)
            continue
        negated, key, value = match.groups()
        is_switch = value is None and (negated or not words or words[0].startswith("--"))  # without a value
        if value is None:
            value = words.pop(0) if not is_switch else "false" if negated else "true"
        if file if key is None else key in overrides:
            shown, before = ("--config", file) if key is None else (f"config.{key}", overrides[key])
            raise ValueError(f"{shown}: got it twice, {before!r} and {value!r}, accepted: once")
        if key is None:
            file = "" if is_switch else value
        else:
            overrides[key] = value
    return file, overrides, others
