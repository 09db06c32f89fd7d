"""The best evaluation of a run so far, by its validation examples, and whether the run ends because none is better."""

import math
from collections.abc import Mapping
from typing import Any

from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.options import plural

ENDED_EARLY = "ended_early"
"""In the metrics row of a run that has ended early, beside others that go on, the key that says why."""
ROUND = "best/round"


def best(row: Mapping[str, Any], last: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The best round up to that of `row`, its value on the validation examples and its test accuracy; `last` is the row before.

    The first of several equal ones is the best, and a value that is no number is the worst. Empty before the first evaluation,
    and where nothing is kept.
    """
    found = {name: value for name, value in last.items() if name.startswith("best/")}
    name = settings.keep_best
    if (
        name
        and f"eval/{name}" in row
        and (not found or _score(name, row[f"eval/{name}"]) > _score(name, found[f"best/{name}"]))
    ):
        return {ROUND: row["round"], f"best/{name}": row[f"eval/{name}"], "best/accuracy": row["eval/accuracy"]}
    return found


def _score(name: str, value: float | None) -> float:
    if value is None or math.isnan(value):  # the log has None for NaN
        return -math.inf
    return -value if name == "val_loss" else value


def ending(row: Mapping[str, Any], settings: Settings) -> str:
    """Why a run ends with `row`, before its last round, in words; empty: it goes on."""
    if not settings.patience or ROUND not in row or row["round"] >= settings.rounds:
        return ""
    without = row["round"] // settings.eval_every - row[ROUND] // settings.eval_every
    if without < settings.patience:
        return ""
    best = f"{settings.keep_best} {row[f'best/{settings.keep_best}']:.4g} of round {row[ROUND]}"
    return f"round {row['round']}: {plural(without, 'evaluation')} in a row no better than {best}"
