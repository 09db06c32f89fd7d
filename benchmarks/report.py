"""Writes `benchmarks/README.md`, all measurements, from `benchmarks/results/*.json` and the text of `benchmarks/report.md`.

    python -m benchmarks.report [--check]

A line `{{name}}` of the text becomes the tables of that command, `{{tables name}}` one table of experiments, each machine by
itself, with the commands, commits and versions below it. `--check` writes nothing and fails where the file differs.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import harness, scaling, starts, tables
from benchmarks.harness import RESULTS, Result

README, TEXT = (pathlib.Path(__file__).with_name(name) for name in ("README.md", "report.md"))
Rows = Iterator[Sequence[str]]
"""The rows of a table, of which the first is its head."""


def number(value: float) -> str:
    """A number with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else np.format_float_positional(value, 3, fractional=False, trim="-")


def between(one: Result, key: str, ends: str) -> str:
    """A number and its interval; empty where there is none."""
    return f"{number(one[key])} ({number(one[ends][0])} to {number(one[ends][1])})" if key in one else ""


def problem(one: Result) -> str:
    """What is in place of seconds where something failed."""
    return one.get("error") or one.get("left_out", "")


def of_compare(results: list[Result]) -> Rows:
    """Rounds of each program, and how many times as long as ours they take."""
    yield "job", "clients", "program", "s a round (quartiles)", "times ours (turns)", "images/s", "model differs"
    for one in results:
        seconds = between(one, "seconds", "quartiles") or problem(one)
        differs = f"{one['difference']:.0e}" if "difference" in one else ""
        rate = number(one["images_per_s"]) if "images_per_s" in one else ""
        yield *map(str, one["case"].values()), seconds, between(one, "ratio", "least_and_greatest"), rate, differs


def of_round_time(results: list[Result]) -> Rows:
    """Rounds and evaluations of each workload in each layout."""
    yield "of", "workload", "M, S", "layout", "seconds (quartiles)", "times the first", "of the ceiling", "MB"
    for one in sorted(results, key=lambda one: [str(one["case"][key]) for key in ("of", "workload", "cohort")]):
        case = one["case"]
        layout = case["layout"] + ("" if case["code"] == "this" else f", at {one['commit'][:9]}")
        seconds = between(one, "seconds", "quartiles") or problem(one)
        share, size = f"{one['share']:.0%}" if "share" in one else "", f"{one.get('program_bytes', 0) / 1e6:,.0f}"
        sizes = f"{case['cohort']}, {case['steps']}"
        yield case["of"], case["workload"], sizes, layout, seconds, between(one, "ratio", "ratio_quartiles"), share, size


def of_scaling(results: list[Result]) -> Rows:
    """The exponents of each series, and what its first and last points have."""
    yield "series", "from and to", "ms a round", "exponent", "program MB", "exponent", "peak MB", "exponent"
    for one in results:
        if one["case"]["series"] == "rounds":
            growth = "grows by {:.0f} ± {:.0f} bytes a round".format(*one["growth"]) if "growth" in one else problem(one)
            yield "rounds", f"{one['rounds']:,}", *["", "", "", ""], growth, ""
            continue
        ends, fits, cells = (one["points"][0], one["points"][-1]), one["fits"], []
        for key, scale in zip(scaling.KINDS, (1e3, 1e-6, 1e-6), strict=True):
            cells.append(" to ".join(number(scale * float(np.median([point.get(key, np.nan) for point in of]))) for of in ends))
            cells.append(scaling.in_words(fits.get(key)))
        yield one["case"]["series"], f"{one['x'][0]:,} to {one['x'][-1]:,} {one['of']}", *cells


def of_costs(results: list[Result]) -> Rows:
    """What a client of each method computes and sends."""
    yield "method", "P", "B", "R down", "R up", "s a round (quartiles)", "FedLabel's Table 5"
    for one in results:
        costs = [f"{one[key]:.2f}" for key in ("P", "B", "R_down", "R_up")]
        yield one["case"]["method"], *costs, between(one, "seconds", "quartiles"), one["paper"]


def of_starts(results: list[Result]) -> Rows:
    """First and later starts."""
    yield "", "whole process s", "to the end of round 1", "compiling", "a round"
    for one in results:
        for name, runs in (("first", [one["first"]]), ("later", one["later"])):
            yield f"{one['case']['seeds']} seeds, {name}", *(starts.spread(runs, key) for key in starts.KEYS)


def of_tables(results: list[Result]) -> Rows:
    """The cells of a table of experiments."""
    yield tables.HEAD
    yield from map(tables.columns, results)


SECTIONS: dict[str, Callable[[list[Result]], Rows]] = {
    name: globals()[f"of_{name}"] for name in ("compare", "round_time", "scaling", "costs", "starts", "tables")
}


def source(run: dict[str, Any]) -> str:
    """Where results are from, in a line."""
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("python", "jax"))
    of = run.get("ceilings", {"flops": {}})
    rates = [f"{rate / 1e9:,.0f} GFLOP/s {name}" for name, rate in of["flops"].items()]
    ceilings = f"; ceilings {', '.join(rates)}, {of['bandwidth'] / 1e9:,.0f} GB/s" if rates else ""
    commit = (run["commit"] or "unknown")[:9]
    return f"- `{run['command']}`, commit {commit}, {run['device']}, {versions}, warm-up {run['warm_up']}{ceilings}"


def section(name: str, folder: pathlib.Path = RESULTS) -> str:
    """The tables of a command, machine by machine."""
    (command, _, table), parts = name.partition(" "), []
    for path in sorted(folder.glob(f"{command}_*.json")):
        runs = [
            {**run, "results": [one for one in run["results"] if one["case"].get("table", "") == table]}
            for run in harness.load(path)
        ]
        runs = [run for run in runs if run["results"]]
        if runs:
            rows = list(SECTIONS[command]([one for run in runs for one in run["results"]]))
            rows.insert(1, ["---"] * len(rows[0]))
            text = "\n".join("| " + " | ".join(" ".join(c.replace("|", "/").split()) for c in row) + " |" for row in rows)
            about = "\n".join(dict.fromkeys(map(source, runs)))
            parts.append(f"{runs[0]['machine']} (`{path.name}`):\n\n{text}\n\n{about}")
    return "\n\n".join(parts) or "Not measured yet."


def written(folder: pathlib.Path = RESULTS) -> str:
    """The README's text."""
    return re.sub(r"^\{\{(.+)\}\}$", lambda match: section(match[1], folder), TEXT.read_text(), flags=re.MULTILINE)


def main() -> None:
    """Writes the file, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the file is not what would be written")
    if not parser.parse_args().check:
        README.write_text(written())
    elif README.read_text() != written():
        sys.exit(f"{README.name}: not what the results say, accepted: the output of python -m benchmarks.report")


if __name__ == "__main__":
    main()
