"""The sections of a report, from groups of runs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_ssl.experiment.report import cells, extras, figures, results, statistics
from fedjax_ssl.experiment.report.figures import Curve, Picture
from fedjax_ssl.experiment.report.groups import Group, Grouped
from fedjax_ssl.experiment.report.page import Code, Item, Section, Words
from fedjax_ssl.experiment.report.results import ACCURACY, Evaluations
from fedjax_ssl.experiment.report.splits import split_pictures

PANEL = {
    ACCURACY: ("Test accuracy, %", 100), "diagnostics/pseudo_label_accuracy": ("Pseudo-label accuracy, %", 100),
    "diagnostics/label_ratio": ("Label ratio, %", 100), "diagnostics/correct_ratio": ("Correct ratio, %", 100),
    "diagnostics/wrong_ratio": ("Wrong ratio, %", 100), "diagnostics/correct_wrong_ratio": ("Correct / wrong", 1),
}  # fmt: skip
"""(FL)^2's Figure 3: metric -> heading and factor."""
OTHERS = {
    "eval/accuracy_online": ("Test accuracy of the online network", "test accuracy, %", 100),
    "eval/loss": ("Test loss", "loss", 1),
    "client/loss": ("Loss at the clients", "loss", 1),
    "client/mask_rate": ("Accepted pseudo-labels at the clients", "accepted, %", 100),
    "client/threshold": ("Mean threshold of the clients", "threshold", 1),
    "client/upload_fraction": ("Uploaded share", "uploaded, %", 100),
    "client/instance_weight_mean": ("Mean weight of unlabeled examples", "weight", 1),
    "client/reward": ("Mean reward of the clients", "reward", 1),
    "server/loss": ("Loss at the server", "loss", 1),
}
"""Further curves: metric -> heading, label of the axis, and factor."""
TRACES = {
    "client/threshold": "threshold tau", "client/class_thresholds": "class thresholds", "client/weight": "aggregation weight",
    "client/mask_rate": "mask rate", "diagnostics/label_ratio": "label ratio",
    "diagnostics/pseudo_label_accuracy": "pseudo-label accuracy", "client/loss": "loss",
    "client/update_norm": "norm of the update", "client/cosine": "cosine to the aggregate",
}  # fmt: skip
"""What is shown of clients' records: metric -> its name in words."""
SHOWN = 6
"""Of figures that a group has of its own, such as confusion matrices, the page has those of the first groups."""


class Source(NamedTuple):
    """What a report is made from: groups, their evaluations, and the reader's choices."""

    grouped: Grouped
    evaluations: Evaluations
    sweeps: list[cells.Sweep]
    unreadable: tuple[str, ...]
    problems: tuple[str, ...]
    x: str
    target: float


def source(grouped: Grouped, unreadable: Sequence[str], x: str, target: float | None) -> Source:
    """Reads the evaluations and the sweeps' cells, and chooses the target where none is given."""
    evaluations: Evaluations = {}
    sweeps, problems = cells.find([run for group in grouped.groups for run in group.runs])
    for group in grouped.groups:
        evaluations[group.label] = []
        for run in group.runs:
            found, said = extras.evaluation(run)
            ended = statistics.instability(run.columns) if run.is_finished else run.state
            own = (*run.problems, *said, f"diverged: {run.reason}" if run.reason else ended)
            problems += [f"{run.name}: {line}" for line in own if line]
            if found is not None and run in group.used:
                evaluations[group.label].append(found)
    reached = results.default_target(grouped.groups) if target is None else target
    return Source(grouped, evaluations, sweeps, tuple(unreadable), tuple(problems), x, reached)


def curve(group: Group, style: int, key: str, kind: str, factor: float = 1.0) -> Curve | None:
    """A group's curve of a metric; None where its runs have no round with it in common."""
    having = [run.columns for run in group.used if key in run.columns]
    if not having or len(having) < len(group.used):
        return None
    xs, ys = [statistics.axis(one, kind) for one in having], [factor * one[key] for one in having]
    x, y = statistics.common(xs, ys, [one["round"] for one in having])
    return Curve(group.label, x, *statistics.mean_sd(y), style) if len(x) else None


