"""A run's folder: what is in it, and whether a config may make it or go on in it."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_ssl.experiment.best import ENDED_EARLY
from fedjax_ssl.experiment.divergence import REASON
from fedjax_ssl.experiment.expansion import flattened, identity
from fedjax_ssl.experiment.experiment import Experiment, Row
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import REMEDY, plain, read_json, remove_unfinished, write_json
from fedjax_ssl.local.schedules import READ_ROUNDS
from fedjax_ssl.runs import provenance
from fedjax_ssl.runs.changes import REGISTERED, kept
from fedjax_ssl.runs.checkpoint import BEST, CHECKPOINTS, Checkpoints, is_unfinished
from fedjax_ssl.runs.clients import CLIENTS
from fedjax_ssl.runs.lock import owned
from fedjax_ssl.runs.log import MetricsLog

CONFIG, SUMMARY, RUN, DIVERGED = "config.json", "summary.json", "run.json", "diverged.json"
EVALUATION = "evaluation.json"  # of `launch.evaluate --save`
FOLDERS = (CHECKPOINTS, BEST, "tensorboard", "wandb", CLIENTS, REGISTERED)
OURS = (CONFIG, SUMMARY, RUN, DIVERGED, EVALUATION, "metrics.jsonl", "mlflow.db", *FOLDERS)


def folders(experiment: Experiment, workdir: pathlib.Path) -> list[pathlib.Path]:
    """Each run's folder: the workdir itself for one run, folders in it for several."""
    return [workdir / run.name for run in experiment.runs]


def is_finished(folder: pathlib.Path, rounds: int) -> bool:
    """Whether a run's folder has the summary of so many rounds, or of a run that has ended early; a damaged one is none."""
    try:
        found = read_json(folder / SUMMARY)
        return found["rounds"] >= rounds or ENDED_EARLY in found
    except (OSError, ValueError, KeyError, TypeError):
        return False


def newest(folder: pathlib.Path) -> int:
    """The newest round of which a run's folder has a checkpoint; 0: none."""
    with Checkpoints(folder, read_only=True) as checkpoints:
        return max(checkpoints.rounds(), default=0)


def diverged(folder: pathlib.Path) -> str:
    """Why the run in a folder has diverged; empty: it has not. DamagedError where the file that says so is damaged."""
    path = folder / DIVERGED
    return str(read_json(path)[REASON]) if path.exists() else ""


def ended_early(folder: pathlib.Path) -> str:
    """Why the run in a folder has ended before its last round, though it has not diverged; empty: it has not ended so."""
    return str(read_json(folder / SUMMARY).get(ENDED_EARLY, "")) if is_finished(folder, 1) else ""


def over(folder: pathlib.Path) -> Row:
    """Why the run in a folder is over, though others beside it go on, under REASON or ENDED_EARLY; empty: it is not."""
    reasons = {REASON: diverged(folder), ENDED_EARLY: ended_early(folder)}
    return {key: why for key, why in reasons.items() if why}


def open_workdir(workdir: pathlib.Path, config: Mapping[str, Any], experiment: Experiment | None = None) -> None:
    """Makes a run's folder with its config, or checks the config that is there.

    A key that the folder's config lacks counts with its default, except one of `method` or `model`. Raises ValueError with the
    keys that differ, or where the folder cannot be made, and OwnedError where another process has it. With its `experiment` the
    config may have more rounds than the folder's, where nothing in a round depends on their number. `run` then writes the new
    config, once the folder's other files and the data are accepted, too.
    """
    with owned([workdir]):
        _check_kinds(workdir)
        for folder in (workdir, workdir / CLIENTS):
            remove_unfinished(folder)
        path = workdir / CONFIG
        for lacking in (name for name in (CONFIG, RUN) if not (workdir / name).exists()):
            if MetricsLog(workdir).rows():
                raise ValueError(f"{workdir} has a log of rounds and no {lacking}: {REMEDY}")
        if path.exists():
            _check_config(path, config, experiment)
        else:
            write_json(path, config)


def check_place(workdir: pathlib.Path, *, is_several: bool) -> None:
    """Raises ValueError where a folder for several runs is one run's own, or a folder for one run holds several."""
    if is_several and (workdir / CONFIG).exists() and (workdir / RUN).exists():
        raise ValueError(
            f"--workdir: got {workdir} for several runs, which is the folder of a single run, accepted: another one"
        )
    inside = () if is_several else (path.parent for path in workdir.glob(f"*/{CONFIG}") if (path.parent / RUN).exists())
    if found := min(inside, default=None):
        raise ValueError(f"--workdir: got {workdir} for a single run, which holds the run {found.name}, accepted: another one")


