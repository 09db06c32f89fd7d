"""Command-line programs: `python -m launch.NAME`, or `fedjax-ssl NAME`."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # `python -m launch.NAME`: until `command.ended` sees to it, Ctrl-C ends the imports of the package without a traceback.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
