"""The arguments of the commands, as `argparse` reads them, and what is wrong with them in one line."""

import argparse
import difflib
import pathlib
from collections.abc import Callable
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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments; ValueError names the first that is none of the command's."""
        options, strange = self.parse_known_args(args, namespace)
        if not strange:
            return options
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(strange[0].partition("=")[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(known)}"
        raise ValueError(f"{strange[0]}: unknown argument, {hint}")

    def print_help(self, file: Any = None) -> None:
        """Prints the help; unlike argparse's, it does not hide that nobody reads it any more."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Raises a ValueError in place of a usage of many lines."""
        raise ValueError(message.removeprefix("argument "))


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number, of at least so much."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
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