def _check_kinds(workdir: pathlib.Path) -> None:
    """Raises ValueError where something else has the name of one of a run's files or folders."""
    inside = (path for name in (CHECKPOINTS, BEST) for path in (workdir / name).glob("*"))
    saved = [path for path in inside if path.name.isdecimal() or is_unfinished(path)]
    for path in (*(workdir / name for name in OURS), *saved):
        if os.path.lexists(path) and path.is_dir() != (path.name in FOLDERS or path in saved):
            raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'no folder'}, unlike a run's: {REMEDY}")


def _check_config(path: pathlib.Path, config: Mapping[str, Any], experiment: Experiment | None) -> None:
    """Raises ValueError where a folder's config is another experiment's; `experiment` as for `open_workdir`."""
    trees = read_json(path), config, Settings().to_dict()
    there, here, defaults = (identity(flattened(plain(tree))) for tree in trees)
    there = {key: value for key, value in defaults.items() if key in here} | there
    differing = [key for key in sorted(there | here) if there.get(key) != here.get(key)]
    if differing == ["rounds"] and experiment is not None:
        _check_rounds(path.parent, there["rounds"], experiment)
    elif differing:
        shown = ", ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in differing)
        instead = "give another --workdir, or --overwrite to start anew"
        raise ValueError(f"{path.parent} holds another experiment: {shown}; {instead}")


def _check_rounds(workdir: pathlib.Path, there: int, experiment: Experiment) -> None:
    """Raises ValueError where a run of `there` rounds cannot become one of as many as the experiment has."""
    here = experiment.settings.rounds
    instead = "or another --workdir, or --overwrite to start anew"
    if not isinstance(there, int) or here < there:
        raise ValueError(f"rounds: got {here} with a run of {there} in {workdir}, accepted: {there} or more, {instead}")
    if why := dependence(experiment, there):
        what = f"got {here} with a run of {there} in {workdir}, whose results depend on their number ({why})"
        raise ValueError(f"rounds: {what}, accepted: {there}, {instead}")


def dependence(experiment: Experiment, before: int) -> str:
    """What in an experiment depends on the number of rounds, of which there were `before`, in words; empty: nothing does.

    It may be a learning-rate schedule, a phase that is a share of the rounds, or a method that reads their number
    (`Requires.rounds`); no other method gets it.
    """
    settings = experiment.settings
    found = [
        f"{key}={value}"
        for key, value in flattened(plain(settings.to_dict())).items()
        if key.endswith(".schedule") and value in READ_ROUNDS and key not in experiment.unread
    ]
    for options in (run.settings.method for run in experiment.runs):
        now, then = (options.for_rounds(rounds).model_dump() for rounds in (settings.rounds, before))
        found += [f"method.{key}={getattr(options, key)}" for key in now if now[key] != then[key]]
    if settings.keep_best and before % settings.eval_every:
        found.append(f"keep_best={settings.keep_best}, which has seen round {before}, the last one")
    if experiment.method.requires.rounds:
        found.append(f"method.name={settings.method.name}, which reads the number of rounds")
    return ", ".join(dict.fromkeys(found))


def write_run(
    paths: Sequence[pathlib.Path],
    experiment: Experiment,
    layout: Layout,
    command: Sequence[str] = (),
    program: Mapping[str, str] | None = None,
) -> None:
    """Writes each run's `run.json`; `command` are the words of `launch.run` that made it, `program` is `changes.program`'s."""
    data = provenance.data_digests(experiment)
    examples = provenance.data_digests(experiment, devices=False) if experiment.problem.system else data
    of_all: dict[str, Any] = {
        "layout": layout._asdict(),
        "machine": provenance.machine(),
        "widths": provenance.widths(experiment),
        "dataset": provenance.dataset_digest(experiment.dataset, experiment.stored_shape),
        "start": experiment.start_digest,
        "unread": sorted(experiment.unread),  # for reports, with keys of the config
        "command": command,
    }
    for i, (path, run) in enumerate(zip(paths, experiment.runs, strict=True)):
        before = read_json(path) if path.exists() else {"began": provenance.began(run.settings)}
        first = before.get("program", {})  # stays, so that each later call says that another one has run it
        own = {
            "files": before["files"] if "files" in before else provenance.file_digests(experiment),
            "data": data[i],
            "examples": examples[i],
            "program": first if program and first.get("of") == program["of"] else program or first,
            REGISTERED: kept(path.parent, before, run.settings),
            **{key: before[key] for key in ("began",) if key in before},  # an older version did not note it
        }
        write_json(path, of_all | own)
