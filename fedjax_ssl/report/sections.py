"""The sections of a report, from groups of runs."""

import pprint
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_ssl.experiment import evaluation
from fedjax_ssl.options import plural
from fedjax_ssl.report import cells, extras, figures, results, statistics, tables
from fedjax_ssl.report.figures import Curve, Picture
from fedjax_ssl.report.groups import METHOD, NAMES, Group, Grouped, identity, slug
from fedjax_ssl.report.page import Code, Item, Section, Words
from fedjax_ssl.report.results import ACCURACY, Evaluations
from fedjax_ssl.report.splits import split_pictures
from fedjax_ssl.runs.sweep import on_axis

Metrics = Mapping[str, tuple[str, float]]
"""A metric's key -> its name in words, and the factor that its values are shown with."""
TEST = {ACCURACY: ("Test accuracy, %", 100)}
SCORE_CURVES = {f"eval/{one.key}": (f"{one.name[0].upper()}{one.name[1:]}, %", 100.0) for one in evaluation.SCORES.values()}
PSEUDO_LABELS = {
    "diagnostics/pseudo_label_accuracy": ("Pseudo-label accuracy, %", 100),
    "diagnostics/label_ratio": ("Label ratio, %", 100), "diagnostics/correct_ratio": ("Correct ratio, %", 100),
    "diagnostics/wrong_ratio": ("Wrong ratio, %", 100), "diagnostics/correct_wrong_ratio": ("Correct / wrong", 1),
}  # fmt: skip
"""These metrics and the test accuracy are the panels of (FL)^2's Figure 3."""
TRAINING = {
    "eval/accuracy_online": ("Accuracy of the online network, %", 100), "eval/loss": ("Test loss", 1),
    "eval/val_accuracy": ("Validation accuracy, %", 100), "eval/val_loss": ("Validation loss", 1),
    "client/loss": ("Loss at the clients", 1), "client/mask_rate": ("Accepted pseudo-labels, %", 100),
    "client/threshold": ("Mean threshold of the clients", 1), "client/upload_fraction": ("Uploaded share, %", 100),
    "client/instance_weight_mean": ("Weight of unlabeled examples", 1), "client/reward": ("Mean reward of the clients", 1),
    "server/loss": ("Loss at the server", 1), "eval/client_accuracy": ("Clients' own test accuracy, %", 100),
    "eval/client_accuracy_worst": ("Own test accuracy of the worst tenth, %", 100),
}  # fmt: skip
TRACES = {
    "client/threshold": "threshold tau", "client/class_thresholds": "class thresholds", "client/weight": "aggregation weight",
    "client/mask_rate": "mask rate", "diagnostics/label_ratio": "label ratio",
    "diagnostics/pseudo_label_accuracy": "pseudo-label accuracy", "client/loss": "loss",
    "client/update_norm": "norm of the update", "client/cosine": "cosine to the aggregate",
}  # fmt: skip
"""What is shown of clients' records: metric -> its name in words."""
NOT_COMPARED = (
    "No two groups are compared run by run: none have two runs each with the same seeds, the same split of the same data and "
    "as many rounds. Splits differ, for example, where some groups have their labels at the server and others at the clients."
)
SHOWN = 6
"""Of figures that a group has of its own, such as confusion matrices, the page has those of the first groups."""


class Choices(NamedTuple):
    """What a reader chooses of a report's form."""

    interval: bool = False  # whether means have confidence intervals in place of standard deviations
    title: str = ""  # of the page; empty: it says what is compared
    width: float = 0  # of figures of curves, in inches; 0: the usual one


class Source(NamedTuple):
    """What a report is made from: groups, their evaluations, and the reader's choices."""

    grouped: Grouped
    evaluations: Evaluations
    sweeps: list[cells.Sweep]
    unreadable: tuple[str, ...]
    problems: tuple[str, ...]
    x: str
    target: float
    is_drawn: bool  # whether figures have a line at the target
    choices: Choices


