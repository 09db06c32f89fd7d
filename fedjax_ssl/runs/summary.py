"""A run's rounds in few numbers: beside the progress bar, and as `summary.json`."""

import statistics
from collections.abc import Sequence

import jax

from fedjax_ssl.experiment.best import ENDED_EARLY, ending
from fedjax_ssl.experiment.experiment import TOTALS, Row
from fedjax_ssl.experiment.layout import Layout
from fedjax_ssl.experiment.settings import Settings
from fedjax_ssl.runs import provenance


def seen(rows: Sequence[Row]) -> Row:
    """What the progress bar shows of all runs: mean accuracy and loss, the accuracies' standard deviation, summed images/s."""
    if len(rows) == 1:
        return dict(rows[0])
    keys = ("eval/accuracy", "eval/loss", "perf/client_images_per_s")
    columns = {key: [row[key] for row in rows if key in row] for key in keys}
    shown = {key: statistics.fmean(values) for key, values in columns.items() if values}
    if len(columns["eval/accuracy"]) > 1:
        shown["eval/accuracy_spread"] = statistics.stdev(columns["eval/accuracy"])
    if values := columns["perf/client_images_per_s"]:
        shown["perf/client_images_per_s"] = sum(values)
    return shown


def summary(settings: Settings, rows: list[Row], layout: Layout, num_params: int) -> dict[str, object]:
    """The content of `summary.json`.

    What begins with `eval/` is the last round's, and `best/accuracy` is that of the round which is the best by validation;
    speed is all images over all rounds' seconds.
    """
    last = rows[-1]
    early = {ENDED_EARLY: why} if (why := ending(last, settings)) else {}
    # Not the last round of an earlier, shorter run.
    numbers = {row["round"] for row in rows if row["round"] % settings.eval_every == 0 or row is last}
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row and row["round"] in numbers][-5:]
    timed = [row for row in rows if "perf/client_images_per_s" in row]
    images = sum(row["perf/client_images_per_s"] * row["time/round_s"] for row in timed)
    return {
        "method": settings.method.name,
        "dataset": settings.data.name,
        "seed": settings.seed,
        "rounds": last["round"],
        **early,
        "eval/accuracy_last5": sum(accuracies) / len(accuracies),
        **{name: value for name, value in last.items() if name in TOTALS or name.startswith(("best/", "eval/"))},
        "perf/client_images_per_s": images / sum(row["time/round_s"] for row in timed) if timed else 0.0,
        "strategy": layout.strategy,
        "device": f"{layout.devices * layout.runs_at_once} x {jax.devices()[0].device_kind}",
        "jax_version": jax.__version__,
        "git_commit": provenance.git_commit(),
        "num_params": num_params,
    }
