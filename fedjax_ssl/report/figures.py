"""Figures with matplotlib: SVG, PDF and PNG bytes that are the same for the same runs."""

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedjax_ssl.figure_text import FONT, MATH, drawable, has_math, is_drawable
from fedjax_ssl.options import plural

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colors for the color-blind, without the yellow, which is pale on white."""
LINES, MARKERS = ("-", "--", "-.", ":"), "osD^vPX*"
HEAT = "Blues"
"""One hue, from light to dark, so that no color has to be told from another."""
WIDTH = 4.8
ROUND = (1, 2, 2.5, 5, 10)  # multiples of which ticks are
FORMATS = ("svg", "png", "pdf")
"""The forms of each figure; in PDF the font is embedded, as publishers ask for."""
STYLE: dict[Any, Any] = {
    "font.family": FONT, "font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9, "axes.edgecolor": "#888888",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.7,
    "axes.axisbelow": True, "figure.facecolor": "white", "svg.fonttype": "path", "pdf.fonttype": 42, "lines.linewidth": 1.7,
    "lines.markersize": 4.5, "text.parse_math": False,
}  # fmt: skip


class Picture(NamedTuple):
    """A figure of the page; `name` is that of its files, `alt` says in words what it shows."""

    name: str
    title: str
    alt: str
    svg: bytes
    png: bytes
    pdf: bytes
    caption: str = ""

    @property
    def source(self) -> str:
        """The SVG as a data URI: nothing is loaded from elsewhere."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode()


class Curve(NamedTuple):
    """A line with a band: the mean of y at x, and what the band has to either side (NaN: one run)."""

    label: str
    x: Float[np.ndarray, " P"]
    mean: Float[np.ndarray, " P"]
    band: Float[np.ndarray, " P"]
    style: int


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, without any state outside of it."""
    return Figure(figsize=(width, height), layout="constrained")


def picture(figure: Figure, name: str, title: str, alt: str, caption: str = "") -> Picture:
    """The figure's files; ids in the SVG come from `name`, and no file has a date."""
    streams = {kind: io.BytesIO() for kind in FORMATS}
    for text in figure.findobj(Text):
        text.set_text(drawable(text.get_text()))
        text.set_parse_math(has_math(text.get_text()))
        if hasattr(text, "set_fontfeatures"):  # matplotlib >= 3.11 shapes text
            text.set_fontfeatures(["-liga"])
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(streams["svg"], format="svg", metadata={"Date": None})
        figure.savefig(streams["png"], format="png", dpi=200, metadata={"Software": None})
        figure.savefig(streams["pdf"], format="pdf", metadata={"CreationDate": None})
    svg, png, pdf = (streams[kind].getvalue() for kind in FORMATS)
    return Picture(name, title, alt, svg, png, pdf, caption)


def curves(
    name: str, title: str, parts: Mapping[str, Sequence[Curve]], label: str, level: tuple[str, float] | None = None,
    ticks: Sequence[float] = (), width: float = 0,
) -> Picture:  # fmt: skip
    """Curves of a metric, or of several side by side, with one legend; `parts` has their names, the labels of the y-axes.

    `label` is that of the x-axes; `level` (label, y) is a dotted line; `ticks` are those of x, where they are few; `width` is
    that of the figure in inches (0: the usual one).
    """
    columns = 2 if len(parts) == 4 else min(3, len(parts))
    rows = math.ceil(len(parts) / columns)
    usual, height = (WIDTH, 3.0) if len(parts) == 1 else (3.2 * columns, 2.6 * rows)
    height *= min(1.0, width / usual) ** 0.5 if width else 1.0
    width = width or usual
    with rc_context(STYLE):
        figure = blank(width, height)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (vertical, lines) in zip(grid, parts.items(), strict=False):
            for line in lines:
                _draw(axes, line)
            if level is not None:
                axes.axhline(level[1], color="#555555", linestyle=(0, (1, 2)), linewidth=1.2, label=level[0])
            axes.set(xlabel=label, ylabel=vertical)
            _whole_ticks(axes, [line.x for line in lines])
            if ticks:
                is_log = min(ticks) > 0 and max(ticks) > 20 * min(ticks)
                axes.set_xscale("log" if is_log else "linear")
                axes.set_xticks(ticks, _labels(ticks, np.log(ticks) if is_log else np.asarray(ticks)))
                axes.minorticks_off()
        for axes in grid[len(parts) :]:
            axes.set_axis_off()
        _add_legend(figure, max(grid, key=lambda axes: len(axes.lines)))
    return picture(figure, name, title, f"{title}. {_ends(parts)}.")