def source(
    grouped: Grouped,
    sweeps: list[cells.Sweep],
    unreadable: Sequence[str],
    problems: list[str],
    x: str,
    target: float | None,
    choices: Choices = Choices(),
) -> Source:
    """Reads the evaluations, adds to `problems`, and chooses the target where none is given."""
    evaluations: Evaluations = {}
    for group in grouped.groups:
        evaluations[group.label] = []
        for run in group.runs:
            found, said = extras.evaluation(run)
            ended = statistics.instability(run.columns) if run.is_finished else run.state
            own = (*run.problems, *said, f"diverged: {run.reason}" if run.reason else ended)
            problems += [f"{run.name}: {line}" for line in own if line]
            if found is not None and group.uses(run):
                evaluations[group.label].append(found)
    if x == "simulated" and not any("sim/seconds" in run.columns for group in grouped.groups for run in group.runs):
        problems.append("--x=simulated: no run has simulated seconds, which come with config.system.*")
    reached = results.default_target(grouped.groups) if target is None else target
    return Source(grouped, evaluations, sweeps, tuple(unreadable), tuple(problems), x, reached, target is not None, choices)


def curve(group: Group, style: int, key: str, kind: str, factor: float, *, interval: bool) -> Curve | None:
    """A group's curve of a metric; None where its runs have no round with it in common."""
    having = [run.columns for run in group.used if key in run.columns]
    if not having or len(having) < len(group.used):
        return None
    xs, ys = [statistics.axis(one, kind) for one in having], [factor * one[key] for one in having]
    x, y = statistics.common(xs, ys, [one["round"] for one in having])
    mean, sd = statistics.mean_sd(y)
    band = statistics.half_interval(sd, len(y)) if interval else sd
    return Curve(group.place.curve, x, mean, band, style) if len(x) else None


def drawn(made_from: Source, metrics: Metrics, kind: str) -> Iterator[tuple[str, dict[str, list[Curve]]]]:
    """The name of each figure, and the curves of the metrics that its groups have; a group has the same style in all."""
    together: dict[str, list[Group]] = {}
    for group in made_from.grouped.groups:
        together.setdefault(group.place.figure, []).append(group)
    for figure, groups in together.items():
        parts = {}
        for key, (_, factor) in metrics.items():
            own = [curve(one, n, key, kind, factor, interval=made_from.choices.interval) for n, one in enumerate(groups)]
            if lines := [one for one in own if one is not None]:
                parts[key] = lines
        yield figure, parts


def curves(made_from: Source, metrics: Metrics, kind: str, level: tuple[str, float] | None = None) -> list[Picture]:
    """A figure of each metric against an axis of `statistics.AXES`."""
    pictures = []
    for figure, parts in drawn(made_from, metrics, kind):
        for key, lines in parts.items():
            words = metrics[key][0]
            title = _title(_against(words.removesuffix(", %"), kind), figure)
            name = _name(f"{key}_{kind}", figure)
            width = made_from.choices.width
            pictures.append(figures.curves(name, title, {words: lines}, statistics.AXES[kind], level, width=width))
    return pictures


def panels(made_from: Source) -> list[Picture]:
    """The parts of (FL)^2's Figure 3 in one figure, for a paper; none where runs have no pseudo-labels."""
    metrics, pictures = TEST | PSEUDO_LABELS, []
    for figure, parts in drawn(made_from, metrics, made_from.x):
        if len(parts) > 1:
            named = {metrics[key][0]: lines for key, lines in parts.items()}
            title = _title(_against("Pseudo-labels", made_from.x), figure)
            name, width = _name("panel", figure), made_from.choices.width
            pictures.append(figures.curves(name, title, named, statistics.AXES[made_from.x], width=width))
    return pictures


def _against(words: str, kind: str) -> str:
    return f"{words} against {statistics.AXES[kind] if kind == 'simulated' else kind}"


def _title(words: str, figure: str) -> str:
    return ": ".join(filter(None, [words, figure]))


def _name(name: str, figure: str) -> str:
    return "_".join(filter(None, [name.replace("/", "_"), slug(figure)]))


def build(made_from: Source, commands: Sequence[Code]) -> list[Section]:
    """All sections that the runs have content for."""
    found = [
        Section("Results", tuple(_results(made_from))),
        Section("Notes on the runs", (Words(made_from.problems + made_from.unreadable + made_from.grouped.notes),)),
        Section("Curves", tuple(_accuracy(made_from))),
        Section("Pseudo-labels", tuple(_pseudo_labels(made_from))),
        Section("Training", tuple(curves(made_from, TRAINING, made_from.x))),
        Section("Classes", tuple(_classes(made_from))),
        Section("Clients", tuple(_clients(made_from))),
        Section("Splits", tuple(split_pictures(made_from.grouped))),
        Section("Runs", tuple(_runs(made_from))),
        Section("Commands", tuple(commands)),
    ]
    if made_from.choices.interval:
        found = [one._replace(items=tuple(map(_with_intervals, one.items))) for one in found]
    return [one for one in found if one.items and one.items != (Words(()),)]


