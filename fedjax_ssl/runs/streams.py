"""Standard streams that a run outlasts: closed from the beginning (`>&-`), or closed by their reader later (`| head`)."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


def open_closed() -> None:
    """Opens closed standard streams on os.devnull.

    Otherwise the next file that is opened would get the file descriptor of one of them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Within it what cannot be written to standard output or standard error is dropped."""
    with contextlib.redirect_stdout(_lasting(sys.stdout)), contextlib.redirect_stderr(_lasting(sys.stderr)):
        yield


def drop_unwritten(stream: Any) -> None:
    """Drops what a stream has still to write: Python would try once more as it ends, and change the exit status."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        original = os.dup(stream.fileno())
        try:
            os.dup2(nowhere.fileno(), stream.fileno())
            stream.flush()
        finally:
            os.dup2(original, stream.fileno())
            os.close(original)


def write_or_drop(stream: Any) -> None:
    """Writes what a stream has still to write, or drops it where that cannot be done."""
    try:
        stream.flush()
    except OSError as error:
        if not isinstance(error, BlockingIOError):  # of a pipe that is full, which may have room later
            drop_unwritten(stream)


class _Lasting(io.FileIO):
    def write(self, content: Any) -> int:
        """Writes what can be written; drops the rest, and says that it was written."""
        try:
            written = super().write(content)
        except OSError:
            written = None
        return len(content) if written is None else written


def _lasting(stream: Any) -> Any:
    write_or_drop(stream)
    try:
        raw = _Lasting(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:  # no stream of the system's: a notebook's, a test's
        return stream
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)
