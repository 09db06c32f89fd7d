"""Evaluates finished or stopped runs: accuracy, per class, confusion matrix, calibration, per client; predictions to a file.

    python -m launch.evaluate DIR... [--data FILE_OR_FOLDER] [--clients] [--save] [--out predictions.csv] [--json]

DIR is a run's folder, or one that holds several, such as a sweep: those that differ in their seeds alone also have a mean
and a standard deviation. By default the model is evaluated on the run's own test set. `--data` is an .npz file (x_test,
y_test; test_images, test_labels; or images and, if known, labels), or a folder: of classes, with train/ and test/, or of images
without labels. The runs are only read, but for `--save`: each gets what was found as `evaluation.json`, for `launch.report`.

Exit status: 0 done; 2 wrong arguments, runs or data.
"""

import argparse
import json
import logging
import math
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_ssl import csv_files
from fedjax_ssl.experiment import evaluation
from fedjax_ssl.experiment.expansion import flattened, identity
from fedjax_ssl.experiment.experiment import Experiment
from fedjax_ssl.files import plain, replacing, write_json
from fedjax_ssl.report import tables
from fedjax_ssl.report.tables import Spread, Table
from fedjax_ssl.runs.folder import EVALUATION
from fedjax_ssl.runs.loading import load, run_folders
from fedjax_ssl.runs.provenance import dataset_digest
from fedjax_ssl.runs.run import diverged
from fedjax_ssl.simulation.round import RunState

from . import arguments, command
from .examples import Examples, read

SAID = ("fedjax_ssl.data.split", "fedjax_ssl.experiment.warnings")
"""Loggers of what a run has said, which is not said again."""
LARGEST = 20  # classes of a confusion matrix that is printed
SUMMARIZED = ("accuracy", "ece", "class_accuracy", "clients", "mean", "worst")
"""What has a mean and a standard deviation over runs."""
Report = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    waiting, log = command.logging_that_waits(), logging.getLogger("fedjax_ssl")
    waiting.setLevel(logging.WARNING)
    texts = set[str]()
    waiting.addFilter(lambda record: record.name not in SAID and _is_new(texts, getattr(record, "once", "")))
    try:
        options = _parser().parse_args(argv[1:])
        out = arguments.output("--out", options.out, ".csv", ".npz") if options.out else None
        if options.config:  # it may register methods and networks
            command.read(options.config)
        command.keep_programs()
        command.find_devices()
        paths = [path for one in options.workdir for path in run_folders(one)]
        if options.save and options.data:
            raise ValueError(f"--save: got it with --data={options.data}, accepted: for the runs' own test sets")
        if out and len(paths) > 1:
            raise ValueError(f"--out: got {options.out} for {len(paths)} runs, accepted: with the folder of one run")
        reports: dict[str, Report] = {}
        kinds = {}
        for folder in paths:
            try:
                experiment, state = load(folder, data_dir=options.data_dir, path=options.path)
            except command.WRONG_INPUT as error:  # such as a run without a checkpoint: the others have their place
                if folder == paths[-1] and not reports:
                    raise
                log.warning("left out: %s", error)
                continue
            if diverged(folder):
                log.warning("%s has diverged: this is its checkpoint of round %d, which no mean has", folder, int(state.round))
            else:
                kinds[str(folder)] = os.path.dirname(folder), _kind(experiment)
            reports[str(folder)] = report = plain(_evaluated(experiment, state, out, options))
            if options.save:
                write_json(folder / EVALUATION, report)
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    waiting.setTarget(logging.StreamHandler())
    waiting.flush()
    beside = _beside(reports, kinds)
    found = {"runs": reports, "all": {name: _over(own) for name, own in beside.items()}}
    print(json.dumps(plain(found), indent=2) if options.json else "\n".join(map(tables.text, _tables(reports, beside))))
    return 0


def _is_new(texts: set[str], text: str) -> bool:
    """Whether a text, which is added, is not among the texts; what is empty always is new."""
    is_new = text not in texts
    texts.update(filter(None, [text]))
    return is_new


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser("evaluate", __doc__)
    parser.add_argument("workdir", metavar="DIR", nargs="+", help="a run's folder, or a folder of several runs")
    parser.add_argument("--data", help="other examples than the run's test set: an .npz file, or a folder of images")
    parser.add_argument("--data_dir", default="", help="where the run's dataset is now, if its data.data_dir has moved")
    parser.add_argument("--path", default="", help="likewise for its data.path")
    parser.add_argument("--clients", action="store_true", help="also evaluate on each client's own training examples")
    parser.add_argument("--save", action="store_true", help="write what is found into each run's folder, for launch.report")
    parser.add_argument("--out", help="a .csv or .npz file of predictions: id, prediction, confidence, label")
    parser.add_argument("--config", help="a config file that registers the run's method or network")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _evaluated(experiment: Experiment, state: RunState, out: pathlib.Path | None, options: argparse.Namespace) -> Report:
    """The report of one run; its predictions are written to `out`."""
    test = experiment.problem.test
    own = Examples(np.asarray(test.images), np.asarray(test.labels))
    if (origins := experiment.dataset.origins) is not None:
        own = own._replace(origins=origins.test.tolist(), kind=origins.kind)
    examples = read(options.data, experiment) if options.data else own
    logits = experiment.predict(state, examples.images)
    report: Report = {"round": int(state.round), "examples": len(logits)}
    report |= {"classes": list(experiment.classes)} if experiment.classes else {}
    if examples.labels is not None:
        known = examples.labels >= 0
        report |= evaluation.report(logits[known], examples.labels[known])
    if options.clients:
        train, table = experiment.problem.train, experiment.problem.data.client_data
        labels = np.asarray(train.labels)
        right = evaluation.predictions(experiment.predict(state, np.asarray(train.images))).label == labels
        rows = [index[:count] for index, count in zip(table.index, table.count, strict=True)]
        clients = evaluation.of_clients(np.where(labels >= 0, right, np.nan), rows)
        report["clients"] = clients._asdict()
    if out:
        _write(out, evaluation.predictions(logits), examples, experiment.classes)
    return report


