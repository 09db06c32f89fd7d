"""Writes the tables and figures in `benchmarks/*.md` from `benchmarks/results/*.json`.

    python -m benchmarks.report

The pages are edited by hand, except for what stands between a line `<!-- WORDS -->` and `<!-- end -->`. WORDS are one of

    sweep NAME ... | COLUMN            the cells of sweeps, rows by columns; of columns that match the regular expression COLUMN
                                       also the mean of the last five evaluations; the cells of several sweeps below one another
    rounds NAME | 5 10 | QUANTITY; ..  what the runs of a sweep had after these rounds, a row for each run
    curves FILE | COLUMN | ROW; ..     rows of a column of `sweep_FILE.json` over the rounds: `results/curves_FILE_COLUMN.svg`
    COMMAND | ID; .. | SHOWN; ..       columns of a benchmark's table, without the intervals whose name SHOWN leaves out; then
                                       `| by COLUMN` gives each value of COLUMN a column, `| KEY=VALUE` chooses results
    sources                            machines, versions, commands and commits of all that the page shows

Results of a second machine have a ° behind them; the line above the table names both machines.
"""

import argparse
import collections
import importlib
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, round_time
from fedjax_ssl.report import cells, figures
from fedjax_ssl.report.statistics import mean_sd
from fedjax_ssl.report.tables import DASH, Spread, spread

