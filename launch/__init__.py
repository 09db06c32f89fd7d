"""Command-line programs: `python -m launch.NAME`, or `fedjax-ssl NAME`."""

import contextlib
import os
import signal
import sys

STOPPED = "stopped"


def stopped() -> int:
    """Says that Ctrl-C ended a command, also where nobody reads it any more; returns the exit status."""
    with contextlib.suppress(OSError, ValueError):  # closed
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"{STOPPED}\n".encode())
    return 128 + signal.SIGINT


if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # For `python -m launch.NAME`: until `command.ended` sees to it, Ctrl-C ends imports with one line.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(stopped()))
