"""Standard streams that a run outlasts: closed from the beginning (`>&-`), or closed by their reader later (`| head`)."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


def open_closed() -> None:
    """Opens to nowhere what is closed of the standard streams: else the next file that is opened gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Within it what cannot be written to standard output or standard error is dropped."""
    with contextlib.redirect_stdout(_lasting(sys.stdout)), contextlib.redirect_stderr(_lasting(sys.stderr)):
        yield


def drop_unwritten(stream: Any) -> None:
    """Lets what a stream still has to write go nowhere: Python would try once more as it ends, and change the exit status."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Lasting(io.FileIO):
    def write(self, content: Any) -> int:
        """Writes what can be written; drops the rest, and says that it was written."""
        try:
            written = super().write(content)
        except OSError:
            written = None
        return len(content) if written is None else written


def _lasting(stream: Any) -> Any:
    try:
        stream.flush()
    except OSError:
        drop_unwritten(stream)
    try:
        raw = _Lasting(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:  # no stream of the system's: a notebook's, a test's
        return stream
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)
