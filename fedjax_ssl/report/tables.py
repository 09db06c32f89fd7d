"""Tables as text, CSV, LaTeX (booktabs) and HTML."""

import html
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_ssl import csv_files
from fedjax_ssl.figure_text import MATH, has_math
from fedjax_ssl.options import one_line
from fedjax_ssl.report import statistics

DASH = "\N{EN DASH}"


BEST, NEAR = "*", "†"


class Spread(NamedTuple):
    """A mean and a sample standard deviation over runs, shown with so many decimals.

    `missing` runs have no value; where there are any, the cell says how many have one. With `is_interval` half of the mean's
    confidence interval is shown in place of the deviation.
    """

    mean: float
    sd: float
    digits: int = 1
    number: int = 1
    missing: int = 0
    is_interval: bool = False
    mark: str = ""  # BEST or NEAR, in a column whose cells are compared
    beside: str = ""  # what stands behind it, such as the paper's number

    @property
    def half(self) -> float:
        """What is shown behind ±; NaN: nothing."""
        return float(statistics.half_interval(np.array(self.sd), self.number)) if self.is_interval else self.sd

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return DASH
        text = f"{self.mean:,.{self.digits}f}"
        text += "" if math.isnan(self.half) else f" ± {self.half:,.{self.digits}f}"
        text += f" ({self.number} of {self.number + self.missing})" if self.missing else ""
        return text + self.beside + f" {NEAR}" * (self.mark == NEAR)


def spread(values: Sequence[float], digits: int | None = None) -> Spread:
    """The mean and standard deviation of values; NaN marks a missing one.

    Without `digits` the mean has three significant digits, and no decimals from 100 on.
    """
    there = np.array([value for value in values if not math.isnan(value)])
    mean, sd = statistics.mean_sd(there) if len(there) else (math.nan, math.nan)
    if digits is None:
        size = abs(float(mean))
        digits = 1 if size == 0 else 0 if math.isnan(size) else min(6, max(0, 2 - math.floor(math.log10(size))))
    return Spread(float(mean), float(sd), digits, len(there), len(values) - len(there))


def plus_minus(is_interval: bool) -> str:
    """What stands behind ±, as a sentence."""
    if is_interval:
        return "Behind ± is half the width of the 95 % confidence interval of the mean over runs, by Student's t."
    return "Behind ± is the sample standard deviation over runs."


def of_classes(number: int, names: Sequence[str]) -> list[str]:
    """The heads of rows of classes: `0 = cat`, or `0` where they have no names."""
    return (
        [f"{c} = {one_line(name)}" for c, name in enumerate(names)] if len(names) == number else list(map(str, range(number)))
    )


class Link(NamedTuple):
    """A text that links to a part of the page."""

    text: str
    target: str

    def __str__(self) -> str:
        return self.text


Cell = str | int | Spread | Link


class Table(NamedTuple):
    """A table; `name` is that of its files."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def is_number(self, column: int) -> bool:
        """Whether a column has numbers, which are aligned to the right."""
        cells = [row[column] for row in self.rows]
        return any(isinstance(cell, int | Spread) for cell in cells) and not any(isinstance(cell, Link) for cell in cells)

    @property
    def below(self) -> str:
        """The note, and what the signs in its cells are."""
        return " ".join(filter(None, [self.note, self.signs(f"Bold ({BEST} in text)")]))

    def signs(self, best: str) -> str:
        """What ±, (2 of 3) and marks in cells are, as far as a cell has them; `best` says how the best ones are marked."""
        spreads = [cell for row in self.rows for cell in row if isinstance(cell, Spread) and not math.isnan(cell.mean)]
        wide, lacking = [one for one in spreads if not math.isnan(one.half)], [one for one in spreads if one.missing]
        marks = {one.mark for one in spreads}
        parts = [plus_minus(wide[0].is_interval)] if wide else []
        if lacking:
            number = f"{lacking[0].number} of {lacking[0].number + lacking[0].missing}"
            parts.append(f"({number}): the mean of those runs that have a value.")
        if BEST in marks:
            parts.append(f"{best}: the largest mean of its column{f'; {NEAR}: a mean within its ±' * (NEAR in marks)}.")
        return " ".join(parts)

    def marked(self, columns: Sequence[int]) -> "Table":
        """The table whose best means in some columns, and those within the best one's ±, are marked; few rows say nothing."""
        rows = [list(row) for row in self.rows]
        for column in columns:
            cells = [row[column] for row in rows]
            known = [cell for cell in cells if isinstance(cell, Spread) and not math.isnan(cell.mean)]
            if len(known) < 2:
                continue
            best = max(known, key=lambda cell: cell.mean)
            least = best.mean - (0.0 if math.isnan(best.half) else best.half)
            for row, cell in zip(rows, cells, strict=True):
                if isinstance(cell, Spread) and not math.isnan(cell.mean):
                    is_best = cell.mean == best.mean
                    row[column] = cell._replace(mark=BEST if is_best else NEAR if cell.mean >= least else "")
        return self._replace(rows=tuple(map(tuple, rows)))

    def with_intervals(self) -> "Table":
        """The table with confidence intervals in place of standard deviations."""
        rows = (tuple(c._replace(is_interval=True) if isinstance(c, Spread) else c for c in row) for row in self.rows)
        return self._replace(rows=tuple(rows))

    def without_empty(self) -> "Table":
        """The table without columns in which no cell has anything."""
        filled = [i for i in range(len(self.header)) if any(str(row[i]) != DASH for row in self.rows)]
        rows = tuple(tuple(row[i] for i in filled) for row in self.rows)
        return self._replace(header=tuple(self.header[i] for i in filled), rows=rows)


