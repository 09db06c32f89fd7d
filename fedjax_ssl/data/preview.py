"""A split to look at before anything is trained: as a table in text, and as a heat map."""

import os
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Int64

from fedjax_ssl.arrays import Stored
from fedjax_ssl.data.partition import class_counts
from fedjax_ssl.data.shares import Labels
from fedjax_ssl.data.split import Assignment
from fedjax_ssl.figure_text import FONT, drawable
from fedjax_ssl.options import plural

_BARS = " ▁▂▃▄▅▆▇█"


class Preview(NamedTuple):
    """How many labeled examples of each class the server has, and how many labeled and unlabeled ones each client has.

    `unknown` is how many of a client's unlabeled examples are of a class that nobody knows; they are not in `unlabeled`.
    `divergence` is the Jensen-Shannon divergence between the class distributions of a client's unlabeled and labeled examples
    (those of the server if no client has any); NaN if either is empty. `unassigned` and `notes` are as in `split.Assignment`.
    """

    server: Int64[np.ndarray, " C"]
    labeled: Int64[np.ndarray, "K C"]
    unlabeled: Int64[np.ndarray, "K C"]
    unknown: Int64[np.ndarray, " K"]
    divergence: Float[np.ndarray, " K"]
    unassigned: int
    notes: tuple[str, ...]


def preview(assignment: Assignment, labels: Labels, num_classes: int) -> Preview:
    """Counts the classes of a split of a training set with these labels; -1 is an unknown class."""
    owners = ([assignment.server], assignment.labeled, assignment.unlabeled)
    (server,), labeled, unlabeled = (class_counts(rows, labels, num_classes) for rows in owners)
    unknown = np.array([np.sum(labels[row] < 0) for row in assignment.unlabeled], np.int64)
    reference = labeled if labeled.any() else np.broadcast_to(server, labeled.shape)
    divergence = jensen_shannon(reference, unlabeled)
    return Preview(server, labeled, unlabeled, unknown, divergence, assignment.unassigned, assignment.notes)


def jensen_shannon(counts: Int[np.ndarray, "*K C"], others: Int[np.ndarray, "*K C"]) -> Float[Stored, "*K"]:
    """Jensen-Shannon divergence of class distributions, in bits: H((p+q)/2) - (H(p) + H(q))/2 (Lin 1991); NaN if empty."""
    sums = [np.sum(x, -1, keepdims=True) for x in (counts, others)]
    p, q = (np.divide(x, s, where=s > 0, out=np.full(x.shape, np.nan)) for x, s in zip((counts, others), sums, strict=True))
    divergence = _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2
    return np.clip(divergence, 0.0, 1.0)


def _entropy(p: Float[np.ndarray, "*K C"]) -> Float[Stored, "*K"]:
    """Entropy in bits over the last axis; 0 log 0 = 0, and NaN stays NaN."""
    return -np.sum(p * np.log2(np.where(p == 0, 1.0, p)), -1)


def table(seen: Preview) -> str:
    """The table of a split: one line per client, then a summary of all clients.

    Columns: labeled and unlabeled examples, the number of classes among them, their divergence, and, if the classes are few,
    one bar per class, relative to the client's largest class.
    """
    num_classes = seen.labeled.shape[1]
    bars = f"  {'labeled':<{num_classes + 2}}  unlabeled" if 5 <= num_classes <= 26 else ""
    header = f"client  labeled  unlabeled  classes  (unlab.)  divergence{bars}"
    lines = []
    clients = zip(seen.labeled, seen.unlabeled, seen.unknown, seen.divergence, strict=True)
    for k, (labeled, unlabeled, unknown, divergence) in enumerate(clients):
        if k % 25 == 0:  # every screen shows the header
            lines += ["", header] if k else [header]
        classes = [str(np.count_nonzero(counts)) if counts.any() else "-" for counts in (labeled, unlabeled)]
        number = "-" if np.isnan(divergence) else f"{divergence:.3f}"
        line = f"{k:>6}  {labeled.sum():>7,}  {unlabeled.sum() + unknown:>9,}  {classes[0]:>7}  {classes[1]:>9}  {number:>10}"
        lines.append(line + (f"  |{_bars(labeled)}|  |{_bars(unlabeled)}|" if num_classes <= 26 else ""))
    return "\n".join([*lines, "", *_summary(seen)])


def _bars(counts: Int64[np.ndarray, " C"]) -> str:
    """One character per class: blank for none, and at least the lowest bar for one example."""
    heights = np.ceil(counts / max(1, counts.max()) * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[height] for height in heights)


