"""Compares runs: one HTML page that works without a network, figures (SVG, PDF, PNG) and tables (text, CSV, LaTeX) beside it.

    python -m launch.report DIR... [--by method] [--x rounds] [--target 0.9] [--interval] [--out report.html] [--json FILE]
        [--labels fl2=Ours,...] [--title TEXT] [--width single]

Every run in or below the folders is shown: finished, unfinished or diverged. Runs that differ in their seeds alone are a group,
with mean and standard deviation, or with a confidence interval (`--interval`); `--by` puts runs together by keys instead. Two
groups are compared over the seeds and splits that both have. A sweep has a table of its cells, beside the paper's accuracies;
`--json` adds its cells to FILE. Nothing in the runs' folders is changed.
Exit status: 0 done; 2 wrong arguments, or no run.
"""

import argparse
import math
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import arguments, command

WIDTHS = {"page": 0.0, "single": 3.4, "double": 7.0}  # inches

if TYPE_CHECKING:  # what takes long to import is imported once the arguments are accepted
    from fedjax_ssl.report.sections import Source


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        options = _parser().parse_args(argv[1:])
        out = arguments.output("--out", options.out, ".html")
        as_json = arguments.output("--json", options.json) if options.json else None
        folders = [pathlib.Path(one).expanduser() for one in options.dirs]
    except ValueError as error:
        return command.refuse(error)
    from fedjax_ssl.files import replacing
    from fedjax_ssl.report import cells, groups, page, sections
    from fedjax_ssl.runs import reading
    from fedjax_ssl.runs.sweep import SWEEP

    try:
        found = reading.find(folders)
        sweeps, problems = cells.find(found.runs)
        places = {path: place for sweep in sweeps for path, place in sweep.places.items()}
        by = [name.strip() for name in options.by.split(",") if name.strip()]
        grouped = groups.group(found.runs, by, places, _labels(options.labels))
        choices = sections.Choices(options.interval, options.title, WIDTHS[options.width])
        made_from = sections.source(grouped, sweeps, found.unreadable, problems, options.x, options.target, choices)
        if as_json is not None and not made_from.sweeps:
            raise ValueError(f"--json: got DIR without a {SWEEP}, accepted: folders of launch.sweep")
        results = cells.from_json(as_json) if as_json is not None and as_json.exists() else []
        worse = list[str]()
        for sweep in made_from.sweeps:
            worse += [cells.place(one) for one in cells.failed_since(results, sweep.results)]
            results = cells.added(results, sweep.source, sweep.results)
        html, files = _report(made_from, out, f"{command.program('report')} {shlex.join(argv[1:])}")
        page.write(out, html, files)
        print(f"page: {out}\nfigures and tables: {page.folder_of(out)}, {len(files)} files")
        if as_json is not None:
            with replacing(as_json) as file:
                file.write(cells.as_json(results).encode())
            print(f"cells of sweeps: {as_json}")
            if worse:
                print(f"note: left as they were, for they failed or are unfinished here: {'; '.join(worse)}", file=sys.stderr)
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    return 0


def _report(made_from: "Source", out: pathlib.Path, own: str) -> tuple[str, dict[str, bytes]]:
    """The page, and the files beside it; prints the results."""
    from fedjax_ssl.report import page, sections, tables

    grouped, configs = made_from.grouped, dict[str, bytes]()
    commands = [page.Code("This report", own, "command-report")]
    for number, one in enumerate(made_from.sweeps):
        commands.append(page.Code(one.about or one.name, one.source["command"], f"command-sweep-{number}"))
    for group in grouped.groups:
        lines = [f"{command.program('run')} {words}" for words in sections.commands(group, page.folder_of(out).name, configs)]
        commands.append(page.Code(group.label, "\n".join(lines), f"command-{group.slug}"))
    parts = sections.build(made_from, commands)
    files = page.files(parts) | page.pictures(sections.panels(made_from)) | configs
    for table in (item for item in parts[0].items if isinstance(item, tables.Table) and item.name != "costs"):
        print(tables.text(table))
    for line in (*made_from.problems, *made_from.unreadable, *grouped.notes):
        print(f"note: {line}", file=sys.stderr)
    return page.render(sections.title(made_from), sections.lead(made_from), parts), files


def _labels(text: str) -> dict[str, str]:
    """A reader's own labels, from NAME=LABEL with commas between them; ValueError for other text."""
    from fedjax_ssl.figure_text import error_of_math

    parts = re.findall(r"(?:\$[^$]*\$|[^,])+", text)  # a comma within mathematics separates nothing
    found = dict(part.split("=", 1) for part in parts if "=" in part)
    if bad := [part for part in parts if "=" not in part]:
        raise ValueError(f"--labels: got {bad[0]!r}, accepted: NAME=LABEL, with commas between several, such as fl2=Ours")
    for label in found.values():
        if error := error_of_math(label):
            raise ValueError(f"--labels: got {label!r}, accepted: mathematics that matplotlib knows ({error})")
    return {name.strip(): label.strip() for name, label in found.items()}


def _target(text: str) -> float:
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: a fraction in (0, 1], such as 0.9")
    return value


def _parser() -> argparse.ArgumentParser:
    from fedjax_ssl.report.statistics import AXES

    parser = arguments.Parser("report", __doc__)
    parser.add_argument("dirs", metavar="DIR", nargs="+", help="a folder with runs in or below it")
    by = "config keys that make groups, with commas: method, data.num_labels; default: the method and what else differs"
    parser.add_argument("--by", default="", help=by)
    parser.add_argument("--x", default="rounds", choices=AXES, help="what curves are drawn against (%(default)s)")
    parser.add_argument(
        "--target",
        type=_target,
        help="a test accuracy in (0, 1]: tables have the costs until it is reached, figures a line at it; default: 90 %% of "
        "the best group's last mean",
    )
    interval = "95 %% confidence intervals of means over runs (Student's t) in place of sample standard deviations"
    parser.add_argument("--interval", action="store_true", help=interval)
    labels = "your own labels of methods or groups: NAME=LABEL, with commas between several"
    parser.add_argument("--labels", default="", metavar="NAME=LABEL", help=labels)
    parser.add_argument("--title", default="", help="the page's title; default: what it compares")
    width = "width of figures of curves: of a paper's single or double column (3.4 and 7 inches), or for the page"
    parser.add_argument("--width", choices=list(WIDTHS), default="page", help=width)
    parser.add_argument(
        "--out", default="report.html", help="the page; NAME_files beside it has figures and tables (%(default)s)"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="a file to add sweeps' cells to, for `benchmarks.report`")
    return parser


if __name__ == "__main__":
    command.exit_with(main)
