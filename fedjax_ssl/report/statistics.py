"""The numbers of a report: pure functions on arrays, NaN where there is no value."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fedjax_ssl.options import plural

Columns = Mapping[str, Float[np.ndarray, " T"]]
AXES = {
    "rounds": "round", "bytes": "MB sent", "uploads": "MB uploaded", "seconds": "seconds", "passes": "thousand passes",
    "simulated": "simulated seconds",
}  # fmt: skip
"""What curves are drawn against, and the axis' label."""
LEVEL = 0.95  # of confidence intervals
SIGNED = 6  # pairs that Wilcoxon's signed-rank test needs: with fewer its p is never below .05


def mean_sd(values: Float[np.ndarray, " R *T"]) -> tuple[Float[np.ndarray, "*T"], Float[np.ndarray, "*T"]]:
    """Mean and sample standard deviation (divisor R - 1; NaN where R = 1) over the first axis."""
    mean = values.mean(0)
    return mean, (values.std(0, ddof=1) if len(values) > 1 else np.full_like(mean, np.nan))


def half_interval(sd: Float[np.ndarray, "*T"], number: int) -> Float[np.ndarray, "*T"]:
    """Half of the 95 % confidence interval of a mean of `number` values, by Student's t; NaN for one value.

    t_{.975, n-1} sd / sqrt(n), with the sample standard deviation `sd`.
    """
    from scipy.special import stdtrit  # `launch.report --help` does not wait for it

    return sd * stdtrit(number - 1, (1 + LEVEL) / 2) / math.sqrt(number)


class Comparison(NamedTuple):
    """The mean difference of pairs with half of its 95 % confidence interval, and the p of two-sided tests that there is none.

    A p is NaN where all differences are equal, and Wilcoxon's below SIGNED pairs.
    """

    pairs: int
    difference: float
    half: float
    student: float  # p of the paired t test
    wilcoxon: float  # p of Wilcoxon's signed-rank test


def compared(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"]) -> Comparison:
    """Compares values of pairs, at least two."""
    from scipy import stats

    differences = np.round(first - second, 9)  # so that rounding parts none that are equal
    mean, sd = mean_sd(differences)
    student = stats.ttest_1samp(differences, 0).pvalue if np.ptp(differences) > 0 else math.nan
    signed = stats.wilcoxon(differences).pvalue if len(differences) >= SIGNED and np.ptp(differences) > 0 else math.nan
    return Comparison(len(differences), float(mean), float(half_interval(sd, len(differences))), float(student), float(signed))


def last(values: Float[np.ndarray, " T"], number: int = 1) -> float:
    """The mean of the last `number` values that are not NaN (of all, where there are fewer); NaN: there is none."""
    there = values[~np.isnan(values)][-number:]
    return float(there.mean()) if len(there) else float("nan")


def instability(columns: Columns) -> str:
    """Why a run with all its rounds should be looked at before its numbers are trusted; empty: there is no reason.

    It left clients out for NaN or infinity, or it ended with less than half of its best accuracy.
    """
    rounds = columns["round"]
    accuracies, broken = (columns.get(key, np.full_like(rounds, np.nan)) for key in ("eval/accuracy", "client/non_finite"))
    if len(found := rounds[broken > 0]):
        return f"round {found[0]:.0f}: clients returned NaN or infinity and were left out, in {plural(len(found), 'round')}"
    if np.isnan(accuracies).all():
        return ""
    best, end = int(np.nanargmax(accuracies)), last(accuracies)
    if end >= accuracies[best] / 2:
        return ""
    return f"accuracy fell from {accuracies[best]:.1%} in round {rounds[best]:.0f} to {end:.1%}"


def first_reaching(x: Float[np.ndarray, " T"], y: Float[np.ndarray, " T"], target: float) -> float:
    """X at the first y >= target, such as the rounds to a target accuracy; NaN where none is."""
    reached = np.flatnonzero(y >= target)
    return float(x[reached[0]]) if len(reached) else float("nan")


def axis(columns: Columns, kind: str) -> Float[np.ndarray, " T"]:
    """What a run has spent after each row, by a name in AXES: rounds, bytes, uploads, seconds of rounds, or passes.

    Bytes are in units of 10^6, passes of 10^3. Seconds are the sum of `time/round_s`, simulated ones of `sim/seconds`, NaN from
    the first missing round on.
    """
    rounds = columns["round"]
    if kind == "rounds":
        return rounds
    none = np.full_like(rounds, np.nan)
    if kind in ("seconds", "simulated"):
        known = rounds == np.arange(1, len(rounds) + 1)
        return np.cumsum(np.where(known, columns.get("time/round_s" if kind == "seconds" else "sim/seconds", none), np.nan))
    summed, unit = {
        "bytes": (("comm/bytes_up", "comm/bytes_down"), 1e6),
        "uploads": (("comm/bytes_up",), 1e6),
        "passes": (("cost/forward_passes", "cost/backward_passes"), 1e3),
    }[kind]
    return np.sum([columns.get(name, none) for name in summed], axis=0) / unit


def common(
    xs: list[Float[np.ndarray, " T"]], ys: list[Float[np.ndarray, " T"]], rounds: list[Float[np.ndarray, " T"]]
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, "R P"]]:
    """(mean x, all runs' y) in the rounds in which every run has a y and an x."""
    valid = [set(r[~np.isnan(x) & ~np.isnan(y)]) for x, y, r in zip(xs, ys, rounds, strict=True)]
    shared = sorted(set.intersection(*valid)) if valid else []
    rows = [np.searchsorted(r, shared) for r in rounds]
    picked_x, picked_y = (np.array([v[i] for v, i in zip(values, rows, strict=True)], float) for values in (xs, ys))
    return picked_x.reshape(len(rows), len(shared)).mean(0), picked_y.reshape(len(rows), len(shared))
