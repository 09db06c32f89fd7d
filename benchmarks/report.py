"""Writes `benchmarks/README.md`, all measurements, from `benchmarks/results/*.json` and the text of `benchmarks/report.md`.

    python -m benchmarks.report

A line `{{name}}` of the text becomes the tables of that command, `{{sweep name}}` the cells of a sweep, whose files
`python -m launch.report DIR --json=FILE` writes, each machine by itself, with the commands, commits and versions below it. A
sweep of several columns is shown as a paper has it, rows by columns. A test checks that the file is what would be written.
"""

import argparse
import importlib
import math
import pathlib
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from benchmarks import harness, round_time
from fedjax_ssl.experiment.report import cells
from fedjax_ssl.experiment.report.tables import DASH

README, TEXT = (pathlib.Path(__file__).with_name(name) for name in ("README.md", "report.md"))
SWEEPS = pathlib.Path(__file__).parents[1] / "configs" / "sweeps"


def source(run: dict[str, Any]) -> str:
    """Where results are from, in a line."""
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("python", "jax"))
    ceilings = f"; {round_time.in_words(run['ceilings'])}" if "ceilings" in run else ""
    commits = ", ".join(commit[:9] for commit in (run["commit"] or "unknown").split(", "))
    numbers = sorted({len(one["runs"]) for one in run["results"] if "runs" in one})
    seeds = f", {' or '.join(map(str, numbers))} seed{'s' * (numbers != [1])}" if numbers else ""
    about = f"commit {commits}{seeds}, {run['device']}, {versions}, warm-up {run['warm_up']}"
    return f"- `{run['command']}`, {about}{ceilings}"


def lines(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    table = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(str(c).replace("|", "/").split()) for c in row) + " |" for row in table)


def of_sweep(name: str, results: list[dict[str, Any]]) -> str:
    """The cells of a sweep: a line each, or, if it has several columns, rows by columns, both in the order of its file."""
    base, _, small = name.partition("-")
    file = SWEEPS / f"{base}.toml"
    of_file = tomllib.loads(file.read_text()) if file.exists() else {}
    of_file |= of_file.get(small, {})

    def ordered(axis: str) -> list[str]:
        listed, found = [str(one) for one in of_file.get(axis + "s", ())], dict.fromkeys(one["case"][axis] for one in results)
        return sorted(found, key=lambda one: listed.index(one) if one in listed else len(listed))

    rows, columns = ordered("row"), ordered("column")
    results = sorted(results, key=lambda one: (rows.index(one["case"]["row"]), columns.index(one["case"]["column"])))
    table, notes = cells.table(name, "", results), "; ".join(cells.notes(results))
    notes = f"To be looked at before a mean is trusted: {notes}." if notes else ""
    if len(columns) == 1:
        return "\n\n".join(filter(None, (lines(table.header, table.rows), notes)))
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
    return "\n\n".join(filter(None, [*(lines(one.header, one.rows) for one in grids), *below, notes]))


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


def written() -> str:
    """The README's text."""
    return re.sub(r"^\{\{(.+)\}\}$", lambda match: section(match[1]), TEXT.read_text(), flags=re.MULTILINE)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    README.write_text(written())