def lines(groups: Sequence[Group], key: str, kind: str, factor: float = 1.0) -> list[Curve]:
    """The curves of all groups that have a metric; a group has the same style in every figure."""
    found = [curve(group, index, key, kind, factor) for index, group in enumerate(groups)]
    return [one for one in found if one is not None]


def build(made_from: Source, commands: Sequence[Code]) -> list[Section]:
    """All sections that the runs have content for."""
    found = [
        Section("Results", tuple(_results(made_from))),
        Section("Notes on the runs", (Words(made_from.problems + made_from.unreadable + made_from.grouped.notes),)),
        Section("Curves", tuple(_curves(made_from))),
        Section("Pseudo-labels", tuple(_pseudo_labels(made_from))),
        Section("Training", tuple(_training(made_from))),
        Section("Classes", tuple(_classes(made_from))),
        Section("Clients", tuple(_clients(made_from))),
        Section("Splits", tuple(split_pictures(made_from.grouped))),
        Section("Runs", tuple(_runs(made_from))),
        Section("Commands", tuple(commands)),
    ]
    return [one for one in found if one.items and one.items != (Words(()),)]


def _results(made_from: Source) -> list[Item]:
    names = [one.name for one in made_from.sweeps]  # of two folders' sweeps of one name, the second gets a number
    unique = [name if names.index(name) == i else f"{name}_{i + 1}" for i, name in enumerate(names)]
    tables = [cells.table(name, one.title, one.results) for name, one in zip(unique, made_from.sweeps, strict=True)]
    return [results.results(made_from.grouped, made_from.target), *tables, results.costs(made_from.grouped)]


def _curves(made_from: Source) -> list[Item]:
    """Accuracy against the chosen axis, against bytes, and against simulated seconds where runs have them."""
    level = None if np.isnan(made_from.target) else (f"target {100 * made_from.target:.1f} %", 100 * made_from.target)
    pictures: list[Item] = []
    for kind in dict.fromkeys((made_from.x, "bytes", "simulated")):
        if drawn := lines(made_from.grouped.groups, ACCURACY, kind, 100):
            labels = (statistics.AXES[kind], "test accuracy, %")
            pictures.append(figures.curves(f"accuracy_{kind}", f"Test accuracy against {kind}", drawn, labels, level))
    if not pictures:
        return []
    words = (
        "Lines are means over runs, bands one sample standard deviation to either side, in the rounds in which all of a "
        "group's runs have a value."
    )
    if made_from.x != "rounds":
        words += " A point is one round: its place on the axis is the mean of the runs."
    return [Words((words,)), *pictures]


def _pseudo_labels(made_from: Source) -> list[Item]:
    """The panel of (FL)^2's Figure 3, and its parts."""
    label, parts = statistics.AXES[made_from.x], []
    for key, (heading, factor) in PANEL.items():
        if drawn := lines(made_from.grouped.groups, key, made_from.x, factor):
            parts.append((key, heading, drawn))
    if not any(key != ACCURACY for key, _, _ in parts):
        return []
    words = Words((
        "Ratios are shares of the unlabeled examples whose labels are made: accepted ones, and of these the right and the "
        "wrong ones. Correct / wrong has no value in a round in which none is wrong.",
    ))  # fmt: skip
    alone: list[Item] = [
        figures.curves(f"panel_{key.rpartition('/')[2]}", heading, drawn, (label, heading[0].lower() + heading[1:]))
        for key, heading, drawn in parts
        if key != ACCURACY
    ]
    return [words, *alone]


