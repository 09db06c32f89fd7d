"""The arguments of the commands that take no `--config`, or more than it."""

import argparse
import pathlib
from typing import NoReturn

from . import command


class Parser(argparse.ArgumentParser):
    """The arguments of a command, with its module's docstring as help; what is wrong with them is a ValueError of one line."""

    def __init__(self, name: str, description: str | None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(command.program(name), description=description, formatter_class=as_written, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises a ValueError in place of a usage of many lines."""
        raise ValueError(message)


def output(option: str, given: str, *suffixes: str) -> pathlib.Path:
    """The path of a file to write; ValueError, before hours are lost, where it cannot be, or has none of the suffixes."""
    path = pathlib.Path(given).expanduser()
    if (suffixes and path.suffix not in suffixes) or not path.parent.is_dir() or path.is_dir():
        file = " ".join(["a file", " or ".join(f"NAME{suffix}" for suffix in suffixes)]).strip()
        raise ValueError(f"{option}: got {given}, accepted: {file} in a folder that exists")
    return path