def text(table: Table) -> str:
    """Aligned columns."""
    rows = (tuple(_plain(cell) + f" {BEST}" * _is_best(cell) for cell in row) for row in table.rows)
    lines = aligned([table.header, *rows], table.is_number)
    return "\n".join([table.title, "", *lines, *([table.below] if table.below else [])]) + "\n"


def aligned(rows: Sequence[Sequence[str]], is_number: Callable[[int], bool] = lambda column: False) -> list[str]:
    """Rows as lines with columns of one width, those with numbers to the right."""
    columns = []
    for i, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if is_number(i) else cell.ljust(width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def comma_separated(table: Table) -> str:
    """CSV whose spreads are three columns: mean, sd, and the number of runs with a value, as far as they vary or are known."""
    wide = [any(isinstance(row[i], Spread) for row in table.rows) for i in range(len(table.header))]
    parts = [("", ": sd", ": runs") if w else ("",) for w in wide]
    rows = [[f"{name}{part}" for name, own in zip(table.header, parts, strict=True) for part in own]]
    for row in table.rows:
        cells: list[str] = []
        for cell, w in zip(row, wide, strict=True):
            if isinstance(cell, Spread):
                cells += ["" if math.isnan(value) else f"{value:.6g}" for value in (cell.mean, cell.sd)] + [str(cell.number)]
            else:
                cells += [str(cell), *([""] * (2 * w))]
        rows.append(cells)
    return csv_files.written(rows)


def latex(table: Table) -> str:
    r"""A `table` environment with booktabs' rules; the document needs \usepackage{booktabs}."""
    columns = "".join("r" if table.is_number(i) else "l" for i in range(len(table.header)))
    said = table.signs("Bold")
    caption = f"{table.title}. {said}" if said else table.title
    lines = [
        r"% \usepackage{booktabs}", r"\begin{table}", r"\centering", rf"\caption{{{escaped(caption)}}}",
        rf"\label{{tab:{table.name}}}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule",
        " & ".join(map(escaped, table.header)) + r" \\", r"\midrule",
    ]  # fmt: skip
    lines += [" & ".join(map(_latex_cell, row)) + r" \\" for row in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _latex_cell(cell: Cell) -> str:
    shown = escaped(_plain(cell))
    return rf"\textbf{{{shown}}}".replace(r"$\pm$", r"$\mathbf{\pm}$") if _is_best(cell) else shown


def _is_best(cell: Cell) -> bool:
    return isinstance(cell, Spread) and cell.mark == BEST


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", DASH: "--", "<": r"$<$", ">": r"$>$", "≥": r"$\geq$",
    "²": r"$^2$", NEAR: r"$^\dagger$",
}  # fmt: skip


def escaped(words: str) -> str:
    """A text for LaTeX, in which mathematics stays."""
    special = "|".join(map(re.escape, _LATEX))
    parts = MATH.split(words) if has_math(words) else [words]
    return "".join(part if i % 2 else re.sub(special, lambda match: _LATEX[match[0]], part) for i, part in enumerate(parts))


def as_html(table: Table) -> str:
    """A table that scrolls inside its own box; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col"{_class(table, i)}>{html.escape(name)}</th>' for i, name in enumerate(table.header))
    body = []
    for row in table.rows:
        cells = [
            _html_cell(cell, f'th scope="row"{_class(table, 0)}' if i == 0 else f"td{_class(table, i)}")
            for i, cell in enumerate(row)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    title = html.escape(table.title)
    note = f'<p class="note">{html.escape(table.below)}</p>' if table.below else ""
    return (
        f'<figure class="table"><figcaption id="table-{table.name}">{title}</figcaption>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table aria-labelledby="table-{table.name}">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table></div>{note}</figure>"
    )


def _class(table: Table, column: int) -> str:
    return ' class="number"' if table.is_number(column) else ""


def _html_cell(cell: Cell, tag: str) -> str:
    shown = html.escape(_plain(cell))
    shown = f"<strong>{shown}</strong>" if _is_best(cell) else shown
    if isinstance(cell, Link):
        shown = f'<a href="#{html.escape(cell.target)}">{shown}</a>'
    return f"<{tag}>{shown}</{tag.split()[0]}>"


def _plain(cell: Cell) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
