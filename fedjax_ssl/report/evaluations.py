"""Evaluations of runs, as `launch.evaluate` prints them: the numbers of each run, means over seeds, and tables."""

import math
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_ssl import csv_files
from fedjax_ssl.data.sources import examples
from fedjax_ssl.data.sources.examples import Examples
from fedjax_ssl.experiment import evaluation
from fedjax_ssl.experiment.expansion import flattened, identity
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.experiment.personalization import of_states, personalized
from fedjax_ssl.files import replacing
from fedjax_ssl.options import plural
from fedjax_ssl.report import tables
from fedjax_ssl.report.tables import Spread, Table
from fedjax_ssl.runs.provenance import dataset_digest
from fedjax_ssl.simulation.round import RunState

LARGEST = 20  # classes of a confusion matrix that is printed
NUMBERS = {"accuracy": "accuracy", **{score.key: score.name for score in evaluation.SCORES.values()}}
"""The numbers of a run's report, and their names."""
SUMMARIZED = (*NUMBERS, "class_accuracy", "clients", "mean", "worst", "personalized")
"""What has a mean and a standard deviation over runs."""
Report = dict[str, Any]


def examples_of(experiment: Experiment, where: str = "") -> Examples:
    """The examples of a file or folder for a run's model, by default its own test set."""
    if where:
        classes = examples.Classes(experiment.classes, experiment.problem.spec.num_classes)
        return examples.read(where, classes, experiment.stored_shape[-1])
    test, origins = experiment.problem.test, experiment.dataset.origins
    own = Examples(np.asarray(test.images), np.asarray(test.labels))
    return own if origins is None else own._replace(origins=origins.test.tolist(), kind=origins.kind)


def evaluated(
    experiment: Experiment,
    state: RunState,
    given: Examples,
    *,
    clients: bool = False,
    personalize: int = 0,
    out: pathlib.Path | None = None,
) -> Report:
    """The report of one run on the given examples, and on its clients' own; its predictions are written to `out`.

    With `personalize` > 0 it also has the accuracies after each client has trained the global model for so many epochs.
    """
    logits = experiment.predict(state, given.images)
    report: Report = {"round": int(state.round), "examples": len(logits)}
    report |= {"classes": list(experiment.classes)} if experiment.classes else {}
    if given.labels is not None:
        known = given.labels >= 0
        report |= evaluation.report(logits[known], given.labels[known])
    if clients or personalize:
        data = experiment.problem.data
        train, table = data.train, data.client_test or data.client_data
        labels = np.asarray(train.labels)
        right = evaluation.predictions(experiment.predict(state, np.asarray(train.images))).label == labels
        rows = [index[:count] for index, count in zip(table.index, table.count, strict=True)]
        report["clients"] = evaluation.of_clients(np.where(labels >= 0, right, np.nan), rows)._asdict()
        report["clients"]["of"] = "training" if data.client_test is None else "test"
    if clients or personalize:
        report["clients"]["states"] = {name: _of_each(own) for name, own in of_states(experiment, state).items()}
    if personalize:
        after = personalized(experiment, state, personalize).after
        report["clients"]["personalized"] = {"epochs": personalize, **_of_each(after)}
    if out:
        _write(out, evaluation.predictions(logits), given, experiment.classes)
    return report


def _of_each(accuracy: np.ndarray) -> Report:
    """Clients' accuracies, and what is shown of them."""
    mean, worst, histogram = evaluation.summaries(accuracy)
    return {"accuracy": accuracy, "mean": mean, "worst": worst, "histogram": histogram}


def _write(out: pathlib.Path, predicted: evaluation.Predictions, given: Examples, classes: Sequence[str]) -> None:
    """Writes predictions, the whole file or none; an unknown label is -1."""
    number = len(predicted.label)
    labels = np.full(number, -1) if given.labels is None else given.labels
    columns: dict[str, Any] = {
        "id": np.arange(number),
        "prediction": predicted.label,
        "confidence": predicted.confidence,
        "label": labels,
    }
    columns |= {"predicted_class": np.array(classes)[predicted.label]} if classes else {}
    columns |= {given.kind: np.array(given.origins)} if given.origins else {}
    with replacing(out) as file:
        if out.suffix == ".npz":
            np.savez(file, **columns)
            return
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        file.write(csv_files.written([list(columns), *rows]).encode(errors="surrogateescape"))  # a file's name may be no text


