"""An experiment and the folder that it runs in, which every process of a job opens together."""

import os
import pathlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from fedjax_ssl.experiment import build, estimate
from fedjax_ssl.experiment.expansion import PLACES, flattened, identity, runs_of
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.files import plain
from fedjax_ssl.options import plural
from fedjax_ssl.runs import changes, folder, hosts, loading, lock, overwrite, provenance, run, trackers
from fedjax_ssl.simulation.distributed import exchanged, is_first


def opened(
    tree: Mapping[str, Any], name: str, until_the_end: ExitStack, *, workdir: str | None, overwrites: bool, dry_run: bool
) -> tuple[Experiment, pathlib.Path]:
    """The experiment that a config makes and its workdir, whose folders process 0 owns until the end.

    Without a `workdir` it is `runs/<name of the config>`, and there the seed of a single run. `dry_run` reads no data and
    makes no folder. ValueError or OSError for wrong input.
    """

    def began() -> tuple[Settings, pathlib.Path, tuple[Layout | None, dict[str, int]]]:
        settings = Settings.from_dict(tree)
        trackers.names(settings.log_to)
        default = pathlib.Path("runs", name, *([] if settings.is_several else [str(settings.seed)]))
        place, names = pathlib.Path(os.path.expanduser(workdir or default)), [one.name for one in runs_of(settings)]
        if is_first():
            folder.check_place(place, is_several=settings.is_several)
        if is_first() and not dry_run:  # before anything there is read
            until_the_end.enter_context(lock.owned([place / one for one in names]))
        is_new = overwrites or not is_first()
        return settings, place, (None, {}) if is_new else run.noted(place, names, settings.rounds)

    settings, place, noted = hosts.together(began)
    layout, widths = exchanged(noted)[0]
    begun, reads = layout and Layout(*layout), not dry_run

    def built() -> Experiment:
        start = loading.start_of(settings)
        return build.build(settings, layout=begun, widths=widths, reads=reads, start=start)

    experiment = hosts.together(built)

    def alike() -> dict[str, Any]:
        files = {f"the file of {group}.name": digest for group, digest in changes.digests(settings).items()}
        return plain(identity(flattened(settings.to_dict()), PLACES)) | files | {"data": provenance.data_digests(experiment)}

    hosts.check_alike(alike)

    folders = folder.folders(experiment, place)

    def make() -> None:
        if overwrites:
            overwrite.remove_all(folders, folder.OURS)
        for own, path in zip(experiment.runs, folders, strict=True):
            folder.open_workdir(path, own.settings.to_dict(), experiment)

    hosts.together(make if is_first() and not dry_run else lambda: None)
    return experiment, place


def expectation(experiment: Experiment, workdir: pathlib.Path, stop_after: int | None, smaller: str = "") -> str:
    """How long the rounds that are left will take, in words; empty where that is not long.

    Where it is more than an hour, it names the `smaller` config, if there is one.
    """
    rounds = experiment.settings.rounds
    begun = [folder.newest(one) for one in folder.folders(experiment, workdir) if not folder.is_finished(one, rounds)]
    left = (stop_after or rounds) - min(begun, default=rounds)
    if left <= 0 or not estimate.may_be_long(experiment):
        return ""
    seconds = estimate.estimate(experiment).seconds * left / rounds
    these = f"{plural(left, 'round')} take{'s' * (left == 1)}"
    instead = f"; --config={smaller} is the same in minutes, at a small size" if smaller and seconds > 3600 else ""
    return f"{these} about {estimate.duration(seconds)} here, by a rough estimate{instead}"