def _write(out: pathlib.Path, predicted: evaluation.Predictions, examples: Examples, classes: Sequence[str]) -> None:
    """Writes predictions, the whole file or none; an unknown label is -1."""
    number = len(predicted.label)
    labels = np.full(number, -1) if examples.labels is None else examples.labels
    columns: dict[str, Any] = {
        "id": np.arange(number),
        "prediction": predicted.label,
        "confidence": predicted.confidence,
        "label": labels,
    }
    columns |= {"predicted_class": np.array(classes)[predicted.label]} if classes else {}
    columns |= {examples.kind: np.array(examples.origins)} if examples.origins else {}
    with replacing(out) as file:
        if out.suffix == ".npz":
            np.savez(file, **columns)
            return
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        file.write(csv_files.written([list(columns), *rows]).encode(errors="surrogateescape"))  # a file's name may be no text


def _beside(reports: Mapping[str, Report], kinds: Mapping[str, tuple[str, str]]) -> dict[str, list[Report]]:
    """The reports of runs of one kind, see `_kind`, in one folder, by that folder, or by their own folders' names."""
    beside: dict[tuple[str, str], list[str]] = {}
    for folder, kind in kinds.items():
        beside.setdefault(kind, []).append(folder)
    parents = Counter(parent for parent, _ in beside)
    names = {kind: kind[0] if parents[kind[0]] == 1 else ", ".join(own) for kind, own in beside.items()}
    return {names[kind]: [reports[folder] for folder in own] for kind, own in beside.items() if len(own) > 1}


def _kind(experiment: Experiment) -> str:
    """What a run is but its seed: its settings, and its dataset, wherever that lies."""
    config = identity(flattened(experiment.settings.model_copy(update={"seed": 0}).to_dict()))
    return repr((config, dataset_digest(experiment.dataset, experiment.stored_shape)))


def _over(values: Sequence[Any]) -> Any:
    """Mean and standard deviation of numbers, None: unknown, or of those at each place of lists and dicts."""
    if isinstance(values[0], dict):
        return {key: _over([one[key] for one in values]) for key in SUMMARIZED if key in values[0]}
    if isinstance(values[0], list):
        return [_over(one) for one in zip(*values, strict=True)]
    return {"mean": (found := _spread(values)).mean, "sd": found.sd}


def _spread(values: Sequence[float | None]) -> Spread:
    return tables.spread([math.nan if value is None else value for value in values], 4)


def _tables(reports: Mapping[str, Report], beside: Mapping[str, list[Report]]) -> Iterator[Table]:
    """The reports as tables: of all runs, and of each run's classes and clients."""

    def row(name: str, own: Sequence[Report]) -> tuple[Any, ...]:
        of_clients = [one.get("clients", {}) for one in own]
        scores = [[one.get(key) for one in own] for key in ("accuracy", "ece")]
        scores += [[one.get(key) for one in of_clients] for key in ("mean", "worst")]
        sizes = [", ".join(sorted({str(one[key]) for one in own})) for key in ("round", "examples")]
        return (name, *sizes, *map(_spread, scores))

    rows = [row(folder, [report]) for folder, report in reports.items()]
    rows += [row(f"{folder}: mean ± sd", own) for folder, own in beside.items()]
    header = ("run", "round", "examples", "accuracy", "calibration error", "clients' mean", "clients' worst tenth")
    yield Table("runs", "Accuracy, calibration error (ECE), and accuracy over clients", header, tuple(rows)).without_empty()
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
            most = max(1, *clients["histogram"])
            bars = [
                (f"{i / 10:.1f} to {(i + 1) / 10:.1f}", n, "#" * round(40 * n / most))
                for i, n in enumerate(clients["histogram"])
            ]
            yield Table(
                "clients", f"{folder}, accuracies on clients' own training examples", ("accuracy", "clients", ""), tuple(bars)
            )


if __name__ == "__main__":
    sys.exit(command.ended(main, sys.argv))
