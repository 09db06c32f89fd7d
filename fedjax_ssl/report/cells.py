"""Sweeps in a report: the results of each cell, which are those of its runs, beside the paper's; as a table and as JSON."""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.files import plain, regular
from fedjax_ssl.options import parse
from fedjax_ssl.report import extras, statistics
from fedjax_ssl.report.groups import METHOD, SEED, Shown, slug
from fedjax_ssl.report.tables import DASH, Cell, Spread, Table, spread
from fedjax_ssl.runs.reading import Run, errors, read_object
from fedjax_ssl.runs.sweep import SWEEP, CellFile, SweepFile
from fedjax_ssl.runs.sweep_queue import Done

HEADER = (
    "row", "column", "accuracy, %", "the paper, %", "difference", "pseudo-labels right, %", "MB up", "MB down", "s a run",
)  # fmt: skip
Result = dict[str, Any]
"""A cell: `case` (table, row, column), `config`, `overrides`, `paper`, and `runs`, with the numbers of each or its `error`."""
HYPERPARAMETERS = ("client.", "server.", "method.", "model.")
"""How keys begin whose values are chosen by validation."""
LABELS = ("client/threshold", "client/mask_rate", "diagnostics/pseudo_label_accuracy")
"""Of a run's pseudo-labels: the mean threshold, the share that is accepted, and the share of these that is right."""


class Sweep(NamedTuple):
    """A sweep whose runs were found: where these are from, the results of the cells that have any, and the place of each."""

    name: str
    about: str
    source: dict[str, Any]
    results: list[Result]
    places: dict[pathlib.Path, Shown]
    x: str = ""


def find(runs: Sequence[Run]) -> tuple[list[Sweep], list[str]]:
    """The sweeps that runs are part of, and a line for each `sweep.json` that is damaged and not used."""
    sweeps: list[Sweep] = []
    problems = []
    of_folder: dict[pathlib.Path, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.config[SEED]):
        of_folder.setdefault(run.path.resolve().parent, []).append(run)
    for top in dict.fromkeys(folder.parent for folder in of_folder):
        if not (top / SWEEP).is_file():
            continue
        try:
            file = parse(SweepFile, read_object(top / SWEEP))
        except ValueError as error:
            problems.append(f"{top.name}/{SWEEP}: not used: {error}")
            continue
        having = [(cell, of_folder[top / cell.folder]) for cell in file.cells if top / cell.folder in of_folder]
        if not having:
            continue
        results = [_of_cell(file.name, cell, own) for cell, own in having]
        same = sum(sweep.results[0]["case"]["table"] == file.name for sweep in sweeps)
        name = f"{file.name}_{same + 1}" if same else file.name
        source = _source(file, [run for _, own in having for run in own])
        sweeps.append(Sweep(name, file.about, source, results, _places(having), file.x))
    if len(sweeps) > 1 or sum(len(one.places) for one in sweeps) < len(runs):  # labels then begin with the sweep
        for one in sweeps:
            for path, (label, figure, curve) in one.places.items():
                one.places[path] = Shown(f"{one.name}: {label}", f"{one.name}: {figure}".removesuffix(": "), curve)
    return sweeps, problems


def _of_cell(table: str, cell: CellFile, own: Sequence[Run]) -> Result:
    """A cell's result: what it is, its accuracy over seeds, and the numbers of each run."""
    case, about = (
        {"table": table, "row": cell.row, "column": cell.column},
        cell.model_dump(include={"config", "overrides", "paper"}),
    )
    results = results_of(own)
    return {"case": case, **about, **over_seeds(results), "runs": results}


def results_of(runs: Sequence[Run]) -> list[Result]:
    """The results of a cell's runs; one on other data than the first is an error, as no mean is over two datasets."""
    results = [result(run) for run in runs]
    for one, error in zip(results, errors(runs), strict=True):
        if error:
            one["error"] = error
            one.pop("accuracy", None)
    return results


