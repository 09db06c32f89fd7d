"""Command-line programs: `python -m launch.NAME`, or `fedjax-ssl NAME`."""

import signal
import sys

STOPPED = "stopped"

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:

    def _end(*_: object) -> None:
        """For `python -m launch.NAME`: until `command.ended` sees to it, Ctrl-C ends imports with one line."""
        print(STOPPED, file=sys.stderr)
        sys.exit(128 + signal.SIGINT)

    signal.signal(signal.SIGINT, _end)
