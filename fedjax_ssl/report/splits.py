"""The split of each dataset in a report, drawn anew from the configs, without training and without a download."""

from typing import Any

import numpy as np

from fedjax_ssl.data import preview, split
from fedjax_ssl.experiment.plan import load_dataset
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.options import plural
from fedjax_ssl.report import figures
from fedjax_ssl.report.figures import Picture
from fedjax_ssl.report.groups import SEED, Grouped
from fedjax_ssl.report.page import Item, Words
from fedjax_ssl.runs.reading import Run

SHOWN = 4


def split_pictures(grouped: Grouped) -> list[Item]:
    """Heat maps of clients x classes for each kind of split, of its first run; a line where data are not at hand."""
    kinds: dict[str, tuple[Run, list[str]]] = {}
    for group in grouped.groups:
        for run in group.runs:
            own = sorted((key, value) for key, value in run.config.items() if key.startswith("data."))
            kinds.setdefault(repr(own), (run, []))[1].append(group.label)
    datasets: dict[str, Any] = {}
    items: list[Item] = []
    for number, (run, labels) in enumerate(list(kinds.values())[:SHOWN], start=1):
        whose = ", ".join(dict.fromkeys(labels))
        try:
            seen = _draw(run, datasets)
        except Exception as error:  # whatever the data are: the report has its other parts
            items.append(Words((f"No split of {whose}: {' '.join(str(error).split())}",)))
            continue
        items.append(Words((f"Split of {whose}, seed {run.config[SEED]}:",)))
        items += _pictures(seen, f"split_{number}", whose)
    if len(kinds) > SHOWN:
        items.append(Words((f"Without {plural(len(kinds) - SHOWN, 'further split')}; `launch.preview` draws any.",)))
    return items


def _draw(run: Run, datasets: dict[str, Any]) -> preview.Preview:
    """The run's split; datasets that were read stay in `datasets`."""
    data = dict(run.tree["data"])
    data["download"] = False
    # The method is left at its default: the split does not depend on it, and the run's may be registered elsewhere.
    settings = Settings.from_dict({"data": data, "seed": run.config[SEED], "cohort_size": 1})
    of = settings.data
    drawn = (of.resplit or of.name == "synthetic") and settings.seed
    key = repr([of.name, of.data_dir, of.path, of.renumber_labels, of.resplit, of.validation == "own", drawn])
    if key not in datasets:
        datasets[key] = load_dataset(settings)
    dataset = datasets[key]
    assignment = split.draw(dataset, settings.data, settings.seed)
    return preview.preview(assignment, dataset.train_labels, dataset.num_classes)


def _pictures(seen: preview.Preview, name: str, whose: str) -> list[Picture]:
    from matplotlib import rc_context

    num_clients, num_classes = seen.unlabeled.shape
    height = float(np.clip(0.1 * num_clients + 1.8, 3.0, 9.0))
    pictures = []
    for what, draw, counts in (
        ("labeled", preview.draw_labeled, seen.labeled if seen.labeled.any() else seen.server[None]),
        ("unlabeled", preview.draw_unlabeled, seen.unlabeled),
    ):
        with rc_context({**figures.STYLE, "axes.grid": False}):
            figure = figures.blank(figures.WIDTH, height)
            draw(figure.subplots(), seen)
        alt = (
            f"{whose}: {what} examples of {plural(num_clients, 'client')} and {num_classes} classes: {counts.sum():,} in all, "
        )
        alt += f"{counts.min():,} to {counts.max():,} in a cell."
        title = f"{what.capitalize()} examples"
        pictures.append(figures.picture(figure, f"{name}_{what}", title, alt))
    return pictures
