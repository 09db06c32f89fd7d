"""The tables of a report: results, costs, runs, differing settings, classes and clients."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from fedjax_ssl.experiment import best
from fedjax_ssl.experiment.evaluation import SCORES, worst
from fedjax_ssl.options import plural
from fedjax_ssl.report import statistics
from fedjax_ssl.report.extras import Evaluation
from fedjax_ssl.report.groups import (
    METHOD,
    SEED,
    Group,
    Grouped,
    differing,
    differing_within_methods,
    text_of,
)
from fedjax_ssl.report.tables import DASH, Cell, Link, Table, of_classes, spread
from fedjax_ssl.runs import changes
from fedjax_ssl.runs.reading import Run

ACCURACY = "eval/accuracy"
MOST = 28  # comparisons of groups in pairs; all of eight groups
Evaluations = dict[str, list[Evaluation]]
"""A group's label -> the evaluations of its runs."""


def accuracy(run: Run, number: int = 1) -> float:
    """A run's test accuracy in percent: the last, or the mean of the last `number` evaluations."""
    rounds = run.columns["round"]
    is_usual = (rounds % run.config["eval_every"] == 0) | (rounds == run.rounds_done)  # not the end of a run that went on
    return 100 * statistics.last(np.where(is_usual, run.column(ACCURACY), np.nan), number)


def default_target(groups: Sequence[Group]) -> float:
    """90 % of the best group's mean last accuracy, as a fraction rounded to three digits; NaN: nothing was evaluated."""
    means = [spread([accuracy(run) for run in group.used]).mean for group in groups]
    known = [mean for mean in means if not math.isnan(mean)]
    return round(0.9 * max(known) / 100, 3) if known else math.nan


def to_target(run: Run, kind: str, target: float) -> float:
    """What a run has spent when its accuracy first reaches the target; NaN: it does not."""
    return statistics.first_reaching(statistics.axis(run.columns, kind), run.column(ACCURACY), target)


def link(group: Group) -> Link:
    """A group's label, which leads to its command."""
    return Link(group.label, f"command-{group.slug}")


def results(grouped: Grouped, target: float) -> Table:
    """Each group's accuracies, and what it takes to the target."""
    shown = f"{100 * target:.1f} %"
    rows: list[tuple[Cell, ...]] = []
    for group in grouped.groups:
        seeds = str(len(group.used)) if len(group.used) == len(group.runs) else f"{len(group.used)} of {len(group.runs)}"
        seeds += " unfinished" * (bool(group.used) and not group.is_finished)
        reached = [spread([to_target(run, kind, target) for run in group.used]) for kind in ("rounds", "bytes", "seconds")]
        means = [spread([accuracy(run, number) for run in group.used], 1) for number in (1, 5)]
        rows.append((link(group), *means, seeds, *(one._replace(digits=min(one.digits, 1)) for one in reached)))
    header = (grouped.heading, "last, %", "last 5, %", "runs", f"rounds to {shown}", f"MB to {shown}", f"s to {shown}")
    note = (
        "Test accuracy of the last evaluation and mean of the last five, means over runs. To the "
        f"target: the first evaluation with {shown} or more; MB (10^6 bytes) up and down of all clients; seconds of rounds, "
        "those of all runs that share a program, without compilation and evaluation. A group's name leads to its command."
    )
    return Table("results", "Test accuracy, and costs to a target accuracy", header, tuple(rows), note)


def validated(grouped: Grouped) -> Table | None:
    """The round that validation chooses, and the test accuracy there; None: no run has one."""
    rows: list[tuple[Cell, ...]] = []
    for group in grouped.groups:
        having = [run for run in group.used if best.ROUND in run.columns]
        if not having:
            continue
        by = [run.config["keep_best"] for run in having]
        scale = [100 if name == "val_accuracy" else 1 for name in by]
        values = [one * statistics.last(run.column(f"best/{name}")) for run, name, one in zip(having, by, scale, strict=True)]
        rounds, tested = ([statistics.last(run.column(key)) for run in having] for key in (best.ROUND, "best/accuracy"))
        names = " and ".join(sorted({"accuracy, %" if name == "val_accuracy" else "loss" for name in by}))
        early = sum(best.ENDED_EARLY in run.summary for run in having)
        numbers = spread(rounds), names, spread(values), spread([100 * one for one in tested], 1)
        rows.append((link(group), *numbers, spread([accuracy(run) for run in having], 1), f"{early} of {len(having)}"))
    header = (grouped.heading, "round", "chosen by", "validation", "test, %", "last test, %", "ended early")
    note = (
        "The round with the best evaluation on the validation examples (`keep_best`), the first of equal ones; means over "
        "runs. No round is chosen by its test accuracy."
    )
    title = "The round that validation chooses, and its test accuracy"
    return Table("validation", title, header, tuple(rows), note) if rows else None