def _places(having: Sequence[tuple[CellFile, list[Run]]]) -> dict[pathlib.Path, Shown]:
    """The place of each run. A figure has the cells of a column, or, where a row has several methods, those of a row."""
    methods: dict[str, set[str]] = {}
    for cell, own in having:
        methods.setdefault(cell.row, set()).add(own[0].config[METHOD])
    varying = [axis for axis in ("row", "column") if len({getattr(cell, axis) for cell, _ in having}) > 1] or ["row"]
    by_row = any(len(found) > 1 for found in methods.values())
    places: dict[pathlib.Path, Shown] = {}
    for cell, own in having:
        words = [getattr(cell, axis) or "run" for axis in varying]
        label, curve = ", ".join(words), words.pop(-1 if by_row else 0)
        places |= dict.fromkeys((run.path for run in own), Shown(label, "".join(words), curve))
    return places


def _source(file: SweepFile, runs: Sequence[Run]) -> dict[str, Any]:
    """Where a sweep's numbers are from: its command, its runs' commits and devices, machine and versions."""
    found = {
        key: ", ".join(sorted({str(run.summary[name]) for run in runs if run.summary.get(name)})) or None
        for key, name in (("commit", "git_commit"), ("device", "device"))
    }
    found["commit"] = found["commit"] or file.commit or None  # unfinished runs have no summary
    return {"command": file.command, **found, "machine": file.machine, "versions": file.versions, "warm_up": "none: whole runs"}


def result(run: Run) -> Result:
    """A run's numbers, accuracies as fractions; `error` says why it has none, `note` why to look at it before it is trusted.

    What it has of each round is there also after an error, such as that it is unfinished: `curve` has the round and the
    accuracy of each evaluation, `pseudo_labels` the round and LABELS at each, `server_loss` the round and the loss on the
    server's labels. After `launch.evaluate --save` there is `confusion`, counts of test examples, true classes by predicted
    ones.
    """
    rounds, accuracy, summary = run.column("round").astype(int), run.column("eval/accuracy"), run.summary
    labels, server = run.column("diagnostics/pseudo_label_accuracy"), run.column("server/loss")
    at = np.flatnonzero(np.isfinite(accuracy))
    quality = [run.column(key) for key in LABELS] if np.isfinite(labels).any() else []
    own: Result = {"seed": run.config[SEED]} | ({"dataset": run.dataset} if run.dataset else {})
    of_rounds = {
        "curve": [[rounds[i], accuracy[i]] for i in at],
        "pseudo_labels": [[rounds[i], *(one[i] for one in quality)] for i in at if quality],
        "server_loss": [[rounds[i], server[i]] for i in at if np.isfinite(server).any()],
    }
    if run.error:
        return own | {"error": run.error, "diverged": bool(run.reason)} | of_rounds
    wrong, (found, _) = statistics.instability(run.columns), extras.evaluation(run)
    confusion = [] if found is None else found.confusion.astype(int).tolist()
    kept = "best" if "best/accuracy" in summary else "eval"
    if (validation := summary.get(f"{kept}/val_accuracy")) is not None:
        own |= {"validation": validation, "accuracy_there": summary[f"{kept}/accuracy"]}
    elif (validation := summary.get(f"{kept}/val_loss")) is not None:
        own |= {"validation": -validation, "accuracy_there": summary[f"{kept}/accuracy"], "by_loss": True}
    return own | ({"note": wrong} if wrong else {}) | ({"confusion": confusion} if confusion else {}) | {
        "accuracy": summary["eval/accuracy"], "accuracy_last5": summary.get("eval/accuracy_last5"),
        "pseudo_label_accuracy": statistics.last(labels[-5:], 5),
        "bytes_up": summary.get("comm/bytes_up", 0), "bytes_down": summary.get("comm/bytes_down", 0),
        "seconds": summary.get("time/total_s"), "device": summary.get("device"), "git_commit": summary.get("git_commit"),
    } | of_rounds  # fmt: skip


def over_seeds(results: Sequence[Result]) -> Result:
    """Mean and sample standard deviation of runs' accuracies, as fractions; NaN where a run has none: no mean leaves runs out.

    The deviation of one run is NaN, too.
    """
    accuracies = [one.get("accuracy") for one in results]
    mean, sd = statistics.mean_sd(np.array([np.nan if one is None else one for one in accuracies]))
    return {"accuracy_mean": float(mean), "accuracy_sd": float(sd)}


