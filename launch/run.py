"""Runs an experiment from a config.

    python -m launch.run --config=digits:fl2 [--workdir=DIR] [--config.a.b=value ...]

With `--config.seeds=N`, or `--config.vary=KEY --config.values=...`, or both, several runs are computed together in one program,
and each has its own folder in DIR. The same command again resumes. Exit status: 0 done; 2 wrong config, arguments or data; 1
anything else; 130 on Ctrl-C, 143 on SIGTERM and 129 on SIGHUP, after saving a checkpoint, or at once where no round has begun.
A second Ctrl-C ends at once, with what the newest checkpoint has.
"""

import argparse
import contextlib
import pathlib
import sys
from logging.handlers import MemoryHandler
from typing import Any

from fedjax_ssl.programs import keep_programs
from fedjax_ssl.runs import streams

from . import arguments, command, config_file, devices


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    waiting = command.logging_that_waits()
    try:
        config, options = arguments.parse(_parser(), argv[1:], computes=True)
        place = devices.place(options)
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
        ("stop_after", 1, "end cleanly after round N; the same command without this argument, or with a larger N, goes on"),
        ("num_processes", 1, "number of processes; needed unless a launcher provides it"),
        ("process_id", 0, "number of this process, from 0 on; needed unless a launcher provides it"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=arguments.whole(least), help=about)
    address = "address of process 0; needed unless a launcher that JAX knows, such as Slurm, provides it"
    parser.add_argument("--coordinator", metavar="HOST:PORT", help=address)
    return parser


def _run(config: config_file.Config, options: argparse.Namespace, place: Any, stop: Any, waiting: MemoryHandler) -> int:
    keep_programs()
    if not options.distributed:
        try:
            devices.find_devices()
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


def _run_here(config: config_file.Config, options: argparse.Namespace, stop: Any, waiting: MemoryHandler) -> int:
    from fedjax_ssl.experiment import estimate
    from fedjax_ssl.experiment.divergence import DivergedError, StoppedError
    from fedjax_ssl.files import FAILURES, failure
    from fedjax_ssl.runs import hosts, opening, run
    from fedjax_ssl.runs.progress import AboveTheBar
    from fedjax_ssl.simulation import memory
    from fedjax_ssl.simulation.contract import is_breach
    from fedjax_ssl.simulation.distributed import is_first

    with contextlib.ExitStack() as until_the_end:
        try:
            given = {"workdir": options.workdir, "overwrites": options.overwrite, "dry_run": options.dry_run}
            experiment, workdir = opening.opened(config.tree, config.name, until_the_end, **given)
        except command.WRONG_INPUT as error:
            status = command.status_of(error)
            if not is_first():
                return status
            of_disk = isinstance(error, OSError) and error.errno in FAILURES
            return command.refuse(failure(error, pathlib.Path()) if of_disk else error, status)  # type: ignore[arg-type]
        command.end_waiting(waiting, AboveTheBar())
        if options.dry_run:
            try:
                for line in estimate.described(experiment):
                    if is_first():
                        print(line)
            except ValueError as error:
                if not is_breach(error):
                    raise
                return command.refuse(error)
            return 0
        if is_first() and (
            said := opening.expectation(experiment, workdir, options.stop_after, config_file.smaller(config.words[0]))
        ):
            print(said, file=sys.stderr)
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


if __name__ == "__main__":
    command.exit_with(main)
