"""Writes `benchmarks/README.md`, all measurements, from `benchmarks/results/*.json` and the text of `benchmarks/report.md`.

    python -m benchmarks.report

A line `{{name}}` of the text becomes the tables of that command, `{{sweep name}}` the cells of a sweep, whose files
`python -m launch.report DIR --json=FILE` writes, each machine by itself, with the commands, commits and versions below it. A
test checks that the file is what would be written.
"""

import argparse
import importlib
import pathlib
import re
from typing import Any

from benchmarks import harness, round_time
from fedjax_ssl.experiment.report import cells

README, TEXT = (pathlib.Path(__file__).with_name(name) for name in ("README.md", "report.md"))


def source(run: dict[str, Any]) -> str:
    """Where results are from, in a line."""
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("python", "jax"))
    ceilings = f"; {round_time.in_words(run['ceilings'])}" if "ceilings" in run else ""
    commits = ", ".join(commit[:9] for commit in (run["commit"] or "unknown").split(", "))
    numbers = sorted({len(one["runs"]) for one in run["results"] if "runs" in one})
    seeds = f", {' or '.join(map(str, numbers))} seed{'s' * (numbers != [1])}" if numbers else ""
    about = f"commit {commits}{seeds}, {run['device']}, {versions}, warm-up {run['warm_up']}"
    return f"- `{run['command']}`, {about}{ceilings}"


def section(name: str, folder: pathlib.Path = harness.RESULTS) -> str:
    """The tables of a command or of a sweep, machine by machine."""
    (command, _, sweep), parts = name.partition(" "), []
    for path in sorted(folder.glob(f"{command}_*.json")):
        runs = harness.load(path)
        results = [one for run in runs for one in run["results"] if one["case"].get("table", "") == sweep]
        if not results:
            continue
        if sweep:
            table = cells.table(sweep, "", results)
            head, rows = table.header, [[*map(str, row)] for row in table.rows]
        else:
            module = importlib.import_module(f"benchmarks.{command}")
            order = getattr(module, "SORTED", ())
            results.sort(key=lambda one: [str(one["case"][key]) for key in order])
            head, rows = module.HEAD, [row for one in results for row in module.rows(one)]
        lines = [head, ["---"] * len(head), *rows]
        text = "\n".join("| " + " | ".join(" ".join(c.replace("|", "/").split()) for c in line) + " |" for line in lines)
        about = "\n".join(dict.fromkeys(map(source, runs)))
        parts.append(f"{runs[0]['machine']} (`{path.name}`):\n\n{text}\n\n{about}")
    return "\n\n".join(parts) or "Not measured yet."


def written() -> str:
    """The README's text."""
    return re.sub(r"^\{\{(.+)\}\}$", lambda match: section(match[1]), TEXT.read_text(), flags=re.MULTILINE)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    README.write_text(written())
