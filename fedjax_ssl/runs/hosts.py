"""A run as one of several processes, on one host or on many: how they find each other, and how each of them ends all."""

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import tqdm

from fedjax_ssl.files import failing
from fedjax_ssl.runs.signals import BEFORE, Stop
from fedjax_ssl.simulation.distributed import exchanged, meet

LAUNCHERS = "Slurm, Open MPI, Kubernetes and Cloud TPU"
NO_LAUNCHER = f"--coordinator: missing, accepted: HOST:PORT of process 0, or nothing under {LAUNCHERS}"
BEAT, DEAD_AFTER = 4.0, 20.0  # seconds: between two signs of life of a process; without one until it counts as dead here
BACKSTOP = 60  # seconds until it counts as dead for JAX, which ends the others with a stack trace
SAID_AFTER, GIVEN_UP_AFTER = 10.0, 300.0  # seconds until a process says that it waits for the others, and until it ends
AT_ONCE, DAY = 5_000, 24 * 3_600_000
"""Milliseconds for which a process that has failed, or is done, waits for the others to end as well."""
ALIVE, ENDED, STARTED, DIFFERING = (f"fedjax_ssl/{name}" for name in ("alive/", "ended", "started/", "differing"))
"""Keys that all processes can read: the signs of life; who has ended, empty where all have, and with which status; what each
was started with; and in what they differ, empty where they are alike."""
NO_DEVICES = "Unable to initialize backend"  # JAX's words
GOES_ON = "the same command goes on from the newest checkpoint"
Result = TypeVar("Result")


def _job() -> Any:
    """The job's place and client, which JAX keeps under a private name, as Orbax takes them, too.

    Without them a process could not tell that another has died, which tests/README.md promises. Read only with --distributed.
    """
    from jax._src.distributed import global_state

    return global_state


