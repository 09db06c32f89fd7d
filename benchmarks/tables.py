"""Runs a table of experiments, each over several seeds: accuracy, pseudo-label accuracy, bytes, seconds.

    python -m benchmarks.tables fl2_ablation --workdir=runs/tables --json=benchmarks/results/tables_<machine>.json

`benchmarks/tables.toml` has the tables. A cell's seeds are one `python -m launch.run`, or one each where a method cannot run
several at once; a stopped table goes on where it stopped. Further arguments, such as --config.data.data_dir=DIR, go to every
run. A run that fails or diverges is named with its error, without a mean; it has diverged, too, where clients were left out for
NaN or infinity, or where it ends with less than half of its best accuracy. Exit status 1 where a run failed otherwise.
"""

import itertools
import json
import os
import pathlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result, Rows

TABLES: dict[str, dict[str, Any]] = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
DIVERGED = "NaN or infinity"


def cells(table: str) -> Iterator[Result]:
    """The cells of a table, row by row: the config, what else is set, and the paper's accuracy in percent or None."""
    spec = TABLES[table]
    for (row, of_row), (column, value) in itertools.product(spec["rows"].items(), spec["columns"].items()):
        of_column = value if isinstance(value, dict) else {"value": value}
        config = spec["config"].format(row=of_row.get("name", row), column=of_column["value"])
        overrides = of_row.get("set", {}) | of_column.get("set", {})
        case = {"table": table, "row": row, "column": column}
        yield {"case": case, "config": config, "overrides": overrides, "paper": of_row.get("paper")}


def run(cell: Result, seeds: list[int], folder: pathlib.Path, extra: list[str]) -> list[Result]:
    """The results of a cell's runs, from the files that they leave; `error` where one fails or diverges."""
    several = {"seeds": len(seeds)} if len(seeds) > 1 else {}
    workdir = folder if several else folder / str(seeds[0])  # several have folders of their own in the command's
    command = [*harness.launch(cell["config"], workdir, {"seed": seeds[0], **several, **cell["overrides"]}), *extra]
    environment = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent.absolute() / "cache"), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=harness.ROOT)
    if done.returncode == 2 and several:
        return [result for seed in seeds for result in run(cell, [seed], folder, extra)]
    error = harness.last_error(done.stderr) if done.returncode else ""
    return [result_of(seed, folder / str(seed), error) for seed in seeds]


def result_of(seed: int, folder: pathlib.Path, error: str) -> Result:
    """A run's results; `error` is what its command ended with."""
    rounds, summary = harness.lines_of(folder / "metrics.jsonl"), folder / "summary.json"
    if not summary.exists():
        error = (rounds[-1].get("diverged") if rounds else "") or error or "no summary.json"
        return {"seed": seed, "error": error, "diverged": DIVERGED in error}
    found, wrong, key = json.loads(summary.read_text()), divergence(rounds), "diagnostics/pseudo_label_accuracy"
    last = [row[key] for row in rounds[-5:] if row.get(key) is not None]
    return {
        "seed": seed, **({"error": wrong, "diverged": True} if wrong else {}),
        "accuracy": found["eval/accuracy"], "accuracy_last5": found["eval/accuracy_last5"],
        "pseudo_label_accuracy": float(np.mean(last)) if last else None,
        "bytes_up": found.get("comm/bytes_up", 0), "bytes_down": found.get("comm/bytes_down", 0),
        "seconds": found["time/total_s"], "device": found["device"], "git_commit": found["git_commit"],
        "curve": [[row["round"], row["eval/accuracy"]] for row in rounds if "eval/accuracy" in row],
    }  # fmt: skip


def divergence(rounds: list[Result]) -> str:
    """Why a run that ended counts as diverged: it left clients out, or lost half of its best accuracy; empty: it does not."""
    if broken := [row["round"] for row in rounds if row.get("client/non_finite")]:
        return f"round {broken[0]}: clients returned {DIVERGED} and were left out, in {len(broken)} rounds"
    accuracies = [(row["eval/accuracy"], row["round"]) for row in rounds if "eval/accuracy" in row]
    (best, at), (last, _) = max(accuracies, key=lambda one: one[0]), accuracies[-1]
    return f"accuracy fell from {best:.1%} in round {at} to {last:.1%}" if last < best / 2 else ""


HEAD = ("row", "column", "accuracy %", "the paper", "pseudo-labels right %", "MB up / down", "s a run")


def rows(result: Result) -> Rows:
    """A cell's row of the table; accuracies have their mean and, of several seeds, sample standard deviation, in percent."""
    case, runs, paper = result["case"], result["runs"], result["paper"]
    if errors := [f"seed {run['seed']}: {run['error']}" for run in runs if "error" in run]:
        return [[case["row"], case["column"], "; ".join(errors), f"{paper or '-'}", "", "", ""]]

    def spread(key: str) -> str:
        values = [run[key] for run in runs if run[key] is not None]
        deviation = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        return f"{100 * np.mean(values):.1f}{deviation}" if values else "-"

    beside = f"{paper:.2f} ({100 * np.mean([run['accuracy'] for run in runs]) - paper:+.2f})" if paper else "-"
    sizes = " / ".join(f"{np.mean([run[key] for run in runs]) / 1e6:.0f}" for key in ("bytes_up", "bytes_down"))
    seconds = f"{np.median([run['seconds'] for run in runs]):.0f}"
    return [[case["row"], case["column"], spread("accuracy"), beside, spread("pseudo_label_accuracy"), sizes, seconds]]


def main() -> None:
    """Prints a table, line by line as its runs finish, and writes it."""
    parser = harness.parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--rows", nargs="+", help="those to run; default: all")
    arguments, extra = parser.parse_known_args()
    spec, folder = TABLES[arguments.table], arguments.workdir.absolute() / arguments.table
    wanted = arguments.rows or list(spec["rows"])
    if strange := set(wanted) - set(spec["rows"]):
        parser.error(f"--rows: got {strange.pop()!r}, accepted: {', '.join(spec['rows'])}")

    def result(cell: Result) -> Result:
        name = re.sub(r"[^\w.]", "-", f"{cell['case']['row']}-{cell['case']['column']}")
        runs = run(cell, list(range(arguments.seeds or spec["seeds"])), folder / name, extra)
        errors = [one["error"] for one in runs if "error" in one and not one["diverged"]]
        return {**cell, "runs": runs, **({"error": errors[0]} if errors else {})}

    found = (result(cell) for cell in cells(arguments.table) if cell["case"]["row"] in wanted)
    harness.collect(arguments.json, found, rows, "none: whole runs")


if __name__ == "__main__":
    main()