def paper_panel(made_from: Source) -> Picture | None:
    """The six parts of (FL)^2's Figure 3 as one figure, for a paper; None where runs have no pseudo-labels."""
    parts = [(heading, lines(made_from.grouped.groups, key, made_from.x, factor)) for key, (heading, factor) in PANEL.items()]
    having = [(heading, drawn) for heading, drawn in parts if drawn]
    return figures.panel("panel", "Pseudo-labels", having, statistics.AXES[made_from.x]) if len(having) > 1 else None


def _training(made_from: Source) -> list[Item]:
    label = statistics.AXES[made_from.x]
    items: list[Item] = []
    for key, (title, vertical, factor) in OTHERS.items():
        if drawn := lines(made_from.grouped.groups, key, made_from.x, factor):
            items.append(figures.curves(key.replace("/", "_"), title, drawn, (label, vertical)))
    return items


def _classes(made_from: Source) -> list[Item]:
    """Accuracies of classes and confusion matrices."""
    items: list[Item] = []
    if table := results.per_class(made_from.grouped.groups, made_from.evaluations):
        items.append(table)
    for group in made_from.grouped.groups:
        having = [one.confusion for one in made_from.evaluations[group.label] if len(one.confusion)]
        having = [one for one in having if one.shape == having[0].shape]
        if not having or len(items) > SHOWN:
            continue
        total = np.sum(having, axis=0)
        with np.errstate(invalid="ignore"):
            shares = 100 * total / total.sum(1, keepdims=True)
        few = len(total) <= 12
        title, caption = (
            f"Confusion matrix: {group.label}",
            f"% of a true class, over {len(having)} run{'s' * (len(having) > 1)}",
        )
        labels = ("true class", "predicted class", "%")
        items.append(figures.heat(f"confusion_{group.slug}", title, shares, labels, numbers=few, caption=caption))
    return items


def _clients(made_from: Source) -> list[Item]:
    """Accuracies over clients, and what clients recorded."""
    items: list[Item] = []
    groups = made_from.grouped.groups
    if table := results.worst_clients(made_from.grouped, made_from.evaluations):
        items.append(table)
        known = [
            (group.label, [one.per_client[np.isfinite(one.per_client)] for one in made_from.evaluations[group.label]])
            for group in groups
        ]
        samples = [(label, 100 * np.concatenate(parts)) for label, parts in known if sum(map(len, parts))]
        labels = ("test accuracy of a client, %", "clients, of all runs")
        items.append(figures.histogram("clients_histogram", "Clients by their accuracy", samples, labels))
    shown = 0
    for group in groups:
        for run in group.used:
            records, problems = extras.records(run)
            items += [Words((f"{run.name}: {line}",)) for line in problems]
            if records is not None and shown < SHOWN:
                shown += 1
                items.append(Words((f"Clients' records of {run.name}:",)))
                items += _record_pictures(group, records)
                break
    return items


def _record_pictures(group: Group, records: extras.Records) -> list[Picture]:
    """A figure for each number that clients recorded, and a heat map for each that they have one of per class."""
    pictures = []
    for key, label in TRACES.items():
        if key not in records.values:
            continue
        values = records.values[key]
        name, title = f"trace_{key.rpartition('/')[2]}_{group.slug}", f"{label[0].upper()}{label[1:]}: {group.label}"
        if not np.isfinite(values).any():
            continue
        if values.ndim == 1:
            pictures.append(figures.traces(name, title, records.round, records.id, values, label))
            continue
        times = np.unique(records.round)
        rows = [[figures.median(column) for column in values[records.round == time].T] for time in times]
        labels, caption = ("class", "round", label), "Median over the clients of a round"
        pictures.append(figures.heat(name, title, np.array(rows).T, labels, caption=caption, columns=times))
    return pictures


def _runs(made_from: Source) -> list[Item]:
    items: list[Item] = [results.of_runs(made_from.grouped, made_from.unreadable)]
    if table := results.differences(made_from.grouped):
        items.append(table)
    return items
