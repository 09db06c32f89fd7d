"""Runs an experiment from a config.

    python -m launch.run --config=digits:fl2 [--workdir=DIR] [--config.a.b=value ...]

With `--config.seeds=N`, or `--config.vary=KEY --config.values=...`, or both, runs are one program, with a folder each in DIR.
The same command again resumes. Exit status: 0 done; 2 wrong config, arguments or data; 1 anything else; 130 on Ctrl-C, 143 on
SIGTERM and 129 on SIGHUP, after saving a checkpoint, or at once where no round has begun. A second Ctrl-C ends at once, with
what the newest checkpoint has.
"""

import argparse
import contextlib
import logging
import os
import pathlib
import re
import sys
from logging.handlers import MemoryHandler
from typing import Any

from . import arguments, command, streams


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    waiting = command.logging_that_waits()
    try:
        config, options = command.parse(_parser(), argv[1:], computes=True)
        place = _place(options)
    except ValueError as error:
        return command.refuse(error)
    # The package is imported after the flags: `--help` and a mistyped flag answer at once.
    from fedjax_ssl.runs.signals import BEFORE, Stop

    with streams.lasting(), Stop.on_signals() as stop:
        try:
            status = _run(config, options, place, stop, waiting)
        except KeyboardInterrupt:
            if stop.signal is None:  # of a download
                raise
            print(BEFORE, file=sys.stderr)
    return 128 + stop.signal if stop.signal is not None else status


