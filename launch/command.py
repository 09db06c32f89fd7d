"""What the commands share: how they end, and one line for whatever is wrong with the input."""

import atexit
import contextlib
import difflib
import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from logging.handlers import MemoryHandler
from typing import NoReturn

from fedjax_ssl.runs import streams

from . import devices, stopped

WRONG_INPUT = (ValueError, OSError)
CLOSED = 128 + 13
"""The exit status where the reader of the output has gone: that of SIGPIPE, as other programs have it."""
_log = logging.getLogger("fedjax_ssl")


def program(name: str) -> str:
    """What a user types for a command: `python -m launch.NAME` in a checkout, else `fedjax-ssl NAME`."""
    return f"python -m launch.{name}" if __package__ == "launch" else f"fedjax-ssl {name}"


def exit_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a command with the process's arguments, and ends the process with its status.

    Python itself would go on for a second, or many on a busy machine, to free every module and program of JAX.
    """
    status: int | None = None

    def leave() -> None:
        if status is not None:  # else an exception that nobody expected ends the process
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(status)

    atexit.register(leave)  # before all that a command registers, and so called after it
    status = ended(main, sys.argv)
    sys.exit(status)


def ended(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit status of a command, which ends with a line on Ctrl-C, and quietly where nobody reads its output (`| head`)."""
    streams.open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no ±, dashes or bars
    if callable(signal.getsignal(signal.SIGINT)):  # that of `launch`; a program in the background ignores it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        try:
            try:
                devices.check_flags()
            except ValueError as error:
                return refuse(error)
            status = main(argv)
        except KeyboardInterrupt:
            status = stopped()
        finally:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # while a slow reader takes what is left
        streams.drop_unwritten(sys.stdout)
        return status or stopped()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        for stream in (sys.stdout, sys.stderr):
            streams.write_or_drop(stream)
        if error.errno == errno.EPIPE:
            return status or CLOSED
        return status or refuse(f"standard output: {error.strerror}", 1)


def logging_that_waits() -> MemoryHandler:
    """Sets logging up; what is said before the input is accepted waits in this handler, as a refusal is one line."""
    waiting = MemoryHandler(1000, flushLevel=logging.CRITICAL)
    # Importing the package, as `fedjax-ssl` does first, has given the root logger a handler of Orbax's: it goes.
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[waiting], force=True)
    _log.setLevel(logging.INFO)
    return waiting


def end_waiting(waiting: MemoryHandler, target: logging.Handler) -> None:
    """Says what has waited, and from now on everything at once."""
    waiting.setTarget(target)
    waiting.flush()
    waiting.flushLevel = logging.NOTSET


def hint(got: str, names: Iterable[str]) -> str:
    """What ends an error: the name that a mistyped one may have meant, or nothing."""
    near = difflib.get_close_matches(got, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def status_of(error: Exception | str) -> int:
    """The exit status for an error that a command found: 1 where a disk, or the system, has failed, else 2."""
    from fedjax_ssl.files import failing

    return 1 if isinstance(error, Exception) and failing(error) else 2


def refuse(error: Exception | str, status: int | None = None) -> int:
    """Prints what is wrong in one line on standard error; returns the exit status, by default `status_of` the error."""
    if isinstance(error, BrokenPipeError):  # nothing is wrong: see `ended`
        raise error
    status = status_of(error) if status is None else status
    line = " ".join(str(error).split()) or _without_text(error)
    if len(line) > 500:
        from fedjax_ssl.options import one_line  # takes a second, which a mistyped flag need not wait for

        line = one_line(line)
    print(f"error: {line}", file=sys.stderr)
    return status


def _without_text(error: Exception | str) -> str:
    """What there is to say of an exception without text: its type, and where it was raised."""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None))
    where = f" raised in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} without a text{where}"
