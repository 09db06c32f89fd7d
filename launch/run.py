"""Runs an experiment from a config.

    python -m launch.run --config=digits:fl2 [--workdir=DIR] [--config.a.b=value ...]

With `--config.seeds=N`, or `--config.vary=KEY --config.values=...`, or both, runs are one program, with a folder each in DIR.
The same command again resumes. Exit status: 0 done; 2 wrong config, arguments or data; 1 anything else; 130 on Ctrl-C, 143 on
SIGTERM and 129 on SIGHUP, after saving a checkpoint. A second Ctrl-C ends at once, with what the newest checkpoint has.
"""

import contextlib
import functools
import logging
import pathlib
import signal
import sys
from logging.handlers import MemoryHandler
from typing import Any

from absl import flags

from . import command

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where results go; default: runs/<config name>/<seed>, or, for several runs, runs/<config name>."
)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Remove what an earlier run left in the workdir, and start anew.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Say what the run is and will cost, without training or writing anything.")
STOP_AFTER = flags.DEFINE_integer("stop_after", None, "End cleanly after this many rounds; the same command goes on.", 1)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    # What is to be said before the run is accepted waits until then: a refusal is one line.
    waiting = MemoryHandler(1000, flushLevel=logging.CRITICAL)
    # Importing the package, as `fedjax-ssl` does first, has given the root logger a handler of Orbax's: it goes.
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[waiting], force=True)
    logging.getLogger("fedjax_ssl").setLevel(logging.INFO)
    try:
        config = command.parse(argv, __name__)
    except ValueError as error:
        return command.refuse(error)
    try:
        # The package is imported after the flags: `--help` and a mistyped flag answer at once.
        from fedjax_ssl.experiment.stop import Stop

        with Stop.on_signals() as stop:
            status = _run(config, stop, waiting)
        return 128 + stop.signal if stop.signal is not None else status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(config: command.Config, stop: Any, waiting: MemoryHandler) -> int:
    command.use_all_cores()
    command.keep_programs()
    from fedjax_ssl.experiment import build, estimate, extension, owner, run, trackers
    from fedjax_ssl.experiment.divergence import DivergedError, StoppedError
    from fedjax_ssl.experiment.runs import runs_of
    from fedjax_ssl.experiment.settings import Settings
    from fedjax_ssl.experiment.writers import AboveTheBar
    from fedjax_ssl.simulation import memory

    waiting.setTarget(AboveTheBar())
    with contextlib.ExitStack() as until_the_end:
        try:
            settings = Settings.from_dict(config.tree)
            trackers.names(settings.log_to)
            default = pathlib.Path("runs", config.name, *([] if settings.is_several else [str(settings.seed)]))
            workdir, names = pathlib.Path(WORKDIR.value or default).expanduser(), [one.name for one in runs_of(settings)]
            if not DRY_RUN.value:  # before anything there is read
                until_the_end.enter_context(owner.owned([workdir / name for name in names]))
            noted = None if OVERWRITE.value else run.noted_layout(workdir, names, settings.rounds)
            experiment = build.build(settings, layout=noted)
            if DRY_RUN.value:
                print(*estimate.described(experiment), sep="\n")
                return 0

            @functools.cache
            def dependence(rounds: int) -> str:
                before = build.build(settings.model_copy(update={"rounds": rounds}), layout=experiment.layout)
                return extension.dependence(before, experiment)

            for own, folder in zip(experiment.runs, run.folders(experiment, workdir), strict=True):
                run.open_workdir(folder, own.settings.to_dict(), overwrite=OVERWRITE.value, dependence=dependence)
        except command.WRONG_INPUT as error:
            waiting.buffer.clear()
            return command.refuse(error)
        waiting.flush()
        waiting.flushLevel = logging.NOTSET  # from here on nothing waits
        is_done = all(run.is_finished(folder, settings.rounds) for folder in run.folders(experiment, workdir))
        if not is_done and estimate.may_be_long(experiment):
            seconds = estimate.estimate(experiment).seconds
            print(
                f"{settings.rounds} rounds take about {estimate.duration(seconds)} here, by a rough estimate", file=sys.stderr
            )
        try:
            run.run(experiment, workdir, stop, stop_after=STOP_AFTER.value)
        except run.RefusedError as error:
            return command.refuse(error)
        except (DivergedError, StoppedError) as error:
            return command.refuse(error, status=1)
        except RuntimeError as error:
            if not memory.is_short(error):
                raise
            return command.refuse(error if isinstance(error, memory.OutOfMemoryError) else memory.explained(error), status=1)
    return 0


if __name__ == "__main__":
    sys.exit(command.ended(main, sys.argv))