def scores(grouped: Grouped, found: Evaluations) -> Table | None:
    """Each group's other scores of the last evaluation, from the logs or, where they have none, from `evaluation.json`.

    None: there are none.
    """
    rows: list[tuple[Cell, ...]] = []
    for group in grouped.groups:
        logged = [[100 * statistics.last(run.column(f"eval/{one.key}")) for run in group.used] for one in SCORES.values()]
        saved = [[100 * each.scores[one.key] for each in found[group.label]] for one in SCORES.values()]
        pairs = zip(logged, saved, strict=True)
        rows.append((link(group), *(spread(own if np.isfinite(own).any() else other, 1) for own, other in pairs)))
    header = (grouped.heading, *(f"{one.name}, %" for one in SCORES.values()))
    note = (
        "Of the last evaluation, means over runs. Balanced accuracy, macro F1 and macro AUC (each class against all others) "
        "are means over classes; the calibration error (ECE) has 15 bins."
    )
    table = Table("scores", "Other scores on the test set", header, tuple(rows), note).without_empty()
    return table if len(table.header) > 1 else None


def comparisons(grouped: Grouped) -> Table | None:
    """Groups compared over runs of the same seed, data and split; None: no two groups have two such pairs of runs.

    If more than MOST comparisons were possible, each group is compared with the best one that shares runs with it alone.
    """
    groups = sorted(grouped.groups, key=lambda group: -np.nan_to_num(spread([accuracy(run) for run in group.used]).mean))
    each = [_by_pair(group) for group in groups]
    pairs = itertools.combinations(range(len(groups)), 2)
    shared = {(i, j): both for i, j in pairs if len(both := sorted(each[i].keys() & each[j].keys())) > 1}
    if is_limited := len(shared) > MOST:
        shared = {pair: shared[pair] for pair in {j: (i, j) for i, j in reversed(shared)}.values()}
    rows: list[tuple[Cell, ...]] = []
    for (i, j), both in sorted(shared.items()):
        found = statistics.compared(*(np.array([each[k][key] for key in both]) for k in (i, j)))
        low, high = found.difference - found.half, found.difference + found.half
        tests = (DASH if math.isnan(p) else f"{p:.2g}" for p in (found.student, found.wilcoxon))
        rows.append(
            (link(groups[i]), link(groups[j]), found.pairs, f"{found.difference:+.2f}", f"[{low:.2f}, {high:.2f}]", *tests)
        )
    header = ("first", "second", "pairs", "first - second", "95 % interval", "p, paired t test", "p, Wilcoxon")
    several = f", and not corrected for the number of comparisons, {len(rows)}" if len(rows) > 1 else ""
    limited = "Each group is compared with the best one that shares such runs with it alone. " if is_limited else ""
    note = (
        f"A pair is two runs with the same seed, the same split of the same data and as many rounds. {limited}The 95 % "
        "confidence interval of the mean difference is by Student's t. p is that of a two-sided test that there is no "
        f"difference{several}. With few pairs the interval is wide, and only large differences are found. The t test takes "
        f"differences as normally distributed; Wilcoxon's signed-rank test needs {statistics.SIGNED} pairs. Seeds change the "
        "split, the initial weights and the order of the examples, but not the test set."
    )
    title = "Differences of the last test accuracies, in percentage points, over pairs of runs"
    return Table("comparisons", title, header, tuple(rows), note).without_empty() if rows else None


def _by_pair(group: Group) -> dict[tuple[int, str, int], float]:
    """The accuracies of a group's runs by what both runs of a pair have; without runs that do not differ in it."""
    # A run that ended early, by its own rule, has its result of as many rounds as it was to have.
    keys = [(run.config[SEED], run.data, run.config["rounds"] if run.is_finished else run.rounds_done) for run in group.used]
    found = {key: accuracy(run) for key, run in zip(keys, group.used, strict=True) if run.data and keys.count(key) == 1}
    return {key: value for key, value in found.items() if not math.isnan(value)}


def costs(grouped: Grouped) -> Table:
    """Each group's totals at its last round."""
    totals_of = {"comm/bytes_up": 1e6, "comm/bytes_down": 1e6, "cost/forward_passes": 1e3, "cost/backward_passes": 1e3}
    rows: list[tuple[Cell, ...]] = []
    for group in grouped.groups:
        totals = [spread([statistics.last(run.column(key)) / unit for run in group.used]) for key, unit in totals_of.items()]
        seconds = spread([statistics.last(run.column("time/round_s"), len(run.columns["round"])) for run in group.used])
        sizes = sorted({run.summary["num_params"] for run in group.used if type(run.summary.get("num_params")) is int})
        size: Cell = sizes[0] if len(sizes) == 1 else ", ".join(f"{one:,}" for one in sizes) or DASH
        rounds = sorted({run.rounds_done for run in group.used})
        rows.append((link(group), ", ".join(map(str, rounds)) or DASH, *totals, seconds, size))
    header = (grouped.heading, "rounds", "MB up", "MB down", "10^3 forward", "10^3 backward", "s a round", "parameters")
    note = (
        "Bytes and passes (examples through networks) are totals of all clients and rounds. Runs of one program, such as "
        "several seeds of one command, share its seconds."
    )
    return Table("costs", "Costs", header, tuple(rows), note)


