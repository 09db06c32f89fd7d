"""The files that define the methods and networks that users register; the package's version does not cover their content."""

import functools
import hashlib
import inspect
import linecache
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

_PACKAGE = pathlib.Path(__file__).resolve().parent
_OURS = (_PACKAGE, *(_PACKAGE.parent / name for name in ("configs", "launch")))  # in a checkout these stand beside it
_FRAMEWORKS = ("builtins", "abc", "typing", "flax")  # of base classes; flax's version is noted
_registered: dict[tuple[str, str], tuple[object, str]] = {}


class Origin(NamedTuple):
    """The files that define and register something, by their names, and a digest of all of them, empty where there is none.

    `place` is the path of the first one.
    """

    files: tuple[tuple[str, bytes], ...]
    digest: str
    place: str = ""

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(name for name, _ in self.files)) or "typed in"


def note(group: str, name: str, thing: object) -> None:
    """Notes the file, outside of the package, that registers `thing` under a name of a group."""
    frame = sys._getframe(2)
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in ("fedjax_ssl", "jaxtyping"):
        frame = frame.f_back
    _registered[group, name] = thing, frame.f_code.co_filename


def origin(group: str, name: str, thing: object) -> Origin | None:
    """Where a method's factory or a network's class comes from; None: from the package.

    A notebook's cells count as files where IPython knows their text.
    """
    whose, caller = _registered.get((group, name), (None, ""))
    paths = dict.fromkeys([*_defining(thing), *([caller] if whose is thing else [])])
    own = [path for path in paths if not any(pathlib.Path(path).resolve().is_relative_to(folder) for folder in _OURS)]
    if paths and not own:
        return None
    files = tuple((pathlib.PurePath(path).name, text) for path in own if (text := _text(path)))
    whole = hashlib.blake2b(digest_size=16)
    for _, text in files:
        whole.update(len(text).to_bytes(8) + text)
    return Origin(files, whole.hexdigest() if files else "", own[0] if own else "")


def _text(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return "".join(linecache.getlines(path)).encode()


def _defining(thing: Any) -> Iterator[str]:
    """The names of the files with the code of a function, of what it wraps, or of a class and its bases."""
    if isinstance(thing, staticmethod):
        yield from _defining(thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from _defining(thing.func)
    elif isinstance(thing, type):
        for base in (base for base in thing.__mro__ if base.__module__.partition(".")[0] not in _FRAMEWORKS):
            for value in vars(base).values():
                if isinstance(value, staticmethod) or getattr(value, "__module__", "") == base.__module__:
                    yield from _defining(inspect.unwrap(value) if inspect.isfunction(value) else value)
    elif hasattr(thing, "__code__"):
        if not thing.__code__.co_filename.startswith("<"):  # what dataclasses make, or what was typed in
            yield thing.__code__.co_filename
        if hasattr(thing, "__wrapped__"):
            yield from _defining(thing.__wrapped__)
