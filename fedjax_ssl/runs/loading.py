"""Finished and stopped runs, loaded from their folders, which are only read."""

import contextlib
import dataclasses
import os
import pathlib

from fedjax_ssl import methods, models
from fedjax_ssl.data.sources import Dataset
from fedjax_ssl.experiment.arguments import profiles_of
from fedjax_ssl.experiment.best import ROUND
from fedjax_ssl.experiment.build import build
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.experiment.system_settings import SystemSettings
from fedjax_ssl.files import read_json
from fedjax_ssl.runs import changes, provenance
from fedjax_ssl.runs.checkpoint import BEST, CHECKPOINTS, Checkpoints
from fedjax_ssl.runs.folder import CONFIG, RUN
from fedjax_ssl.runs.log import complete_lines, read_row
from fedjax_ssl.runs.run import check_same_run, log_of
from fedjax_ssl.simulation.round import RunState

Path = str | os.PathLike[str]
ACCEPTED = "accepted: the folder of a run that has one"
WHICH = {"newest": CHECKPOINTS, "best": BEST}
IN_MEMORY = ("arrays", "text_features")  # the names of data that `build` got, where they have no path


def load(
    workdir: Path, dataset: Dataset | None = None, *, data_dir: str = "", path: str = "", which: str = "newest"
) -> tuple[Experiment, RunState]:
    """The experiment and the newest state of a finished or stopped run, from the folder of one run, which is only read.

    If `which` is `best`, it is the state of the round that is the best by validation (the setting `keep_best`).

    Data that have moved since are found by `data_dir` or `path`, which take the place of the config's; data that were in memory
    are given as `dataset`. A method or a network that is not the package's has to be registered before. Where this machine
    lacks the devices of the run's layout, the experiment has another one, and its results differ by rounding. If the files that
    describe uneven clients are missing or differ from the run's, the experiment refuses to run rounds; all else works.

    Raises ValueError or FileNotFoundError, with one line, where there is no run, the folder holds several runs, a file of it
    is damaged, or the data are others.
    """
    folder, *others = run_folders(workdir)
    if folder != pathlib.Path(workdir).expanduser():
        shown = ", ".join(map(str, (folder, *others)))
        number = f"{1 + len(others)} run{'s' * bool(others)}"
        raise ValueError(f"workdir: got {workdir}, which holds {number}, accepted: a run's own folder: {shown}")
    settings = settings_of(folder)
    if dataset is None and settings.data.name in IN_MEMORY and not (settings.data.path or path):
        got = f"got {settings.data.name}, which were in memory"
        raise ValueError(f"data.name: {got}, accepted: fedjax_ssl.load({str(workdir)!r}, dataset=...) with the same data")
    provenance.check_began(folder / RUN, settings)
    moved = {key: value for key, value in (("data_dir", data_dir), ("path", path)) if value}
    settings = settings.model_copy(update={"data": settings.data.model_copy(update=moved)})
    noted = read_json(folder / RUN) if (folder / RUN).exists() else {}
    layout = provenance.layout(folder / RUN) if noted else None
    if layout is None:
        any_device = settings.execution.model_copy(update={"strategy": "auto", "chunk_size": 0, "devices": 0})
        settings = settings.model_copy(update={"execution": any_device})
    lacking = _unreadable(settings)
    system = SystemSettings() if lacking else settings.system
    used = settings.model_copy(update={"system": system})
    if not settings.model.trainable:  # else what is not trained is in no checkpoint
        used = used.model_copy(update={"model": settings.model.model_copy(update={"init": ""})})
    try:
        experiment = build(used, dataset, layout=layout, widths=noted.get("widths"), start=start_of(used))
    except FileNotFoundError as error:
        have_moved = "for data that have moved, give path or data_dir (launch.evaluate --path=PATH or --data_dir=DIR)"
        raise FileNotFoundError(f"{error}; {have_moved}") from None
    if noted.get("data") not in (None, *provenance.data_digests(experiment)):
        if noted.get("examples") not in provenance.data_digests(experiment, devices=False):
            accepted = "the data that it began with (load's dataset, data_dir or path)"
            raise ValueError(f"data: got other examples, or another split, than the run in {folder} has, accepted: {accepted}")
        lacking = lacking or f"system: got other devices of clients than the run in {folder} has, accepted: its own files"
    if settings.model.trainable and noted.get("start") != experiment.start_digest:
        got = f"got other weights than the run in {folder} began with"
        raise ValueError(f"model.init: {got}, accepted: the same, as the checkpoint lacks what is not trained")
    (run,) = experiment.runs
    run = run._replace(settings=run.settings.model_copy(update={"system": settings.system, "model": settings.model}))
    experiment = dataclasses.replace(experiment, runs=(run,), lacking=lacking)
    state = _state(folder, experiment, which)
    program = changes.program(experiment)
    changes.warn({folder: changes.changed(folder / RUN, settings, program)}, changes.LOADED)
    return experiment, state


