"""How signals end a run: at once before its rounds begin, later after the round, or at once."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Self

import tqdm

from fedjax_ssl.simulation.distributed import largest

SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
STOPPING = "stopping after this round; Ctrl-C again ends at once"
ENDED = "ended; the same command goes on from the newest checkpoint"
BEFORE = "ended before a round began; the same command goes on"


class Stop:
    """The first signal of SIGNALS that was received, as `signal`, or None."""

    signal: int | None = None
    has_begun = False  # whether signals are only stored
    is_connecting = False  # whether one ends the process, as what waits for other processes does not let Python in

    def begin(self) -> None:
        """Call it as rounds begin, after which there is something to save, and all processes agree on where they end."""
        self.has_begun = True

    def agreed(self) -> bool:
        """Whether any process has a signal, which then all have. All processes have to ask at the same point."""
        if number := largest(self.signal or 0):
            self.signal = number
        return number > 0

    @classmethod
    @contextlib.contextmanager
    def on_signals(cls) -> Iterator[Self]:
        """Within it, the first signal is stored, to stop after the round, and a Ctrl-C after it ends the process at once.

        Before `begin`, while data are read, the first one is a KeyboardInterrupt, too: a read may take long, or hang.
        A thread reads the signals, as Python calls its handlers late: not while XLA computes a round. While something else
        handles a signal, such as a download, the signal is left to it. SIGHUP stays ignored if it was ignored before, as under
        `nohup`.
        """
        stop, terminals = cls(), [file for file in (1, 2) if os.isatty(file)]
        raised: list[int] = []

        def handle(number: int, _: FrameType | None = None) -> None:
            if stop.is_connecting:
                _end(number, BEFORE)
            stop.signal = stop.signal or number
            if number not in SIGNALS[:2]:  # the terminal is gone: what is written to it would fail
                _leave(terminals)
            if not (stop.has_begun or raised) and threading.current_thread() is threading.main_thread():
                raised.append(number)  # another one does not disturb what follows
                raise KeyboardInterrupt

        taken = [one for one in SIGNALS if one in SIGNALS[:2] or signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in taken}
        ours, pythons = socket.socketpair()
        pythons.setblocking(False)
        other = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=_listen, args=(ours, stop, handle), daemon=True)
        thread.start()
        try:
            yield stop
        finally:
            signal.set_wakeup_fd(other)
            for number, handler in before.items():
                signal.signal(number, handler)
            pythons.close()
            thread.join()
            ours.close()


def _listen(received: socket.socket, stop: Stop, handle: Any) -> None:
    """Takes signals, a byte each, as soon as they arrive, until the other end is closed."""
    is_first = True
    while number := int.from_bytes(received.recv(1)):
        if signal.getsignal(number) != handle:
            continue
        if number == signal.SIGINT and not is_first:
            _end(number, ENDED)
        handle(number)
        if number == signal.SIGINT and stop.has_begun:
            tqdm.tqdm.write(STOPPING, file=sys.stderr)
        is_first = False


def _end(number: int, text: str) -> None:
    """Ends this process at once, with a line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
    os._exit(128 + number)


def _leave(files: Sequence[int]) -> None:
    """Lets further output of these file descriptors go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in files:
        os.dup2(nowhere, file)
    os.close(nowhere)