def _with_intervals(item: Item) -> Item:
    return item.with_intervals() if isinstance(item, tables.Table) else item


def _results(made_from: Source) -> list[Item]:
    grouped, interval = made_from.grouped, made_from.choices.interval
    shown = [table for one in made_from.sweeps for table in _tables(one, interval)]
    figures = [one for sweep in made_from.sweeps for one in _along(sweep, made_from.choices)]
    accuracies = results.results(grouped, made_from.target)
    accuracies = (accuracies.with_intervals() if interval else accuracies).marked((1, 2))
    items: list[Item | None] = [accuracies, results.validated(grouped)]
    items.append(results.scores(grouped, made_from.evaluations))
    could_be_compared = sum(len(group.used) > 1 for group in grouped.groups) > 1
    items.append(results.comparisons(grouped) or (Words((NOT_COMPARED,)) if could_be_compared else None))
    return [one for one in (*items, *shown, results.costs(grouped), *figures) if one is not None]


def _tables(sweep: cells.Sweep, interval: bool) -> Iterator[tables.Table]:
    """A sweep's accuracies, rows by columns, where it has several columns; and all numbers of its cells."""
    title = sweep.about or f"Cells of {sweep.name}"
    if len({one["case"]["column"] for one in sweep.results}) > 1:
        name = f"sweep_{slug(sweep.name)}_accuracy"
        found = cells.grid(name, f"{title}: accuracy of the last round, %", cells.accuracies(sweep.results))
        yield (found.with_intervals() if interval else found).marked(range(1, len(found.header)))
    if (chosen := cells.chosen_by_validation(sweep.name, sweep.results)) is not None:
        yield chosen._replace(title=f"{title}: {chosen.title.lower()}")
    yield cells.table(sweep.name, title, sweep.results).without_empty()


def _along(sweep: cells.Sweep, choices: Choices) -> Iterator[Picture]:
    """Accuracy against the number that a sweep changes, and the bytes where they change with it; of cells without an error."""
    having = [one for one in sweep.results if sweep.x and not any("error" in run for run in one["runs"])]
    lines: dict[str, list[tuple[float, cells.Result]]] = {}
    for (line, x), one in zip(on_axis([one["case"] for one in having]), having, strict=False):
        lines.setdefault(line, []).append((x, one))
    parts = {}
    for key, label, factor in (("accuracy", "test accuracy, %", 100), ("bytes_up", "MB up", 1e-6)):
        own = []
        for style, (line, points) in enumerate(lines.items()):
            points.sort(key=lambda point: point[0])
            spreads = [tables.spread([factor * run[key] for run in one["runs"]]) for _, one in points]
            means = np.array([one.mean for one in spreads])
            bands = np.array([one._replace(is_interval=choices.interval).half for one in spreads])
            own.append(Curve(line or sweep.name, np.array([x for x, _ in points]), means, bands, style))
        if key == "accuracy" or any(np.ptp(one.mean) for one in own):
            parts[label] = own
    if ticks := sorted({x for points in lines.values() for x, _ in points}):
        title = sweep.about or f"Accuracy against {sweep.x}"
        yield figures.curves(f"sweep_{slug(sweep.name)}_along", title, parts, sweep.x, ticks=ticks, width=choices.width)


def _accuracy(made_from: Source) -> list[Item]:
    """Accuracy against the chosen axis, bytes, and simulated seconds where runs have them; other scores that logs have."""
    level = (f"target {100 * made_from.target:.1f} %", 100 * made_from.target) if made_from.is_drawn else None
    kinds = dict.fromkeys((made_from.x, "bytes", "simulated"))
    pictures = [one for kind in kinds for one in curves(made_from, TEST, kind, level)]
    pictures += curves(made_from, SCORE_CURVES, made_from.x)
    band = (
        "95 % confidence intervals of these by Student's t"
        if made_from.choices.interval
        else "one standard deviation to either side"
    )
    words = f"Lines are means over runs, bands {band}, in the rounds in which all of a group's runs have a value."
    if made_from.x != "rounds":
        words += " A point is one round: its place on the axis is the mean of the runs."
    return [Words((words,)), *pictures] if pictures else []