def beside(reports: Mapping[str, Report], kinds: Mapping[str, tuple[str, str]]) -> dict[str, list[Report]]:
    """Groups of two or more reports whose runs lie in one folder and are of one `kind`.

    A group's name is that folder, or, if the folder holds several kinds, its runs' folders.
    """
    together: dict[tuple[str, str], list[str]] = {}
    for folder, kind in kinds.items():
        together.setdefault(kind, []).append(folder)
    parents = Counter(parent for parent, _ in together)
    names = {kind: kind[0] if parents[kind[0]] == 1 else ", ".join(own) for kind, own in together.items()}
    return {names[kind]: [reports[folder] for folder in own] for kind, own in together.items() if len(own) > 1}


def kind(experiment: Experiment, files: Mapping[str, str]) -> str:
    """What identifies a run apart from its seed: its settings, and digests of its dataset and `files`, wherever these are."""
    config = identity(flattened(experiment.settings.model_copy(update={"seed": 0}).to_dict()))
    return repr((config, dataset_digest(experiment.dataset, experiment.stored_shape), sorted(files.items())))


def over(values: Sequence[Any]) -> Any:
    """Mean and standard deviation of numbers, None: unknown, or of those at each place of lists and dicts."""
    if isinstance(values[0], dict):
        return {key: over([one[key] for one in values]) for key in SUMMARIZED if key in values[0]}
    if isinstance(values[0], list):
        return [over(one) for one in zip(*values, strict=True)]
    return {"mean": (found := _spread(values)).mean, "sd": found.sd}


def _spread(values: Sequence[float | None]) -> Spread:
    return tables.spread([math.nan if value is None else value for value in values], 4)


def as_tables(reports: Mapping[str, Report], beside: Mapping[str, list[Report]]) -> Iterator[Table]:
    """The reports as tables: of all runs, and of each run's classes and clients."""

    def row(name: str, own: Sequence[Report]) -> tuple[Any, ...]:
        of_clients = [one.get("clients", {}) for one in own]
        scores = [[one.get(key) for one in own] for key in NUMBERS]
        scores += [[one.get(key) for one in of_clients] for key in ("mean", "worst")]
        scores += [[one.get("personalized", {}).get(key) for one in of_clients] for key in ("mean", "worst")]
        sizes = [", ".join(sorted({str(one[key]) for one in own})) for key in ("round", "examples")]
        return (name, *sizes, *map(_spread, scores))

    rows = [row(folder, [report]) for folder, report in reports.items()]
    rows += [row(f"{folder}: mean ± sd", own) for folder, own in beside.items()]
    means = ("clients' mean", "clients' worst tenth", "personalized mean", "personalized worst tenth")
    header = ("run", "round", "examples", *NUMBERS.values(), *means)
    yield Table("runs", "Accuracy, other scores, and accuracy over clients", header, tuple(rows)).without_empty()
    for folder, report in reports.items():
        if confusion := report.get("confusion"):
            each = list(zip(report["class_accuracy"], confusion, strict=True))
            is_shown = len(confusion) <= LARGEST
            matrix = "and how many of its examples are taken for which (the confusion matrix)" if is_shown else "more in --json"
            header = ("class", "accuracy", *(map(str, range(len(confusion))) if is_shown else ()))
            names = tables.of_classes(len(confusion), report.get("classes", ()))
            rows = [(names[c], _spread([one]), *(counts if is_shown else ())) for c, (one, counts) in enumerate(each)]
            yield Table("classes", f"{folder}, each class: its accuracy, {matrix}", header, tuple(rows))
        if clients := report.get("clients"):
            title, own = f"{folder}, accuracies on clients' own {clients['of']} examples", clients.get("personalized")
            yield _bars(title, clients["histogram"])
            for name, of_state in clients.get("states", {}).items():
                mean = _spread([of_state["mean"]])
                yield _bars(f"{title}, of the clients' own models {name!r}: mean {mean}", of_state["histogram"])
            if own:
                yield _bars(f"{title}, after {plural(own['epochs'], 'epoch')} of their own", own["histogram"])


def _bars(title: str, histogram: Sequence[int]) -> Table:
    """A histogram over clients as a table with bars."""
    most = max(1, *histogram)
    bars = [(f"{i / 10:.1f} to {(i + 1) / 10:.1f}", n, "#" * round(40 * n / most)) for i, n in enumerate(histogram)]
    return Table("clients", title, ("accuracy", "clients", ""), tuple(bars))
