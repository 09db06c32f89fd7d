"""Compares runs: one HTML page that works without a network, figures (SVG, PNG) and tables (text, CSV, LaTeX) beside it.

    python -m launch.report DIR... [--by method] [--x rounds] [--target 0.9] [--out report.html] [--json FILE]

Every run in or below the folders is shown: finished, unfinished or diverged. Runs that differ in their seeds alone are a group,
with mean and standard deviation; `--by` puts runs together by keys instead. A sweep has a table of its cells, beside the
paper's accuracies; `--json` adds its cells to FILE. Nothing in the runs' folders is changed.
Exit status: 0 done; 2 wrong arguments, or no run.
"""

import argparse
import math
import pathlib
import pprint
import shlex
import sys
from collections.abc import Sequence

from fedjax_ssl.files import replacing
from fedjax_ssl.options import plural
from fedjax_ssl.report import cells, groups, page, sections, statistics, tables
from fedjax_ssl.runs import reading
from fedjax_ssl.runs.sweep import SWEEP

from . import arguments, command

LISTED = "files.txt"
"""The names of what a report has written into its folder, so that the next one removes what it does not write."""


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        options = _parser().parse_args(argv[1:])
        out = arguments.output("--out", options.out, ".html")
        as_json = arguments.output("--json", options.json) if options.json else None
        folders = [pathlib.Path(one).expanduser() for one in options.dirs]
        found = reading.find(folders)
        sweeps, problems = cells.find(found.runs)
        places = {path: place for sweep in sweeps for path, place in sweep.places.items()}
        grouped = groups.group(found.runs, [name.strip() for name in options.by.split(",") if name.strip()], places)
        made_from = sections.source(grouped, sweeps, found.unreadable, problems, options.x, options.target)
        if as_json is not None and not made_from.sweeps:
            raise ValueError(f"--json: got DIR without a {SWEEP}, accepted: folders of launch.sweep")
        results = cells.from_json(as_json) if as_json is not None and as_json.exists() else []
        worse = list[str]()
        for sweep in made_from.sweeps:
            worse += [cells.place(one) for one in cells.failed_since(results, sweep.results)]
            results = cells.added(results, sweep.source, sweep.results)
        _write(out, *_report(made_from, out, f"{command.program('report')} {shlex.join(argv[1:])}"))
        if as_json is not None:
            with replacing(as_json) as file:
                file.write(cells.as_json(results).encode())
            print(f"cells of sweeps: {as_json}")
            if worse:
                print(f"note: left as they were, for they failed or are unfinished here: {'; '.join(worse)}", file=sys.stderr)
    except command.WRONG_INPUT as error:
        return command.refuse(error)
    return 0


def _report(made_from: sections.Source, out: pathlib.Path, own: str) -> tuple[str, dict[str, bytes]]:
    """The page, and the files beside it; prints the results."""
    grouped, configs = made_from.grouped, dict[str, bytes]()
    commands = [page.Code("This report", own, "command-report")]
    for number, one in enumerate(made_from.sweeps):
        commands.append(page.Code(one.about or one.name, one.source["command"], f"command-sweep-{number}"))
    for group in grouped.groups:
        lines = _commands(group, f"{out.stem}_files", configs)
        commands.append(page.Code(group.label, "\n".join(lines), f"command-{group.slug}"))
    parts = sections.build(made_from, commands)
    files = page.files(parts) | page.pictures(sections.panels(made_from)) | configs
    for table in (item for item in parts[0].items if isinstance(item, tables.Table) and item.name != "costs"):
        print(tables.text(table))
    for line in (*made_from.problems, *made_from.unreadable, *grouped.notes):
        print(f"note: {line}", file=sys.stderr)
    return page.render(_title(made_from), _lead(grouped, made_from.unreadable), parts), files


def _commands(group: groups.Group, folder: str, files: dict[str, bytes]) -> list[str]:
    """The commands that made a group's runs; `files` gets a config file in `folder` for each kind that was made in Python."""
    lines, names = [], dict[str, str]()
    for run in group.runs:
        words = run.command
        if not words:
            name = names.setdefault(groups.identity(run), f"config_{group.slug}_{len(names) + 1}.py")
            config = pprint.pformat({**run.tree, "seed": 0}, width=120, sort_dicts=False)
            files[name] = f"CONFIG = {config}\n\n\ndef get_config(argument=None):\n    return CONFIG\n".encode()
            words = [f"--config={folder}/{name}", f"--config.seed={run.config['seed']}"]
        lines.append(f"{command.program('run')} {shlex.join(words)}")
    return list(dict.fromkeys(lines))


def _title(made_from: sections.Source) -> str:
    """What the report's only sweep is about, or the methods and datasets of its runs."""
    if made_from.grouped.heading == "experiment" and len(made_from.sweeps) == 1 and (about := made_from.sweeps[0].about):
        return about
    names = []
    for key, many in (("method.name", "methods"), ("data.name", "datasets")):
        values = list(dict.fromkeys(run.config[key] for group in made_from.grouped.groups for run in group.runs))
        names.append(f"{len(values)} {many}" if len(values) > 4 else ", ".join(values))
    return " on ".join(names)


def _lead(grouped: groups.Grouped, unreadable: Sequence[str]) -> str:
    """How many runs there are, and in which state."""
    states = [run.state.partition(":")[0].partition(" in ")[0] for group in grouped.groups for run in group.runs]
    states += ["unreadable"] * len(unreadable)
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    number = len(grouped.groups)
    return f"{plural(len(states), 'run')} in {plural(number, 'group')} by {grouped.heading}: {counted}."


def _write(out: pathlib.Path, html: str, files: dict[str, bytes]) -> None:
    """Writes everything; of an earlier report's files, those that this one does not have are removed."""
    folder = out.with_name(f"{out.stem}_files")
    folder.mkdir(exist_ok=True)
    listed = folder / LISTED
    earlier = listed.read_text().splitlines() if listed.is_file() else []
    for name in {pathlib.Path(line).name for line in earlier} - set(files):
        (folder / name).unlink(missing_ok=True)
    files = files | {LISTED: "".join(f"{name}\n" for name in sorted(files)).encode()}
    for path, content in [*((folder / name, content) for name, content in sorted(files.items())), (out, html.encode())]:
        with replacing(path) as file:
            file.write(content)
    print(f"page: {out}\nfigures and tables: {folder}, {len(files) - 1} files")


def _target(text: str) -> float:
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: a fraction in (0, 1], such as 0.9")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser("report", __doc__)
    parser.add_argument("dirs", metavar="DIR", nargs="+", help="a folder with runs in or below it")
    by = "config keys that make groups, with commas: method, data.num_labels; default: the method and what else differs"
    parser.add_argument("--by", default="", help=by)
    parser.add_argument("--x", default="rounds", choices=statistics.AXES, help="what curves are drawn against (%(default)s)")
    parser.add_argument(
        "--target", type=_target, help="a test accuracy in (0, 1]; default: 90 %% of the best group's last mean"
    )
    parser.add_argument(
        "--out", default="report.html", help="the page; NAME_files beside it has figures and tables (%(default)s)"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="a file to add sweeps' cells to, for `benchmarks.report`")
    return parser


if __name__ == "__main__":
    sys.exit(command.ended(main, sys.argv))