def _summary(seen: Preview) -> list[str]:
    """Aligned lines of minimum, median, mean, maximum and sum over all clients."""
    num_clients, num_classes = seen.labeled.shape
    rows = {
        "labeled": seen.labeled.sum(1),
        "unlabeled": seen.unlabeled.sum(1) + seen.unknown,
        "of unknown class": seen.unknown,
        "classes, labeled": np.count_nonzero(seen.labeled, axis=1),
        "classes, unlabeled": np.count_nonzero(seen.unlabeled, axis=1),
        "divergence": seen.divergence[~np.isnan(seen.divergence)],
    }
    who = f"of {plural(num_clients, 'client')}"
    lines = [f"{who:<20}{'min':>9}{'median':>9}{'mean':>9}{'max':>9}{'sum':>10}"]
    for name, values in rows.items():
        if values.any() or name == "divergence":
            total = f"{values.sum():>10,}" if name in ("labeled", "unlabeled", "of unknown class") else ""
            lines.append(f"{name:<20}" + "".join(f"{text:>9}" for text in _spread(values)) + total)
    lines.append("divergence: Jensen-Shannon, in bits, between labeled and unlabeled class distributions: 0 equal, 1 disjoint")
    if seen.server.any():
        labels = plural(seen.server.sum(), "labeled example")
        lines.append(f"server: {labels} of {np.count_nonzero(seen.server)} of {num_classes} classes")
    lines.append(f"unassigned: {plural(seen.unassigned, 'training example')} that nobody has")
    return [*lines, *(f"note: {note}" for note in seen.notes)]


def _spread(values: Float[np.ndarray, " K"] | Int[np.ndarray, " K"]) -> list[str]:
    if not len(values):
        return ["-"] * 4
    statistics = (values.min(), np.median(values), values.mean(), values.max())
    if values.dtype.kind == "f":
        return [f"{x:.3f}" for x in statistics]
    return [f"{statistics[0]:,}", f"{statistics[1]:,.10g}", f"{statistics[2]:,.1f}", f"{statistics[3]:,}"]


def heat_map(seen: Preview, path: str | os.PathLike[str], title: str) -> None:
    """Writes a PNG of clients x classes: labeled on the left (bars if only the server has labels), unlabeled on the right."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    num_clients, num_classes = seen.labeled.shape
    width, height = np.clip([0.3 * num_classes + 3.4, 0.1 * num_clients + 2.2], [4.8, 4.2], [8.0, 11.0])
    with rc_context({"font.family": FONT}):
        figure = Figure(figsize=(2 * width, height), dpi=110, layout="constrained")
        figure.suptitle(drawable(title), x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
        left, right = figure.subplots(1, 2)
        draw_labeled(left, seen)
        draw_unlabeled(right, seen)
        figure.savefig(path)


def draw_labeled(axes: Any, seen: Preview) -> None:
    """Draws labeled examples on matplotlib axes: clients x classes, or bars if only the server has labels."""
    if seen.server.any() and not seen.labeled.any():
        _frame(axes, f"labeled, at the server: {seen.server.sum():,}", "examples")
        axes.bar(np.arange(len(seen.server)), seen.server, color="#225ea8", width=0.8)
    else:
        at_server = f" (and {seen.server.sum():,} at the server)" if seen.server.any() else ""
        _panel(axes, seen.labeled, f"labeled, at the clients: {seen.labeled.sum():,}{at_server}")


def draw_unlabeled(axes: Any, seen: Preview) -> None:
    """Draws unlabeled examples on matplotlib axes: clients x classes."""
    more = f" (and {seen.unknown.sum():,} of unknown class)" if seen.unknown.any() else ""
    _panel(axes, seen.unlabeled, f"unlabeled, at the clients: {seen.unlabeled.sum():,}{more}")


def _frame(axes: Any, heading: str, vertical: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(heading, fontsize=11, loc="left")
    axes.set_xlabel("class")
    axes.set_ylabel(vertical)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(11, integer=True))
    for spine in axes.spines.values():
        spine.set_color("#cccccc")


def _panel(axes: Any, counts: Int64[np.ndarray, "K C"], heading: str) -> None:
    """Draws the counts with a color bar."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.ticker import LogLocator, NullLocator

    _frame(axes, heading, "client")
    colors = ListedColormap(colormaps["YlGnBu"](np.linspace(0.2, 1.0, 256)))  # without the palest, as white is none
    shown, norm = np.ma.masked_equal(counts, 0), LogNorm(1, max(2, counts.max()))
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colors, norm=norm)
    if counts.any():
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=40, format="{x:,.0f}")
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.set_label("examples (white: none)")
        bar.outline.set_visible(False)
    else:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="#666666")
    for axis, cells in ((axes.yaxis, len(counts)), (axes.xaxis, counts.shape[1])):
        if cells <= 40:  # lines between cells, where cells are large enough
            axis.set_ticks(np.arange(cells - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
