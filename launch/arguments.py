"""The arguments of the commands, as `argparse` reads them, and what is wrong with them in one line."""

import argparse
import difflib
import pathlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from . import command


class Parser(argparse.ArgumentParser):
    """The arguments of a command, with its module's docstring as help; what is wrong with them is a ValueError of one line.

    With `has_config` its help has the words of `--config`, which `command.parse` reads.
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