def connected(place: Mapping[str, Any] | None) -> Any:
    """JAX's client of the service through which processes find each other, once all are there.

    `place` has `coordinator_address`, `num_processes` and `process_id`; None: a launcher tells them. Call it before JAX is
    used, and `run` right after it: the first use of a device waits for the devices of all processes.
    ValueError where no launcher tells; where not all come within GIVEN_UP_AFTER, the process ends with status 2.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which is the run's
    # Where the place is given, no launcher says which devices this process has.
    options: dict[str, Any] = {} if place is None else {**place, "cluster_detection_method": "deactivate"}
    patience = [
        threading.Timer(SAID_AFTER, _say, ["waiting for the other processes"]),
        threading.Timer(GIVEN_UP_AFTER, _give_up),
    ]
    for timer in patience:
        timer.start()
    try:
        late = int(GIVEN_UP_AFTER) + 60  # else JAX gives up first, with a stack trace
        jax.distributed.initialize(**options, heartbeat_timeout_seconds=BACKSTOP, initialization_timeout=late)
    except (ValueError, RuntimeError) as error:
        raise ValueError(NO_LAUNCHER if "coordinator_address" in str(error) else f"--distributed: {error}") from None
    finally:
        for timer in patience:
            timer.cancel()
    if _job().process_id > 0:
        logging.disable(logging.WARNING)  # process 0 says it
    return _job().client


def run(work: Callable[[], int], client: Any, stop: Stop, started: Mapping[str, Any]) -> int:
    """The exit status of `work` in process 0, in all processes: they end together, or the first one that fails ends all.

    If the processes were not `started` with the same arguments and software, all end with status 2 before a device is used.
    """
    watch = threading.Thread(target=_watch, args=(client, stop), daemon=True)
    watch.start()
    try:
        if differing := _differing_start(client, started):
            status = 2
            if _job().process_id == 0:
                _say(f"error: {differing}")
        else:
            meet()
            status = work()
    except KeyboardInterrupt:  # before the rounds began
        _end_at(stop.signal or signal.SIGINT, client)
    except Exception as error:
        _wait_for_signs(client)
        if NO_DEVICES in str(error):
            _say(f"error: {name()}: {' '.join(str(error).split())}")
        else:
            traceback.print_exc()
        status = 1
    try:
        client.wait_at_barrier(ENDED, AT_ONCE if status else DAY)
    except jax.errors.JaxRuntimeError:  # the others go on, and would wait for this process
        _end_all(client, status)
    if _job().process_id == 0:
        client.key_value_set(ENDED, json.dumps(["", status]))
    watch.join()
    _, status = json.loads(client.blocking_key_value_get(ENDED, AT_ONCE))
    jax.distributed.shutdown()
    return status


def together(work: Callable[[], Result]) -> Result:
    """What `work` returns, once it has in all processes; ValueError, in all of them, where the input of any is wrong."""
    if jax.process_count() == 1:
        return work()
    result, error = None, ("", 0)
    try:
        result = work()
    except (ValueError, OSError) as wrong:
        error = (str(wrong) or repr(wrong), failing(wrong))
    errors = exchanged(error)
    for number, (text, code) in enumerate(errors):
        if text:
            said = text if errors == [errors[0]] * len(errors) or number == 0 else f"process {number}: {text}"
            raise ValueError(said) from OSError(code, os.strerror(code)) if code else None
    return result  # type: ignore[return-value]


def check_alike(what: Callable[[], dict[str, Any]]) -> None:
    """Raises ValueError where something of `what`, by its name, is not the same in all processes."""
    if differing := _differing(exchanged(what() if jax.process_count() > 1 else {})):
        raise ValueError(differing)


def _differing(values: Sequence[Mapping[str, Any]]) -> str:
    """The first process whose values are not those of process 0, and those that differ; empty: there is none."""
    first, *others = values
    for number, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            shown = (
                f"{name} is {first.get(name)!r} in process 0 and {other.get(name)!r} in process {number}" for name in names
            )
            return f"--distributed: got processes that differ, accepted: the same in all: {', '.join(shown)}"
    return ""


def _differing_start(client: Any, started: Mapping[str, Any]) -> str:
    """In what processes were started differently, as `_differing` says it; asks the service alone, and no device."""
    number, wait = _job().process_id, DAY  # `_watch` ends the wait for a process that has died
    client.key_value_set(f"{STARTED}{number}", json.dumps(started))
    if number == 0:
        keys = [f"{STARTED}{other}" for other in range(_job().num_processes)]
        client.key_value_set(DIFFERING, _differing([json.loads(client.blocking_key_value_get(key, wait)) for key in keys]))
    return str(client.blocking_key_value_get(DIFFERING, wait))


def _wait_for_signs(client: Any) -> None:
    """Returns once all other processes have given a new sign of life: then an error is this one's own.

    Whatever the exchange with a process that has died raises, `_watch` finds it meanwhile, says its name, and ends this one.
    """
    deadline = time.monotonic() + DEAD_AFTER + 4 * BEAT
    others = [f"{ALIVE}{number}" for number in range(_job().num_processes) if number != _job().process_id]
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has died
        before = dict(client.key_value_dir_get(ALIVE))
        while time.monotonic() < deadline:
            now = dict(client.key_value_dir_get(ALIVE))
            if all(now.get(key) != before.get(key) for key in others):
                return
            time.sleep(BEAT / 8)
    time.sleep(max(0, deadline - time.monotonic()))


def _watch(client: Any, stop: Stop) -> None:
    """Gives signs of life, and ends this process once another has ended; process 0 looks for those that give none.

    It also ends all at a signal before the rounds, where the main thread waits in XLA and does not get it.
    """
    seen: dict[str, tuple[str, int]] = {}
    was_signaled = False
    # What process 0 knows of a process until its first sign of life.
    silent = {f"{ALIVE}{number}": f"process {number} none" for number in range(_job().num_processes)}
    for beat in itertools.count():
        if stop.signal is None or stop.has_begun:
            was_signaled = False
        elif was_signaled:  # at the last look already
            _end_at(stop.signal, client)
        else:
            was_signaled = True
        try:
            client.key_value_set(f"{ALIVE}{_job().process_id}", f"{name()} {beat}", allow_overwrite=True)
            whose, status = json.loads(client.blocking_key_value_get(ENDED, int(1000 * BEAT)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                _say(f"process 0 has died; {GOES_ON}")
                os._exit(1)
            if _job().process_id == 0 and (dead := _dead(silent | dict(client.key_value_dir_get(ALIVE)), seen)):
                _say(f"{dead} has died, without a sign of life for {DEAD_AFTER:.0f} s; {GOES_ON}")
                _end_all(client, 1)
        else:
            if whose in ("", name()):
                return
            if _job().process_id == 0:
                _say(f"{whose} has ended with status {status}; {GOES_ON}")
            _leave(status)


def _dead(signs: dict[str, str], seen: dict[str, tuple[str, int]]) -> str:
    """The name of a process whose sign of life stays the same; `seen` has the last one, and how often it came again.

    Looks are counted, not seconds: a job that was suspended as a whole lives.
    """
    for key, sign in signs.items():
        last, again = seen.get(key, ("", 0))
        seen[key] = sign, again + 1 if sign == last else 0
        if seen[key][1] * BEAT > DEAD_AFTER:
            return sign.rpartition(" ")[0]
    return ""


def _end_at(number: int, client: Any) -> None:
    """Ends this process and the others at a signal before the rounds, when there is nothing to save."""
    if _job().process_id == 0:  # which also says who has ended
        _say(BEFORE)
    _end_all(client, 128 + number)


def _end_all(client: Any, status: int) -> None:
    """Ends this process, and lets the others know, which end then, too."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
        client.key_value_set(ENDED, json.dumps([name(), status]))
    _leave(status)


def _leave(status: int) -> None:
    """Ends this process. Process 0, without which JAX ends the others by a signal, first serves them the word."""
    if _job().process_id == 0:
        time.sleep(1)
    sys.stdout.flush()
    os._exit(status)


def _give_up() -> None:
    """Ends this process, whose main thread waits inside JAX, as one with wrong input."""
    _say(f"error: --distributed: not all processes met within {GIVEN_UP_AFTER:.0f} s; does each run, and reach --coordinator?")
    os._exit(2)


def name() -> str:
    """The number and the host of this process."""
    return f"process {_job().process_id} on {socket.gethostname()}"


def _say(text: str) -> None:
    """Prints a line, above the progress bar where there is one."""
    tqdm.tqdm.write(text, file=sys.stderr)
