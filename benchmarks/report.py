"""Writes `benchmarks/README.md`, all measurements, from `benchmarks/results/*.json` and the text of `benchmarks/report.md`.

    python -m benchmarks.report

A line `{{name}}` of the text becomes the tables of that command, `{{sweep name}}` the cells of a sweep, whose files
`python -m launch.report DIR --json=FILE` writes, each machine by itself, with the commands, commits and versions below it. A
sweep of several columns is shown as a paper has it, rows by columns. Of the cells of a sweep's file whose columns a regular
expression matches

    {{rounds FILE COLUMN at 5 15 30}}      have accuracy, pseudo-labels and the server's loss after these rounds
    {{last5 FILE COLUMN}}                  have the accuracy of the last five evaluations in place of the last one
    {{curves FILE COLUMN: row; row}}       are drawn over the rounds: `results/curves_FILE_COLUMN.svg`, which is written, too

A test checks that the file is what would be written.
"""

import argparse
import importlib
import math
import pathlib
import re
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, round_time
from fedjax_ssl.report import cells, figures
from fedjax_ssl.report.statistics import mean_sd
from fedjax_ssl.report.tables import DASH

README, TEXT = (pathlib.Path(__file__).with_name(name) for name in ("README.md", "report.md"))
SWEEPS = pathlib.Path(__file__).parents[1] / "configs" / "sweeps"


def source(run: dict[str, Any]) -> str:
    """Where results are from, in a line."""
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("python", "jax"))
    ceilings = f"; {round_time.in_words(run['ceilings'])}" if "ceilings" in run else ""
    commits = ", ".join(commit[:9] + commit[40:] for commit in (run["commit"] or "unknown").split(", "))  # [40:] is a `+`
    numbers = sorted({len(one["runs"]) for one in run["results"] if "runs" in one})
    seeds = f", {' or '.join(map(str, numbers))} seed{'s' * (numbers != [1])}" if numbers else ""
    about = f"commit {commits}{seeds}, {run['device'] or 'unknown device'}, {versions}, warm-up {run['warm_up']}"
    note = f" ({run['note']})" if "note" in run else ""
    return f"- `{run['command'].replace(chr(10), '`, `')}`, {about}{ceilings}{note}"


def lines(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    table = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(str(c).replace("|", "/").split()) for c in row) + " |" for row in table)