def _parser() -> arguments.Parser:
    parser = arguments.Parser("run", __doc__, has_config=True)
    workdir = "where results go; default: runs/<config name>/<seed>, or, for several runs, runs/<config name>"
    parser.add_argument("--workdir", metavar="DIR", help=workdir)
    for name, about in (
        ("overwrite", "remove what an earlier run left in the workdir, and start anew"),
        ("dry_run", "say what the run is and will cost; nothing is trained or fetched, and no round is compiled"),
        ("distributed", "run as one of several processes, which share the clients of a round"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=about)
    for name, least, about in (
        ("stop_after", 1, "end cleanly after so many rounds; the same command goes on"),
        ("num_processes", 1, "how many processes there are, where no launcher tells"),
        ("process_id", 0, "which of them this is, from 0 on, where no launcher tells"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=arguments.whole(least), help=about)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where no launcher tells")
    return parser


def _place(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the arguments say of this process's place among several; None: nothing. ValueError where they do not go together."""
    given = {f"--{name}": getattr(options, name) for name in ("coordinator", "num_processes", "process_id")}
    address, count, number = given.values()
    for name, value in given.items():
        if value is not None and not options.distributed:
            raise ValueError(f"{name}: got {value} without --distributed, accepted: with it")
        if value is None and any(other is not None for other in given.values()):
            raise ValueError(f"{name}: missing, accepted: all of {', '.join(given)}, or none of them")
    if address is None or count is None or number is None:
        return None
    if not re.fullmatch(r"([^:/\s]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}", address) or not 0 < int(address.rpartition(":")[2]) < 2**16:
        raise ValueError(f"--coordinator: got {address}, accepted: HOST:PORT of process 0")
    if number >= count:
        raise ValueError(f"--process_id: got {number} with --num_processes={count}, accepted: 0 to {count - 1}")
    return {"coordinator_address": address, "num_processes": count, "process_id": number}


def _run(config: command.Config, options: argparse.Namespace, place: Any, stop: Any, waiting: MemoryHandler) -> int:
    command.keep_programs()
    if not options.distributed:
        try:
            command.find_devices()
        except ValueError as error:
            return command.refuse(error)
        return _run_here(config, options, stop, waiting)
    from fedjax_ssl.runs import hosts, provenance

    own = ("process_id", "coordinator")  # which processes may say each in its way
    started = {f"--{name}": value for name, value in vars(options).items() if name not in own} | provenance.software()
    try:
        stop.is_connecting = True
        client = hosts.connected(place)
    except ValueError as error:
        return command.refuse(error)
    finally:
        stop.is_connecting = False
    return hosts.run(lambda: _run_here(config, options, stop, waiting), client, stop, started)


def _run_here(config: command.Config, options: argparse.Namespace, stop: Any, waiting: MemoryHandler) -> int:
    from fedjax_ssl.experiment import estimate
    from fedjax_ssl.experiment.divergence import DivergedError, StoppedError
    from fedjax_ssl.files import FAILURES, failure
    from fedjax_ssl.options import plural
    from fedjax_ssl.runs import hosts, run
    from fedjax_ssl.runs.progress import AboveTheBar
    from fedjax_ssl.simulation import memory
    from fedjax_ssl.simulation.distributed import is_first

    with contextlib.ExitStack() as until_the_end:
        try:
            experiment, workdir = _accepted(config, options, until_the_end)
        except command.WRONG_INPUT as error:
            status = command.status_of(error)
            if not is_first():
                return status
            of_disk = isinstance(error, OSError) and error.errno in FAILURES
            return command.refuse(failure(error, pathlib.Path()) if of_disk else error, status)  # type: ignore[arg-type]
        waiting.setTarget(AboveTheBar())
        waiting.flush()
        waiting.flushLevel = logging.NOTSET  # from here on nothing waits
        if options.dry_run:
            for line in estimate.described(experiment):
                if is_first():
                    print(line)
            return 0
        rounds = experiment.settings.rounds
        begun = [run.newest(folder) for folder in run.folders(experiment, workdir) if not run.is_finished(folder, rounds)]
        left = (options.stop_after or rounds) - min(begun, default=rounds)
        if is_first() and left > 0 and estimate.may_be_long(experiment):
            seconds = estimate.estimate(experiment).seconds * left / rounds
            these = f"{plural(left, 'round')} take{'s' * (left == 1)}"
            print(f"{these} about {estimate.duration(seconds)} here, by a rough estimate", file=sys.stderr)
        try:
            run.run(experiment, workdir, stop, stop_after=options.stop_after, command=config.words)
        except run.RefusedError as error:
            return command.refuse(error)
        except OSError as error:
            return command.refuse(failure(error, workdir), status=1)
        except (DivergedError, StoppedError) as error:
            return command.refuse(error, status=1) if is_first() else 1
        except RuntimeError as error:
            if not memory.is_short(error):
                raise
            text = error if isinstance(error, memory.OutOfMemoryError) else memory.explained(error)
            return command.refuse(text if is_first() else f"{hosts.name()}: {text}", status=1)
    return 0


def _accepted(
    config: command.Config, options: argparse.Namespace, until_the_end: contextlib.ExitStack
) -> tuple[Any, pathlib.Path]:
    """The experiment and its workdir, whose folders process 0 owns until the end; ValueError or OSError for wrong input."""
    from fedjax_ssl.experiment import build
    from fedjax_ssl.experiment.expansion import PLACES, flattened, identity, runs_of
    from fedjax_ssl.experiment.layout import Layout
    from fedjax_ssl.experiment.settings import Settings
    from fedjax_ssl.files import plain
    from fedjax_ssl.runs import changes, folder, hosts, lock, overwrite, provenance, run, trackers
    from fedjax_ssl.simulation.distributed import exchanged, is_first

    def began() -> tuple[Settings, pathlib.Path, tuple[Layout | None, dict[str, int]]]:
        settings = Settings.from_dict(config.tree)
        trackers.names(settings.log_to)
        default = pathlib.Path("runs", config.name, *([] if settings.is_several else [str(settings.seed)]))
        workdir, names = pathlib.Path(os.path.expanduser(options.workdir or default)), [one.name for one in runs_of(settings)]
        if is_first():
            folder.check_place(workdir, is_several=settings.is_several)
        if is_first() and not options.dry_run:  # before anything there is read
            until_the_end.enter_context(lock.owned([workdir / name for name in names]))
        is_new = options.overwrite or not is_first()
        return settings, workdir, (None, {}) if is_new else run.noted(workdir, names, settings.rounds)

    settings, workdir, noted = hosts.together(began)
    layout, widths = exchanged(noted)[0]
    begun, reads = layout and Layout(*layout), not options.dry_run
    experiment = hosts.together(lambda: build.build(settings, layout=begun, widths=widths, reads=reads))

    def alike() -> dict[str, Any]:
        files = {f"the file of {group}.name": digest for group, digest in changes.digests(settings).items()}
        return plain(identity(flattened(settings.to_dict()), PLACES)) | files | {"data": provenance.data_digests(experiment)}

    hosts.check_alike(alike)

    def opened() -> None:
        if options.overwrite:
            overwrite.remove_all(run.folders(experiment, workdir), folder.OURS)
        for own, path in zip(experiment.runs, run.folders(experiment, workdir), strict=True):
            folder.open_workdir(path, own.settings.to_dict(), experiment)

    hosts.together(opened if is_first() and not options.dry_run else lambda: None)
    return experiment, workdir


if __name__ == "__main__":
    sys.exit(command.ended(main, sys.argv))