def table(name: str, title: str, results: Sequence[Result]) -> Table:
    """A row for each cell; errors take the place of its numbers, so that no mean leaves runs out. Notes stand below."""
    note = (
        "Accuracy of the last round, and share of accepted pseudo-labels that are right over the last five rounds: means over "
        "seeds. Seconds, the median, have compilation in them; runs of one program share them."
    )
    below = " ".join([note, *(f"{line}." for line in notes(results))])
    return Table(f"sweep_{slug(name)}", title, HEADER, tuple(map(_row, results)), below)


def accuracies(results: Sequence[Result]) -> dict[tuple[str, str], Cell]:
    """Of each cell, by row and column, the mean in % with its spread, in brackets the paper's; `failed` if a run has none."""
    found = dict[tuple[str, str], Cell]()
    for one in results:
        own, paper = _row(one)[2:4]
        beside = f" [{paper}]" * (paper != DASH)
        cell = own._replace(beside=beside) if isinstance(own, Spread) else f"failed{beside}"
        found[one["case"]["row"], one["case"]["column"]] = cell
    return found


def last_accuracies(done: Sequence[Done], seeds: int) -> Table:
    """The accuracies of a sweep's cells, rows by columns, the paper's beside them."""
    entries = {(one.cell.row, one.cell.column): f"{one}" + f" [{one.cell.paper}]" * bool(one.cell.paper) for one in done}
    of_seeds = f", mean ± sd over {seeds} seeds" if seeds > 1 else ""
    of_paper = ", in brackets the paper's" if any(one.cell.paper for one in done) else ""
    return grid("sweep", f"Accuracy of the last round in %{of_seeds}{of_paper}", entries)


def grid(name: str, title: str, entries: Mapping[tuple[str, str], Cell]) -> Table:
    """Rows by columns, as papers have them; `entries` are by row and column."""
    rows, columns = (dict.fromkeys(place[axis] for place in entries) for axis in (0, 1))
    head = ("", *(column or "accuracy, %" for column in columns))
    return Table(name, title, head, tuple((row, *(entries.get((row, c), DASH) for c in columns)) for row in rows))


def chosen_by_validation(name: str, results: Sequence[Result]) -> Table | None:
    """Each row's column with the highest mean accuracy on validation examples, its mean, and the test accuracy there.

    With `keep_best` both are those of the best round; with `keep_best=val_loss` the lowest loss is chosen. Diverged cells are
    not. None unless the columns differ in nothing but hyperparameters, and all other cells have validation examples.
    """
    rows: dict[str, list[Result]] = {}
    for one in results:
        rows.setdefault(one["case"]["row"], []).append(one)
    found, by_loss = list[tuple[Cell, ...]](), False
    for row, own in rows.items():
        alive = [one for one in own if not any(run.get("diverged") for run in one["runs"])]
        has_validation = all(one["runs"] and all("validation" in run for run in one["runs"]) for one in alive)
        if len(own) < 2 or not alive or not has_validation or not _differ_in_hyperparameters(own):
            return None
        best = max(alive, key=lambda one: float(np.mean([run["validation"] for run in one["runs"]])))
        by_loss = any(run.get("by_loss") for run in best["runs"])
        value = spread(
            [-run["validation"] if by_loss else 100 * run["validation"] for run in best["runs"]], 3 if by_loss else 1
        )
        found.append((row, best["case"]["column"], value, spread([100 * run["accuracy_there"] for run in best["runs"]], 1)))
    measure = "loss" if by_loss else "accuracy"
    head = ("", "chosen", f"validation {measure}{', %' * (not by_loss)}", "accuracy, %")
    which = f"the {'lowest' if by_loss else 'highest'} mean validation {measure}"
    note = f"In each row the column with {which}; test accuracies had no part in the choice."
    return Table(f"sweep_{slug(name)}_chosen", "Chosen by validation", head, tuple(found), note) if found else None


def _differ_in_hyperparameters(own: Sequence[Result]) -> bool:
    """Whether some cells have one config, and the keys that they set otherwise are those of training."""
    sets = [one["overrides"] for one in own]
    keys = {key for one in sets for key in one if any(other.get(key) != one[key] for other in sets)}
    return len({one["config"] for one in own}) == 1 and bool(keys) and all(key.startswith(HYPERPARAMETERS) for key in keys)


def place(one: Result) -> str:
    """A cell's row and, where it has one, its column."""
    return ", ".join(filter(None, (one["case"]["row"], one["case"]["column"])))