def _labels(ticks: Sequence[float], places: Float[np.ndarray, " n"]) -> list[str]:
    """The labels of ticks in rising order; none where it would touch the one before."""
    found, last = [], -math.inf
    for tick, place in zip(ticks, places, strict=True):
        is_apart = place - last >= 0.08 * np.ptp(places)
        found.append(f"{tick:g}" if is_apart else "")
        last = place if is_apart else last
    return found


def _draw(axes: Axes, line: Curve) -> None:
    """Draws a curve with its own color, line and markers, and its band."""
    color, dashes, marker = (choices[line.style % len(choices)] for choices in (COLORS, LINES, MARKERS))
    every = max(1, math.ceil(len(line.x) / 10))
    axes.plot(line.x, line.mean, color=color, linestyle=dashes, marker=marker, markevery=every, label=line.label)
    axes.fill_between(line.x, line.mean - line.band, line.mean + line.band, color=color, alpha=0.18, linewidth=0)


def _whole_ticks(axes: Axes, xs: Sequence[Float[np.ndarray, " P"]]) -> None:
    """Puts no ticks between whole numbers where all x are whole, as rounds are."""
    whole = all((x == np.round(x)).all() for x in xs)
    axes.xaxis.set_major_locator(
        MaxNLocator(6, integer=whole, min_n_ticks=1, steps=ROUND)
    )  # 1, as a run of one round has one whole number
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Puts the legend below the axes, long labels in several lines, and makes the figure higher for it: it covers no curve."""
    handles, labels = axes.get_legend_handles_labels()
    width, character, sample = figure.get_figwidth(), 0.08, 0.75  # inches: the figure, a character, a curve's sample
    labels = [MATH.sub(lambda formula: formula[0].replace(" ", "{}"), drawable(label)) for label in labels]  # is not broken
    labels = [textwrap.fill(label, int((width - sample) / character)) for label in labels]
    columns = max(1, min(3, len(labels), int(width / (character * max(map(len, labels)) + sample))))
    lines = max(label.count("\n") + 1 for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.2 * lines * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.2)


def _ends(parts: Mapping[str, Sequence[Curve]]) -> str:
    """Where each curve begins and ends, in words."""
    return ". ".join(
        f"{name}: " + "; ".join(f"{line.label} from {line.mean[0]:.3g} to {line.mean[-1]:.3g}" for line in lines)
        for name, lines in parts.items()
    )


def heat(
    name: str, title: str, values: Float[np.ndarray, "A B"], labels: tuple[str, str, str], *, numbers: bool = False,
    caption: str = "", columns: Int[np.ndarray, " B"] | None = None, heads: Sequence[str] = (),
) -> Picture:  # fmt: skip
    """A heat map, NaN in gray; `labels` are those of rows, columns and values; `numbers` writes them into the cells.

    `columns` are numbers of the columns where these are not 0, 1, ...: the columns are drawn in equal width. `heads` are the
    rows' names; a name that the font cannot show is replaced by the row's number, and the caption refers to the table for it.
    """
    rows, width = values.shape
    with rc_context({**STYLE, "axes.grid": False}):
        figure = blank(WIDTH, float(np.clip(0.28 * rows + 1.0, 2.6, 7.0)))
        axes = figure.subplots()
        axes.set_facecolor("#cccccc")
        image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", cmap=HEAT)
        axes.set(ylabel=labels[0], xlabel=labels[1])
        for axis in (axes.yaxis, axes.xaxis):
            axis.set_major_locator(MaxNLocator(10, integer=True))
        if heads:
            shown_heads = [head if is_drawable(head) else str(row) for row, head in enumerate(heads)]
            axes.set_yticks(range(rows), [head if len(head) <= 20 else f"{head[:19]}…" for head in shown_heads])
            if list(heads) != shown_heads:
                caption = f"{caption}{'; ' * bool(caption)}the table has the names that are numbers here"
        if columns is not None:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: str(columns[int(x)]) if 0 <= x < width else ""))
        if numbers:
            for (i, j), value in np.ndenumerate(values):
                if np.isfinite(value) and value >= 0.5:
                    red, green, blue, _ = colormaps[HEAT](image.norm(value))
                    dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                    axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=8, color="white" if dark else "black")
        bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, label=labels[2])
        bar.outline.set_visible(False)
    known = values[np.isfinite(values)]
    shown = f"{labels[2]} from {known.min():.3g} to {known.max():.3g}" if len(known) else "no values"
    return picture(figure, name, title, f"{title}: {rows} by {width} cells ({labels[0]} by {labels[1]}), {shown}.", caption)


def traces(
    name: str,
    title: str,
    rounds: Int[np.ndarray, " n"],
    ids: Int[np.ndarray, " n"],
    values: Float[np.ndarray, " n"],
    label: str,
) -> Picture:
    """Each client's values as a thin line over the rounds that it took part in, and the median of each round as a thick one."""
    times = np.unique(rounds)
    medians = np.array([median(values[rounds == time]) for time in times])
    with rc_context(STYLE):
        figure = blank(WIDTH, 2.9)
        axes = figure.subplots()
        points = np.column_stack([rounds, values])
        lines = LineCollection([points[ids == one] for one in np.unique(ids)], colors=COLORS[5], linewidths=0.8, alpha=0.8)
        axes.add_collection(lines)
        axes.scatter(rounds, values, s=7, color=COLORS[5], linewidths=0, label="a client")
        axes.plot(times, medians, color=COLORS[0], marker="o", markersize=3.5, label="median of the round")
        axes.set(xlabel="round", ylabel=label)
        _whole_ticks(axes, [times.astype(float)])
        _add_legend(figure, axes)
    whose = f"{plural(len(np.unique(ids)), 'client')} in {plural(len(times), 'recorded round')}"
    alt = f"{title}: {label} of {whose}; its median goes from "
    return picture(figure, name, title, f"{alt}{medians[0]:.3g} to {medians[-1]:.3g}.")


def median(values: Float[np.ndarray, " n"]) -> float:
    """The median of the finite values; NaN: there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def histogram(name: str, title: str, samples: Mapping[str, Float[np.ndarray, " n"]], labels: tuple[str, str]) -> Picture:
    """Outlines of histograms of percentages in bins of 5, one for each name in `samples`."""
    with rc_context(STYLE):
        figure = blank(WIDTH, 2.8)
        axes = figure.subplots()
        for index, (label, values) in enumerate(samples.items()):
            line, color = LINES[index % len(LINES)], COLORS[index % len(COLORS)]
            heights, edges = np.histogram(values, bins=np.arange(0, 101, 5))
            axes.stairs(heights, edges, color=color, linestyle=line, linewidth=1.7, label=label)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        low = min(values.min() for values in samples.values())
        axes.set_xlim(max(0, 5 * math.floor(low / 5) - 5), 100)
        _add_legend(figure, axes)
    parts = [f"{label}: lowest {values.min():.1f}, median {np.median(values):.1f}" for label, values in samples.items()]
    return picture(figure, name, title, f"{title}. {'; '.join(parts)}.")
