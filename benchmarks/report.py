"""Writes `benchmarks/README.md`, all measurements, from `benchmarks/results/*.json` and the text of `benchmarks/report.md`.

    python -m benchmarks.report [--check]

A line `{{name}}` of the text becomes the tables of that command, and `{{tables name}}` one table of experiments, each machine by
itself, with the commands, commits and versions that they are from. `--check` writes nothing and fails where the file differs.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import harness, scaling, starts, tables
from benchmarks.harness import RESULTS, Result

README, TEXT = (pathlib.Path(__file__).with_name(name) for name in ("README.md", "report.md"))
Rows = tuple[Sequence[str], list[Sequence[str]]]
"""The head and the rows of a table."""


def number(value: float) -> str:
    """A number with three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else np.format_float_positional(value, 3, fractional=False, trim="-")


def between(value: float, ends: Sequence[float]) -> str:
    """A number and its interval."""
    return f"{number(value)} ({number(ends[0])} to {number(ends[1])})"


def of_compare(results: list[Result]) -> Rows:
    """Rounds of each program, and how many times as long as ours they take."""
    rows: list[Sequence[str]] = []
    for one in results:
        case = one["case"]
        head = (case["kind"], str(case["cohort"]), case["name"])
        if "seconds" not in one:
            rows.append((*head, "not timed: " + (one.get("error") or one["left_out"]), "", "", ""))
            continue
        spread = (between(one[key], one[ends]) for key, ends in (("seconds", "quartiles"), ("ratio", "least_and_greatest")))
        rows.append((*head, *spread, number(one["images_per_s"]), f"{one['difference']:.0e}"))
    return ("job", "clients", "program", "s a round (quartiles)", "times ours (turns)", "images/s", "model differs"), rows


def of_round_time(results: list[Result]) -> Rows:
    """Rounds and evaluations of each workload in each layout."""
    rows = []
    for one in sorted(results, key=lambda one: (one["case"]["of"], one["case"]["workload"], one["case"]["cohort"])):
        case, what = one["case"], {"rounds": "round", "evaluate": "evaluation"}[one["case"]["of"]]
        where = "" if case["code"] == "this" else f" (of {one['commit'][:9]})"
        work = f"{case['workload']}, M={case['cohort']}, S={case['steps']}" if what == "round" else case["workload"]
        if "error" in one:
            rows.append((what, work, case["layout"] + where, one["error"], "", "", ""))
            continue
        ratio = between(one["ratio"], one["ratio_quartiles"]) if "ratio" in one else ""
        share = f"{one['share']:.0%}" if "share" in one else ""
        size = f"{one['program_bytes'] / 1e6:,.0f}" if "program_bytes" in one else ""
        rows.append((what, work, case["layout"] + where, between(one["seconds"], one["quartiles"]), ratio, share, size))
    return ("of", "workload", "layout", "seconds (quartiles)", "times the first", "of the ceiling", "MB"), rows


def of_scaling(results: list[Result]) -> Rows:
    """The exponents of each series, and what its first and last points have."""
    rows = []
    for one in results:
        name, fits = one["case"]["series"], one.get("fits", {})
        if name == "rounds":
            rows.append(
                (
                    name,
                    f"{one['rounds']:,}",
                    "{:.0f} ± {:.0f} bytes a round: ".format(*one["growth"]) + one["verdict"],
                    *4 * [""],
                )
            )
            continue
        ends = [one["points"][0], one["points"][-1]]
        typical = [
            [float(np.median([point[key] for point in of])) for of in ends]
            for key in ("seconds", "program_bytes", "peak_bytes")
        ]
        first_last = [
            " to ".join(number(scale * x) for x in pair) for pair, scale in zip(typical, (1e3, 1e-6, 1e-6), strict=True)
        ]
        x = f"{one['x'][0]:,} to {one['x'][-1]:,} {one['of']}"
        words = [scaling.in_words(fits[key]) if key in fits else "" for key in ("seconds", "peak_bytes")]
        rows.append((name, x, words[0], *first_last, words[1]))
    return ("series", "from and to", "exponent of seconds", "ms a round", "program MB", "peak MB", "exponent of the peak"), rows


def of_costs(results: list[Result]) -> Rows:
    """What a client of each method computes and sends."""
    rows = [
        (
            one["case"]["method"],
            *(f"{one[key]:.2f}" for key in ("P", "B", "R_down", "R_up")),
            between(one["seconds"], one["quartiles"]),
            one["paper"],
        )
        for one in results
    ]
    return ("method", "P", "B", "R down", "R up", "s a round (quartiles)", "FedLabel's Table 5"), rows


def of_starts(results: list[Result]) -> Rows:
    """First and later starts."""
    rows = [
        (f"{one['case']['seeds']} seeds, {name}", *(starts.spread(runs, key) for key in starts.KEYS))
        for one in results
        for name, runs in (("first", [one["first"]]), ("later", one["later"]))
    ]
    return ("", "whole process s", "to the end of round 1", "compiling", "a round"), rows


def of_tables(results: list[Result]) -> Rows:
    """The cells of a table of experiments."""
    return tables.HEAD, [tables.columns(one) for one in results]


SECTIONS: dict[str, Callable[[list[Result]], Rows]] = {
    "compare": of_compare, "round_time": of_round_time, "scaling": of_scaling, "costs": of_costs, "starts": of_starts,
    "tables": of_tables,
}  # fmt: skip


def lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows of a Markdown table."""
    return ("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in row) + " |" for row in rows)


def source(run: dict[str, Any]) -> str:
    """Where results are from, in a line."""
    versions = ", ".join(
        f"{name} {version}" for name, version in run["versions"].items() if name in ("python", "jax", "jaxlib")
    )
    ceilings = ""
    if "ceilings" in run:
        rates = [f"{rate / 1e9:,.0f} GFLOP/s {name}" for name, rate in run["ceilings"]["flops"].items()]
        ceilings = f"; ceilings {', '.join(rates)}, {run['ceilings']['bandwidth'] / 1e9:,.0f} GB/s"
    warm_up = f"warm-up {run['warm_up']}"
    return f"- `{run['command']}`, commit {(run['commit'] or 'unknown')[:9]}, {run['device']}, {versions}, {warm_up}{ceilings}"


def section(name: str, folder: pathlib.Path = RESULTS) -> str:
    """The tables of a command, machine by machine: `tables name` is one table of experiments."""
    command, _, table = name.partition(" ")
    parts = []
    for path in sorted(folder.glob(f"{command}_*.json")):
        runs = [
            run | {"results": [one for one in run["results"] if one["case"].get("table", "") == table]}
            for run in harness.load(path)
        ]
        runs = [run for run in runs if run["results"]]
        if not runs:
            continue
        head, rows = SECTIONS[command]([one for run in runs for one in run["results"]])
        text = "\n".join(lines([head, ["---"] * len(head), *rows]))
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