def notes(results: Sequence[Result]) -> list[str]:
    """A line for each cell that has runs which ended, but should be looked at before its mean is trusted."""
    lines = []
    for one in results:
        noted = [f"{run['note']} (seed {run['seed']})" for run in one["runs"] if "note" in run]
        if noted:
            lines.append(f"{place(one)}: {'; '.join(noted)}")
    return lines


def _row(one: Mapping[str, Any]) -> tuple[Cell, ...]:
    runs, paper = one["runs"], str(one["paper"] or DASH)
    first = (one["case"]["row"], one["case"]["column"] or DASH)
    seeds: dict[str, list[str]] = {}
    for run in runs:
        if "error" in run:
            seeds.setdefault(run["error"], []).append(str(run["seed"]))
    if seeds:
        errors = [f"seed{'s' * (len(of) > 1)} {', '.join(of)}: {error}" for error, of in seeds.items()]
        return (*first, "; ".join(errors), paper, *[DASH] * 5)

    def values(key: str, factor: float = 1.0) -> list[float]:
        return [np.nan if run[key] is None else factor * run[key] for run in runs]

    accuracy = spread(values("accuracy", 100), 1)
    given = re.match(r"\d+(\.\d+)?", paper)  # of a text such as `39.95 ± 1.85`
    difference = DASH if given is None else f"{accuracy.mean - float(given[0]):+.2f}"
    sizes = [float(np.mean(values(key, 1e-6))) for key in ("bytes_up", "bytes_down")]
    shown = [spread([size], None if 0 < size < 10 else 0) for size in sizes]
    right, seconds = spread(values("pseudo_label_accuracy", 100), 1), spread([np.median(values("seconds"))], 0)
    return (*first, accuracy, paper, difference, right, *shown, seconds)


def failed_since(runs: Sequence[Result], results: Sequence[Result]) -> list[Result]:
    """Those of `results` with an error, such as that a run is unfinished, where `runs` have the same `case` without one."""
    whole = [one["case"] for run in runs for one in run["results"] if not _has_error(one)]
    return [one for one in results if _has_error(one) and one["case"] in whole]


def added(runs: Sequence[Result], source: Mapping[str, Any], results: Sequence[Result]) -> list[Result]:
    """`runs`, each a source with its `results`, and one more, whose results replace those of the same `case`.

    The new results that `failed_since` returns are left out. ValueError where a case is there with other settings, or of other
    data.
    """
    known, worse = [one for run in runs for one in run["results"]], failed_since(runs, results)
    for one in results:
        before = next((old for old in known if old["case"] == one["case"]), one)
        other = [key for key in ("config", "overrides") if plain(before.get(key)) != plain(one.get(key))]
        there, here = ({run["dataset"] for run in part.get("runs", ()) if "dataset" in run} for part in (before, one))
        if other or (there and here and there != here):
            name = " ".join(str(part) for part in one["case"].values() if part)
            raise ValueError(f"{name}: the file has it with other {'settings' if other else 'data'}, give another file")
    new = [one for one in results if one not in worse]
    cases = [one["case"] for one in new]
    left = [run | {"results": [one for one in run["results"] if one["case"] not in cases]} for run in runs]
    return [run for run in (*left, {**source, "results": new}) if run["results"]]


def _has_error(one: Result) -> bool:
    return any("error" in run for run in one.get("runs", ()))


def from_json(path: pathlib.Path) -> list[Result]:
    """What `as_json` made of results; ValueError where the file has anything else."""
    try:
        runs = json.loads(regular(path).read_text())["runs"]
        if not all("case" in one for run in runs for one in run["results"]):
            raise LookupError
        return runs
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path}: got a file without results, accepted: one that --json wrote, or a new one") from None


def as_json(runs: Sequence[Result]) -> str:
    """`{"runs": [...]}` with a result a line, as `benchmarks.report` reads it."""
    parts = []
    for run in runs:
        head = json.dumps({key: value for key, value in run.items() if key != "results"})
        lines = ",\n  ".join(json.dumps(plain(one)) for one in run["results"])
        parts.append(f'{head[:-1]}, "results": [\n  {lines}\n ]}}')
    return '{"runs": [\n ' + ",\n ".join(parts) + "\n]}\n"