PAGES = pathlib.Path(__file__).parent
SWEEPS = PAGES.parent / "configs" / "sweeps"
BLOCK = re.compile(r"^<!-- (?!end )(?P<words>[^\n]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
LAST5, SIZES = "{}, / last five", "MB up; down"
QUANTITIES = {
    "accuracy, %": ("curve", 1, 100, ".1f"),
    "accepted pseudo-labels, %": ("pseudo_labels", 2, 100, ".0f"),
    "of these right, %": ("pseudo_labels", 3, 100, ".0f"),
    "mean threshold": ("pseudo_labels", 1, 1, ".2f"),
    "the server's loss": ("server_loss", 1, 1, ".2f"),
}
"""What runs have of their rounds: where a result has it, as [[round, ...], ...], times what, and how it is shown."""
Entries = dict[tuple[tuple[str, ...], str], str]  # the texts of a table, by the first cells of the row and by column


class Found(NamedTuple):
    """A result and the run of a command that it is from; `mark` says on which machine."""

    run: dict[str, Any]
    result: dict[str, Any]
    mark: str

    @property
    def place(self) -> tuple[str, str]:
        """A cell's row and column."""
        return self.result["case"]["row"], self.result["case"]["column"]


def where(run: Mapping[str, Any]) -> str:
    """The machine that results are from."""
    return run["machine"] if "cpu" in run["device"] else f"{run['device']}, {run['machine']}"


def load(paths: Iterable[pathlib.Path], **chosen: str) -> tuple[list[Found], str]:
    """The chosen results in files, and the machines that these are from; most of them are from the one without a mark."""
    runs = [run for path in paths for run in harness.load(path)]
    found = [(run, one) for run in runs for one in run["results"] if chosen.items() <= one["case"].items()]
    machines = collections.Counter(where(run) for run, _ in found).most_common()
    marks = {machine: "°" * i for i, (machine, _) in enumerate(machines)}
    said = "; ".join(f"{mark or 'Machine'}: {machine}" for machine, mark in marks.items())
    return [Found(run, one, marks[where(run)]) for run, one in found], said


def table(first: Sequence[str], entries: Entries, columns: Sequence[str] = ()) -> str:
    """A table in Markdown; `first` are the heads of a row's first cells, `columns` those that come before others."""
    found = dict.fromkeys(column for _, column in entries)
    columns = [*(one for one in columns if one in found), *(one for one in found if one not in columns)]
    rows = [[*row, *(entries.get((row, one), "") for one in columns)] for row in dict.fromkeys(row for row, _ in entries)]
    rows = [[*first, *columns], ["---"] * (len(first) + len(columns)), *rows]
    return "\n".join("|" + "|".join(" ".join(cell.replace("|", "/").split()) for cell in row) + "|" for row in rows)


def axes(name: str) -> tuple[list[str], list[str]]:
    """The rows and the columns of a sweep's file, none where there is no file."""
    base, _, small = name.partition("-")
    file = SWEEPS / f"{base}.toml"
    content = tomllib.loads(file.read_text()) if file.exists() else {}
    content |= content.get(small, {})
    return [str(one) for one in content.get("rows", ())], [str(one) for one in content.get("columns", ())]


def ordered(name: str, found: Iterable[Found]) -> list[Found]:
    """The cells of a sweep in the order of its file, and behind them those that the file does not have."""
    own = [one for one in found if one.result["case"]["table"] == name]
    first = [dict.fromkeys([*listed, *(one.place[axis] for one in own)]) for axis, listed in enumerate(axes(name))]
    rows, columns = ({text: i for i, text in enumerate(of_axis)} for of_axis in first)
    return sorted(own, key=lambda one: (rows[one.place[0]], columns[one.place[1]], one.mark))


def cell(one: Found, *, has_last5: bool) -> tuple[str, tuple[str, str]]:
    """A cell's text, and its megabytes up and down."""
    runs, shown = one.result["runs"], dict(zip(cells.HEADER, cells.table("", "", [one.result]).rows[0], strict=True))
    accuracy, paper, right = (shown[name] for name in ("accuracy, %", "the paper, %", "pseudo-labels right, %"))
    if not (isinstance(accuracy, Spread) and isinstance(right, Spread)):
        return f"failed: {accuracy}{one.mark}", ("", "")
    parts = [f"{accuracy} / {spread([100 * run['accuracy_last5'] for run in runs], 1)}" if has_last5 else str(accuracy)]
    parts += [f"[{paper}]"] * (paper != DASH) + [f"({right.mean:.0f})"] * (str(right) != DASH)
    parts += [f"!{sum('note' in run for run in runs)}"] * any("note" in run for run in runs)
    return " ".join(parts) + one.mark, (str(shown["MB up"]), str(shown["MB down"]))


def of_sweep(folder: pathlib.Path, names: str, last5: str = "(?!)") -> str:
    """The cells of a sweep, rows by columns; of several sweeps each cell in a row of its own."""
    found, machines = load(paths(f"sweep {names}", folder))
    entries, sizes = Entries(), collections.defaultdict[tuple[str, ...], set[tuple[str, str]]](set)
    for name in names.split():
        for one in ordered(name, found):
            row, column = one.place[0], one.place[1] or "accuracy, %"
            text, megabytes = cell(one, has_last5=(has_last5 := bool(re.fullmatch(last5, column))))
            column = LAST5.format(column) if has_last5 else column
            row, column = (f"`{name}` {column}", "accuracy, %") if " " in names else (row, column)
            entries[(row,), column] = "; ".join(filter(None, (entries.get(((row,), column)), text)))
            sizes[(row,)].add(megabytes)

    def size(of_row: set[tuple[str, str]]) -> str:
        ends = [sorted({*own} - {""}, key=lambda text: float(text.replace(",", ""))) for own in zip(*of_row, strict=True)]
        return "; ".join(" to ".join(dict.fromkeys((own[0], own[-1]))) for own in ends if own)

    sized: Entries = {(row, SIZES): size(own) for row, own in sizes.items()}
    if len({*sized.values()}) == 1:
        machines, sized = f"{machines}. {SIZES}: {sized.popitem()[1]}", {}
    first = [head for one in axes(names)[1] for head in (one, LAST5.format(one))]
    return f"{machines}.\n\n{table([''], entries | sized, first)}"


def by_round(run: Mapping[str, Any], quantity: str) -> dict[int, float]:
    """What a run has of a quantity, by round."""
    array, place, factor, _ = QUANTITIES[quantity]
    return {one[0]: factor * one[place] for one in run.get(array, ()) if one[place] is not None}


def of_rounds(folder: pathlib.Path, name: str, rounds: str, quantities: str) -> str:
    """What the runs of a sweep had after some rounds."""
    (found, machines), entries = load(paths(f"rounds {name}", folder)), Entries()
    shown = 1 + (len({one.place[1] for one in found}) > 1)  # the column's name, too, where there are several
    for cell_of, run in ((one, run) for one in ordered(name, found) for run in one.result["runs"]):
        for quantity in quantities.split("; "):
            own, decimals = by_round(run, quantity), QUANTITIES[quantity][-1]
            texts = ", ".join(f"{own[number]:{decimals}}" if number in own else DASH for number in map(int, rounds.split()))
            row = (f"{', '.join(cell_of.place[:shown])}, {run['seed']}{cell_of.mark}",)
            entries[row, quantity] = re.sub(f"(^|, ){DASH}(, {DASH})*$", "", texts)  # a run may have ended earlier
    return f"{machines}.\n\n{table([f'row, seed (rounds {rounds})'], entries)}"


def of_curves(folder: pathlib.Path, file: str, column: str, rows: str) -> figures.Picture:
    """Accuracy and pseudo-labels of some rows of a column over the rounds that all their seeds have."""
    parts: dict[str, list[figures.Curve]] = {}
    found = {one.place[0]: one.result["runs"] for one in load(paths(f"curves {file}", folder), column=column)[0]}
    if strange := [row for row in rows.split("; ") if row not in found]:
        raise ValueError(f"{file}, {column}: got the row {strange[0]!r}, accepted: {', '.join(found)}")
    for quantity in [*QUANTITIES][:-1]:
        of_rows = [[by_round(run, quantity) for run in found[row]] for row in rows.split("; ")]
        for style, (row, of_runs) in enumerate(zip(rows.split("; "), of_rows, strict=True)):
            if shared := sorted(set.intersection(*map(set, of_runs))):
                mean, sd = mean_sd(np.array([[own[number] for number in shared] for own in of_runs]))
                parts.setdefault(quantity, []).append(figures.Curve(row, np.array(shared, float), mean, sd, style))
    name = f"{file} {column}".strip()
    return figures.curves("curves_" + re.sub(r"\W+", "_", name).strip("_"), name, parts, "round")


def of_command(folder: pathlib.Path, command: str, ids: str, shown: str, *options: str) -> str:
    """Columns of a benchmark's table, with the rows of several machines below one another or, `by` a column, side by side."""
    module, entries = importlib.import_module(f"benchmarks.{command}"), Entries()
    by = next((option.removeprefix("by ") for option in options if option.startswith("by ")), "")
    found, machines = load(paths(command, folder), **dict(option.split("=") for option in options if "=" in option))
    found.sort(key=lambda one: [str(one.result["case"][key]) for key in getattr(module, "SORTED", ())])
    cases = [one.result["case"] for one in found]
    for one in sorted(found, key=lambda one: cases.index(one.result["case"])):
        for row in module.rows(one.result):
            line = dict(zip(module.HEAD, row, strict=True)) | {"machine": where(one.run)}
            line |= {head.partition(" (")[0]: re.sub(r" \([^)]*\)", "", text) for head, text in line.items() if " (" in head}
            first, *others = (line[name] for name in ids.split("; "))
            texts = {name: line[name] for name in shown.split("; ")}
            own = {line[by]: "; ".join(filter(None, texts.values()))} if by else texts
            entries |= {((first if by else first + one.mark, *others), name): text for name, text in own.items()}
    about = [f"{machines}."] * (by != "machine") + [f"In each cell: {shown}."] * bool(by)
    return f"{' '.join(about)}\n\n{table(ids.split('; '), entries)}"


def paths(words: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of results that a block shows."""
    kind, _, names = words.partition("|")[0].strip().partition(" ")
    patterns = [f"sweep_{name}" + "_*" * (kind != "curves") for name in names.split()] or [f"{kind}_*"]
    return [path for pattern in patterns for path in sorted(folder.glob(f"{pattern}.json"))]


def of_sources(found: Iterable[Found]) -> str:
    """A line for each machine and its versions: the commands that ran there, each with its commits."""
    groups: dict[str, dict[str, dict[str, None]]] = {}
    for run in ({id(one.run): one.run for one in found}).values():
        command = re.sub(r"python -m | --(json=FILE|config\.data\.data_dir=DIR)", "", run["command"].replace("\n", "`, `"))
        name = run["results"][0]["case"].get("table", "")
        rows, columns = axes(name)
        if name and all(one["case"]["row"] in rows and one["case"]["column"] in (columns or [""]) for one in run["results"]):
            command = "launch.sweep " + name.replace("-", " --")  # which makes all of them today
        about = [one[:9] + one[40:] for one in (run["commit"] or "unknown").split(", ")]  # [40:] is a `+`
        about += [run["device"], f"warm-up {run['warm_up']}"] * (not run["warm_up"].startswith("none"))
        about += [round_time.in_words(run["ceilings"])] if "ceilings" in run else []
        about += [run["note"]] if "note" in run else []
        versions = ", ".join(f"{package} {run['versions'][package]}" for package in ("python", "jax"))
        groups.setdefault(f"{where(run)}, {versions}", {}).setdefault(command, {}).update(dict.fromkeys(about))
    texts = {name: (f"`{command}` ({', '.join(about)})" for command, about in own.items()) for name, own in groups.items()}
    return "\n".join(f"- {name}: {'; '.join(own)}" for name, own in texts.items())


def written(page: str, folder: pathlib.Path = harness.RESULTS) -> tuple[str, dict[str, bytes]]:
    """A page's text with its blocks made anew, and the figures in it by the names of their files."""
    pictures: dict[str, bytes] = {}
    blocks = [block["words"] for block in BLOCK.finditer(page)]
    if page.count("<!-- ") != 2 * len(blocks):
        raise ValueError("a line `<!-- WORDS -->` has no `<!-- end -->`")

    def made(block: re.Match[str]) -> str:
        head, *options = re.split(r" ?\| ?", block["words"])
        kind, _, names = head.partition(" ")
        if kind == "curves":
            picture = of_curves(folder, names, *options)
            pictures[f"{picture.name}.svg"] = picture.svg
            content = f"![{picture.title}: accuracy and pseudo-labels over the rounds](results/{picture.name}.svg)"
        elif kind == "sources":
            content = of_sources(load(dict.fromkeys(path for words in blocks for path in paths(words, folder)))[0])
        else:
            make: Callable[..., str] = of_sweep if kind == "sweep" else of_rounds if kind == "rounds" else of_command
            content = make(folder, names or kind, *options)
        return f"<!-- {block['words']} -->\n\n{content}\n\n<!-- end -->"

    return BLOCK.sub(made, page), pictures


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path in sorted(PAGES.glob("*.md")):
        text, drawn = written(path.read_text())
        path.write_text(text)
        for name, content in drawn.items():
            (harness.RESULTS / name).write_bytes(content)