def ordered(results: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The cells of a sweep in the order of its file, with its rows and its columns."""
    base, _, small = results[0]["case"]["table"].partition("-")
    file = SWEEPS / f"{base}.toml"
    of_file = tomllib.loads(file.read_text()) if file.exists() else {}
    of_file |= of_file.get(small, {})

    def names(axis: str) -> list[str]:
        listed, found = [str(one) for one in of_file.get(axis + "s", ())], dict.fromkeys(one["case"][axis] for one in results)
        return sorted(found, key=lambda one: listed.index(one) if one in listed else len(listed))

    rows, columns = names("row"), names("column")
    results = sorted(results, key=lambda one: (rows.index(one["case"]["row"]), columns.index(one["case"]["column"])))
    return results, rows, columns


def of_sweep(name: str, results: list[dict[str, Any]]) -> str:
    """The cells of a sweep: a line each, or, if it has several columns, rows by columns."""
    results, rows, columns = ordered(results)
    table, notes = cells.table(name, "", results), cells.notes(results)
    noted = "\n".join(["To be looked at before a mean is trusted:", "", *(f"* {one}" for one in notes)]) if notes else ""
    if len(columns) == 1:
        return "\n\n".join(filter(None, (lines(table.header, table.rows), noted)))
    if len({(one["case"]["row"], one["case"]["column"]) for one in results}) < len(results):
        raise ValueError(f"the results of {name} have a cell twice")
    of_cell = {(str(line[0]), str(line[1])): dict(zip(table.header, line, strict=True)) for line in table.rows}

    def sizes(row: str, key: str) -> str:
        """Megabytes, which mostly are the same in all columns."""
        found = {str(cell[key]) for (own, _), cell in of_cell.items() if own == row} - {DASH} or {DASH}
        shown = sorted(found, key=lambda text: math.inf if text == DASH else float(text.replace(",", "")))
        return " to ".join(dict.fromkeys((shown[0], shown[-1])))

    right = "pseudo-labels right, %"
    sized = {(row, key): sizes(row, key) for row in rows for key in ("MB up", "MB down")}
    labeled = {place: str(cell[right]) for place, cell in of_cell.items() if str(cell[right]) != DASH}
    errors = {place: cell["accuracy, %"] for place, cell in of_cell.items() if isinstance(cell["accuracy, %"], str)}
    grids = [cells.grid("", "", cells.accuracies(results) | sized, columns, "accuracy, %")]
    grids += [cells.grid("", "", labeled, columns, right)] * bool(labeled)
    below = [f"{row}, {column}: {error}." for (row, column), error in errors.items()]
    return "\n\n".join(filter(None, [*(lines(one.header, one.rows) for one in grids), *below, noted]))


class Quantity(NamedTuple):
    """What runs have of their rounds: where a result has it, as [[round, ...], ...], times what, and how it is shown."""

    array: str
    place: int
    factor: float
    shown: str

    def of(self, run: dict[str, Any]) -> dict[int, float]:
        """A run's values by round."""
        return {one[0]: self.factor * one[self.place] for one in run.get(self.array, ()) if one[self.place] is not None}


QUANTITIES = {
    "accuracy, %": Quantity("curve", 1, 100, ".1f"),
    "accepted pseudo-labels, %": Quantity("pseudo_labels", 2, 100, ".0f"),
    "of these right, %": Quantity("pseudo_labels", 3, 100, ".0f"),
    "mean threshold": Quantity("pseudo_labels", 1, 1, ".2f"),
    "the server's loss": Quantity("server_loss", 1, 1, ".2f"),
}


def of_rounds(results: list[dict[str, Any]], rounds: Sequence[int]) -> str:
    """What runs had after some rounds: a line for each run, or, after one round, for each cell with its seeds."""

    def texts(quantity: Quantity, run: dict[str, Any]) -> list[str]:
        found = quantity.of(run)
        return [f"{found[number]:{quantity.shown}}" if number in found else DASH for number in rounds]

    def joined(found: Sequence[str]) -> str:
        return ", ".join(found) if set(found) != {DASH} else DASH

    rows = []
    for one in ordered(results)[0]:
        row, runs = one["case"]["row"], [[texts(quantity, run) for quantity in QUANTITIES.values()] for run in one["runs"]]
        if len(rounds) == 1:
            rows.append([row, *(joined([own[0] for own in of_seeds]) for of_seeds in zip(*runs, strict=True))])
        else:
            rows += [[f"{row}, {run['seed']}", *map(joined, own)] for run, own in zip(one["runs"], runs, strict=True)]
    which = f"round {rounds[0]}" if len(rounds) == 1 else f"row, seed (rounds {', '.join(map(str, rounds))})"
    first = ", ".join(filter(None, [results[0]["case"]["column"], which]))
    there = [i for i in range(len(QUANTITIES) + 1) if any(row[i] != DASH for row in rows)]
    return lines([[first, *QUANTITIES][i] for i in there], [[row[i] for i in there] for row in rows])


def of_last5(results: list[dict[str, Any]]) -> str:
    """The accuracies of the last five evaluations, rows by columns."""
    results, _, columns = ordered(results)
    means = [
        one | {"paper": "", "runs": [run | {"accuracy": run.get("accuracy_last5")} for run in one["runs"]]} for one in results
    ]
    table = cells.grid("", "", cells.accuracies(means), columns, "the last five evaluations, %")
    return lines(table.header, table.rows)


def of_curves(name: str, results: list[dict[str, Any]], rows: Sequence[str]) -> figures.Picture:
    """Accuracy and pseudo-labels of some rows of a column over the rounds that all their seeds have."""
    parts: dict[str, list[figures.Curve]] = {}
    found = {one["case"]["row"]: one["runs"] for one in results}
    if strange := [row for row in rows if row not in found]:
        raise ValueError(f"{name} has no row {strange[0]!r}")
    for words, quantity in [*QUANTITIES.items()][:-1]:
        for style, row in enumerate(rows):
            of_runs = [quantity.of(run) for run in found[row]]
            if there := sorted(set.intersection(*map(set, of_runs))):
                mean, sd = mean_sd(np.array([[own[number] for number in there] for own in of_runs]))
                parts.setdefault(words, []).append(figures.Curve(row, np.array(there, float), mean, sd, style))
    return figures.curves("curves_" + re.sub(r"\W+", "_", name).strip("_"), name, parts, "round")


CELLS = re.compile(r"(?P<kind>rounds|last5|curves) (?P<file>\S+) (?P<column>.*?)( at (?P<rounds>\d+( \d+)*)|: (?P<rows>.+))?")
"""A line of `rounds`, which has rounds, of `curves`, which has rows, or of `last5`."""


def of_cells(match: re.Match[str], folder: pathlib.Path = harness.RESULTS) -> str | figures.Picture:
    """What such a line becomes; ValueError where it names no cell, or several columns where one is meant."""
    kind, file, column, rounds, rows = match.group("kind", "file", "column", "rounds", "rows")
    found = [one for run in harness.load(folder / f"sweep_{file}.json") for one in run["results"]]
    found = [one for one in found if re.fullmatch(column, one["case"]["column"])]
    columns = {one["case"]["column"] for one in found}
    if not found or (kind == "rounds") != bool(rounds) or (kind == "curves") != bool(rows):
        raise ValueError(f"{match[0]}: names no cell, or no rounds or rows")
    if kind == "last5":
        return of_last5(found)
    if len(columns) > 1:
        raise ValueError(f"{match[0]}: got {len(columns)} columns, accepted: one")
    if kind == "rounds":
        return of_rounds(found, [*map(int, rounds.split())])
    return of_curves(" ".join(filter(None, [file, *columns])), found, rows.split("; "))


def section(name: str, folder: pathlib.Path = harness.RESULTS) -> str:
    """The tables of a command or of a sweep, machine by machine."""
    (command, _, sweep), parts = name.partition(" "), []
    for path in sorted(folder.glob(f"{command}_*.json")):
        runs = harness.load(path)
        results = [one for run in runs for one in run["results"] if one["case"].get("table", "") == sweep]
        if not results:
            continue
        if sweep:
            text = of_sweep(sweep, results)
        else:
            module = importlib.import_module(f"benchmarks.{command}")
            order = getattr(module, "SORTED", ())
            results.sort(key=lambda one: [str(one["case"][key]) for key in order])
            text = lines(module.HEAD, [row for one in results for row in module.rows(one)])
        about = "\n".join(dict.fromkeys(map(source, runs)))
        parts.append(f"{runs[0]['machine']} (`{path.name}`):\n\n{text}\n\n{about}")
    return "\n\n".join(parts) or "Not measured yet."


def written() -> tuple[str, dict[str, bytes]]:
    """The README's text, and the figures in it by the names of their files."""
    pictures: dict[str, bytes] = {}

    def made(match: re.Match[str]) -> str:
        cells_of = CELLS.fullmatch(match[1])
        found = of_cells(cells_of) if cells_of else section(match[1])
        if isinstance(found, str):
            return found
        pictures[f"{found.name}.svg"] = found.svg
        return f"![{found.alt}](results/{found.name}.svg)"

    return re.sub(r"^\{\{(.+)\}\}$", made, TEXT.read_text(), flags=re.MULTILINE), pictures


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text, drawn = written()
    README.write_text(text)
    for name, content in drawn.items():
        (harness.RESULTS / name).write_bytes(content)