def of_runs(grouped: Grouped, unreadable: Sequence[str]) -> Table:
    """Every run that was found."""
    rows: list[tuple[Cell, ...]] = []
    for group in grouped.groups:
        for run in group.runs:
            last = spread([accuracy(run)], 1)
            used = "yes" if group.uses(run) else "no"
            rows.append((run.name, link(group), str(run.config[SEED]), run.state, last, used))
    rows += [(line.partition(":")[0], DASH, DASH, "unreadable", spread([]), "no") for line in unreadable]
    header = ("run", grouped.heading, "seed", "state", "last, %", "used")
    return Table("runs", "All runs", header, tuple(rows), "Used: whether the run counts in the means above.")


def differences(grouped: Grouped) -> Table | None:
    """The keys whose values differ, with each group's values; None: there is none.

    Keys of `method.*`, apart from the name, are listed only if they differ between runs of the same method.
    """
    runs = [run for group in grouped.groups for run in group.runs]
    keys = {key for key in differing(runs) if key == METHOD or not key.startswith("method.")} | differing_within_methods(runs)
    rows = []
    for key in sorted(keys - {SEED}):
        cells = []
        for group in grouped.groups:
            values = sorted({text_of(run.config[key]) for run in group.runs if key in run.config})
            cells.append(" | ".join(values) or DASH)
        rows.append((key, *cells))
    header = ("key", *(group.label for group in grouped.groups))
    return Table("differences", "What differs in the configs", header, tuple(rows)) if rows else None


def own_code(grouped: Grouped) -> Table | None:
    """The files of methods and networks of the user's own, of which runs keep copies; None: there are none."""
    found: dict[tuple[str, str], list[str]] = {}
    for group in grouped.groups:
        for run in group.runs:
            for line in changes.versions(run.path):
                found.setdefault((group.label, line), []).append(run.name)
    rows = tuple((label, line, plural(len(names), "run"), names[0]) for (label, line), names in found.items())
    note = "In each run's folder; `repository.diff` has the changes since the commit."
    return Table("own_code", "Files of your own", (grouped.heading, "files", "in", "first"), rows, note) if rows else None


def per_class(groups: Sequence[Group], found: Evaluations) -> Table | None:
    """Each class' accuracy, a column for each group; None: no evaluation has it."""
    having = {group.label: [one.per_class for one in found[group.label] if len(one.per_class)] for group in groups}
    having = {label: parts for label, parts in having.items() if parts}
    if not having:
        return None
    rows: list[tuple[Cell, ...]] = []
    number = max(len(part) for parts in having.values() for part in parts)
    for index, head in enumerate(of_classes(number, class_names([one for label in having for one in found[label]]))):
        each = [[100 * part[index] for part in parts if index < len(part)] for parts in having.values()]
        rows.append((head, *(spread(values, 1) for values in each)))
    return Table("per_class", "Test accuracy of each class, %", ("class", *having), tuple(rows))


def class_names(found: Sequence[Evaluation]) -> tuple[str, ...]:
    """The names of the classes that all have in common, or none."""
    names = {one.classes for one in found}
    return names.pop() if len(names) == 1 else ()


def of_clients(found: Evaluations) -> str:
    """Which of their own examples the clients are evaluated on."""
    return " or ".join(sorted({one.of_clients for own in found.values() for one in own if len(one.known)}))


def worst_clients(grouped: Grouped, found: Evaluations) -> Table | None:
    """Accuracies over clients, and the worst; None: no evaluation has them."""
    rows: list[tuple[Cell, ...]] = []
    for group in grouped.groups:
        having = [one for one in found[group.label] if len(one.known)]
        if not having:
            continue
        each = [np.sort(one.known) for one in having]
        numbers = [spread([100 * float(of(values)) for values in each], 1) for of in (np.mean, worst)]
        lowest = spread([100 * float(values[0]) for values in each], 1)
        own = [100 * float(np.mean(one.personalized)) for one in having if len(one.personalized)]
        first = having[0].per_client
        named = ", ".join(f"{k} ({100 * first[k]:.1f})" for k in np.argsort(first, kind="stable")[:5] if np.isfinite(first[k]))
        rows.append(
            (link(group), ", ".join(sorted({str(len(values)) for values in each})), *numbers, lowest, spread(own, 1), named)
        )
    of_first = "worst clients of the first run: id (%)"
    header = (grouped.heading, "clients", "mean, %", "worst 10 %, %", "lowest, %", "personalized mean, %", of_first)
    title = f"Accuracy over clients, of each one's own {of_clients(found)} examples"
    return Table("clients", title, header, tuple(rows)).without_empty() if rows else None