def _pseudo_labels(made_from: Source) -> list[Item]:
    words = (
        "Ratios are shares of the unlabeled examples whose labels are made: accepted ones, and of these the right and the "
        "wrong ones. Correct / wrong has no value in a round in which none is wrong."
    )
    pictures = curves(made_from, PSEUDO_LABELS, made_from.x)
    return [Words((words,)), *pictures] if pictures else []


def _classes(made_from: Source) -> list[Item]:
    """Accuracies of classes and confusion matrices."""
    table = results.per_class(made_from.grouped.groups, made_from.evaluations)
    items: list[Item] = [table] if table else []
    for group in made_from.grouped.groups:
        evaluations = [one for one in made_from.evaluations[group.label] if len(one.confusion)]
        having = [one.confusion for one in evaluations if one.confusion.shape == evaluations[0].confusion.shape]
        if not having or len(items) > SHOWN:
            continue
        total = np.sum(having, axis=0)
        with np.errstate(invalid="ignore"):
            shares = 100 * total / total.sum(1, keepdims=True)
        title, labels = f"Confusion matrix: {group.label}", ("true class", "predicted class", "%")
        caption = f"% of a true class, over {len(having)} run{'s' * (len(having) > 1)}"
        few = len(total) <= 12
        names = results.class_names(evaluations)
        heads = tables.of_classes(len(total), names) if few and names else ()
        items.append(figures.heat(f"confusion_{group.slug}", title, shares, labels, numbers=few, caption=caption, heads=heads))
    return items


def _clients(made_from: Source) -> list[Item]:
    """Accuracies over clients, and what clients recorded."""
    items: list[Item] = []
    groups = made_from.grouped.groups
    if table := results.worst_clients(made_from.grouped, made_from.evaluations):
        every = {group.label: made_from.evaluations[group.label] for group in groups}
        known = {label: [one.known for one in own] for label, own in every.items()}
        for label, own in every.items():
            if epochs := max((one.epochs for one in own), default=0):
                known[f"{label}, after {plural(epochs, 'epoch')} of a client's own"] = [one.personalized for one in own]
        samples = {label: 100 * np.concatenate(parts) for label, parts in known.items() if sum(map(len, parts))}
        labels = (f"accuracy on a client's own {results.of_clients(every)} examples, %", "clients, of all runs")
        items += [table, figures.histogram("clients_histogram", "Clients by their accuracy", samples, labels)]
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
        values = records.values.get(key, np.zeros(0))
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
    found = (results.differences(made_from.grouped), results.own_code(made_from.grouped))
    return [results.of_runs(made_from.grouped, made_from.unreadable), *(table for table in found if table)]


def commands(group: Group, folder: str, files: dict[str, bytes]) -> list[str]:
    """The words of the commands that made a group's runs, each once.

    `files` gets a config file in `folder` for each kind of run that was made in Python.
    """
    lines, names = [], dict[str, str]()
    for run in group.runs:
        words = run.command
        if not words:
            name = names.setdefault(identity(run), f"config_{group.slug}_{len(names) + 1}.py")
            config = pprint.pformat({**run.tree, "seed": 0}, width=120, sort_dicts=False)
            files[name] = f"CONFIG = {config}\n\n\ndef get_config(argument=None):\n    return CONFIG\n".encode()
            words = [f"--config={folder}/{name}", f"--config.seed={run.config['seed']}"]
        lines.append(shlex.join(words))
    return list(dict.fromkeys(lines))


def title(made_from: Source) -> str:
    """The title that was asked for; or what the report's only sweep is about, or the methods and datasets of its runs."""
    if made_from.choices.title:
        return made_from.choices.title
    if made_from.grouped.heading == "experiment" and len(made_from.sweeps) == 1 and (about := made_from.sweeps[0].about):
        return about
    names = []
    for key, many in ((METHOD, "methods"), ("data.name", "datasets")):
        values = list(dict.fromkeys(run.config[key] for group in made_from.grouped.groups for run in group.runs))
        values = [NAMES.get(value, value) for value in values] if key == METHOD else values
        names.append(f"{len(values)} {many}" if len(values) > 4 else ", ".join(values))
    return " on ".join(names)


def lead(made_from: Source) -> str:
    """How many runs there are, and in which state."""
    grouped = made_from.grouped
    states = [run.state.partition(":")[0].partition(" in ")[0] for group in grouped.groups for run in group.runs]
    states += ["unreadable"] * len(made_from.unreadable)
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    return f"{plural(len(states), 'run')} in {plural(len(grouped.groups), 'group')} by {grouped.heading}: {counted}."
