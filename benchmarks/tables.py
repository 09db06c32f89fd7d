"""Runs a table of experiments, each over several seeds: accuracy, pseudo-label accuracy, bytes, seconds.

    python -m benchmarks.tables fl2_ablation --workdir=runs/tables --json=benchmarks/results/tables_<machine>.json

`benchmarks/tables.toml` has the tables. A cell's seeds are one `python -m launch.run`, or one each where a method cannot run
several at once, so that a table that was stopped goes on where it stopped. What follows the table's arguments, such as
--config.data.data_dir=DIR, goes to every run. A run that fails or diverges is named with its error, and no mean is taken over
it; one has diverged, too, where clients that returned NaN or infinity were left out, or where it ends with less than half of
its best accuracy. Exit status 1 where a run failed otherwise.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result

TABLES: dict[str, dict[str, Any]] = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
DIVERGED = "NaN or infinity"


class Cell(NamedTuple):
    """One experiment: its row and column, the config, what is set besides, and its paper's accuracy in percent."""

    row: str
    column: str
    config: str
    overrides: dict[str, Any]
    paper: float | None


def cells(table: str) -> list[Cell]:
    """The cells of a table, row by row."""
    found, spec = [], TABLES[table]
    for row, of_row in spec["rows"].items():
        for column, value in spec["columns"].items():
            of_column = value if isinstance(value, dict) else {"value": value}
            config = spec["config"].format(row=of_row.get("name", row), column=of_column["value"])
            overrides = of_row.get("set", {}) | of_column.get("set", {})
            found.append(Cell(row, column, config, overrides, of_row.get("paper")))
    return found


def run(cell: Cell, seeds: list[int], folder: pathlib.Path, extra: list[str]) -> list[Result]:
    """The results of a cell's runs, from the files that they leave; `error` where one fails or diverges."""
    overrides = [f"--config.{key}={value}" for key, value in cell.overrides.items()]
    several = [f"--config.seeds={len(seeds)}"] if len(seeds) > 1 else []
    # A run alone is in a folder of its own, and so are several in the command's.
    workdir = folder if several else folder / str(seeds[0])
    command = [sys.executable, "-m", "launch.run", f"--config={cell.config}", f"--workdir={workdir}"]
    environment = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent.absolute() / "cache"), **os.environ}
    command += [f"--config.seed={seeds[0]}", *several, *overrides, *extra]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=harness.ROOT)
    if done.returncode == 2 and several:
        return [result for seed in seeds for result in run(cell, [seed], folder, extra)]
    error = harness.last_error(done.stderr) if done.returncode else ""
    return [result_of(seed, folder / str(seed), error) for seed in seeds]


def result_of(seed: int, folder: pathlib.Path, error: str) -> Result:
    """A run's results; `error` is what its command ended with."""
    log, summary = folder / "metrics.jsonl", folder / "summary.json"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not summary.exists():
        error = (rows[-1].get("diverged") if rows else "") or error or "no summary.json"
        return {"seed": seed, "error": error, "diverged": DIVERGED in error}
    found = json.loads(summary.read_text())
    wrong = left_out(rows) or fallen(rows)
    return {
        "seed": seed,
        **({"error": wrong, "diverged": True} if wrong else {}),
        "accuracy": found["eval/accuracy"],
        "accuracy_last5": found["eval/accuracy_last5"],
        "pseudo_label_accuracy": mean_of_last(rows, "diagnostics/pseudo_label_accuracy"),
        "bytes_up": found.get("comm/bytes_up", 0),
        "bytes_down": found.get("comm/bytes_down", 0),
        "seconds": found["time/total_s"],
        "device": found["device"],
        "git_commit": found["git_commit"],
        "curve": [[row["round"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row],
    }


def left_out(rows: list[Result]) -> str:
    """What is wrong with a run to whose rounds not all clients of the cohort added; empty: nothing."""
    broken = [row["round"] for row in rows if row.get("client/non_finite")]
    return f"round {broken[0]}: clients returned {DIVERGED} and were left out, in {len(broken)} rounds" if broken else ""


def fallen(rows: list[Result]) -> str:
    """What is wrong with a run that lost most of what it had learned, as where its steps are too large; empty: nothing."""
    accuracies = [(row["eval/accuracy"], row["round"]) for row in rows if "eval/accuracy" in row]
    (best, at), (last, _) = max(accuracies, key=lambda one: one[0]), accuracies[-1]
    return f"accuracy fell from {best:.1%} in round {at} to {last:.1%}" if last < best / 2 else ""


def mean_of_last(rows: list[Result], key: str, rounds: int = 5) -> float | None:
    """The mean of what the last rounds have under `key`; None where they have nothing there."""
    values = [row[key] for row in rows[-rounds:] if row.get(key) is not None]
    return float(np.mean(values)) if values else None


def spread(values: list[float]) -> str:
    """Mean and, of several values, sample standard deviation, in percent."""
    deviation = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{deviation}"


HEAD = ("row", "column", "accuracy %", "the paper", "pseudo-labels right %", "MB up / down", "s a run")


def columns(result: Result) -> list[str]:
    """A cell's columns of HEAD."""
    case, runs, paper = result["case"], result["runs"], result["paper"]
    if errors := [f"seed {run['seed']}: {run['error']}" for run in runs if "error" in run]:
        return [case["row"], case["column"], "; ".join(errors), f"{paper or '-'}", "", "", ""]
    accuracies = [run["accuracy"] for run in runs]
    beside = f"{paper:.2f} ({100 * np.mean(accuracies) - paper:+.2f})" if paper else "-"
    labeled = [run["pseudo_label_accuracy"] for run in runs if run["pseudo_label_accuracy"] is not None]
    up, down = (f"{np.mean([run[key] for run in runs]) / 1e6:.0f}" for key in ("bytes_up", "bytes_down"))
    seconds = f"{np.median([run['seconds'] for run in runs]):.0f}"
    return [
        case["row"],
        case["column"],
        spread(accuracies),
        beside,
        spread(labeled) if labeled else "-",
        f"{up} / {down}",
        seconds,
    ]


def main() -> None:
    """Prints a table, line by line as its runs finish, and writes it."""
    parser = harness.parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--rows", nargs="+", help="those to run; default: all")
    arguments, extra = parser.parse_known_args()
    table = arguments.table
    if strange := set(arguments.rows or ()) - set(TABLES[table]["rows"]):
        parser.error(f"--rows: got {strange.pop()!r}, accepted: {', '.join(TABLES[table]['rows'])}")
    seeds = list(range(arguments.seeds or TABLES[table]["seeds"]))

    def results() -> Any:
        for cell in cells(table):
            if cell.row in (arguments.rows or [cell.row]):
                name = re.sub(r"[^\w.]", "-", f"{cell.row}-{cell.column}")
                runs = run(cell, seeds, arguments.workdir.absolute() / table / name, extra)
                errors = [one["error"] for one in runs if "error" in one and not one["diverged"]]
                case = {"table": table, "row": cell.row, "column": cell.column}
                wrong = {"error": errors[0]} if errors else {}
                yield {
                    "case": case,
                    **wrong,
                    "config": cell.config,
                    "overrides": cell.overrides,
                    "paper": cell.paper,
                    "runs": runs,
                }

    harness.collect(arguments.json, results(), lambda result: " | ".join(columns(result)), "none: whole runs")


if __name__ == "__main__":
    main()