def start_of(settings: Settings) -> tuple[Experiment, RunState] | None:
    """The run whose weights a run starts from, where `model.init` is its folder."""
    init = pathlib.Path(os.path.expanduser(settings.model.init))
    return load(init) if settings.model.init and init.is_dir() else None


def _state(folder: pathlib.Path, experiment: Experiment, which: str) -> RunState:
    """The state in a run's newest checkpoint, or in that of its best round."""
    if which not in WHICH:
        raise ValueError(f"which: got {which!r}, accepted: {' or '.join(WHICH)}")
    if not (folder / WHICH[which]).is_dir():
        kept = " of a best round, which keep_best keeps" if which == "best" else ""
        raise FileNotFoundError(f"workdir: got {folder}, which has no checkpoint{kept}, {ACCEPTED}")
    log = log_of(folder)
    lines = complete_lines(log.path)
    upto = read_row(lines[-1]).get(ROUND, 0) if lines and which == "best" else None
    with Checkpoints(folder, read_only=True, name=WHICH[which]) as checkpoints:
        found = checkpoints.restore(experiment.simulator.template(), upto)
    if found is None or upto not in (None, found[0]):
        of = f" of the best round, {upto}" if upto else " yet"
        raise FileNotFoundError(f"workdir: got {folder}, which has no checkpoint{of}, {ACCEPTED}")
    if len(lines) >= found[0]:  # else it is gone, and the checkpoint alone counts
        check_same_run(log, found[0], checkpoints.log)
    return found[1]


def run_folders(workdir: Path) -> list[pathlib.Path]:
    """The folders of the runs in a workdir: itself, or those below it; FileNotFoundError where there is none."""
    folder = pathlib.Path(workdir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"workdir: got {folder}, which is no folder, accepted: the folder of a run")
    if (folder / CONFIG).is_file():
        return [folder]
    below = (path.parent for path in folder.rglob(CONFIG))
    found = sorted(below, key=lambda path: (path.parent, len(path.name), path.name))  # seed 10 after seed 9
    if not found:
        raise FileNotFoundError(f"workdir: got {folder}, which has no {CONFIG}, accepted: the folder of a run")
    return found


def settings_of(folder: pathlib.Path) -> Settings:
    """The settings in a run's folder; ValueError where they are damaged, or name what is not registered here."""
    path = folder / CONFIG
    tree = read_json(path)
    for group, known in (("method", methods.METHODS), ("model", models.MODELS)):
        name = tree[group].get("name") if isinstance(tree.get(group), dict) else None
        if isinstance(name, str) and name not in known:
            in_python = f"in Python fedjax_ssl.register_{group}({name!r}, ...)"
            how = f"{_config_word(folder)}, the config file that registers it; {in_python}"
            raise ValueError(f"{group}.name: got {name}, which {path} names and nobody has registered, accepted: {how}")
    try:
        return Settings.from_dict(tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _config_word(folder: pathlib.Path) -> str:
    """The `--config=FILE` of a command that made a run, without its argument; of a run in Python, with any file."""
    with contextlib.suppress(ValueError, OSError):
        words = [word for word in read_json(folder / RUN).get("command", ()) if word.startswith("--config=")]
        return words[0].partition(":")[0] if words else "--config=FILE"
    return "--config=FILE"


def _unreadable(settings: Settings) -> str:
    """Why uneven clients' files, which rounds alone need, cannot be read; empty: they can."""
    try:
        profiles_of(settings)
    except ValueError as error:
        return str(error)
    return ""
