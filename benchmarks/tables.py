"""Runs a table of experiments, each over several seeds, and prints it: accuracy, pseudo-label accuracy, bytes, seconds.

    python -m benchmarks.tables fl2_ablation --workdir=runs/tables --json=benchmarks/results/fl2_ablation.json

Every run is `python -m launch.run` in a process and a folder of its own, so a table that was stopped goes on where it stopped.
What follows the table's arguments, such as --config.data.data_dir=DIR, goes to every run. A run that fails or diverges is named
with its error, and no mean is taken over it; where runs only diverge the exit status is 0, as that is a result. A run has
diverged, too, where clients that returned NaN or infinity were left out, or where it ends with less than half of its best
accuracy.

Programs are compiled once for all seeds, into a cache in the workdir; the seconds are those of whole runs, with compilation,
`--jobs` of them side by side. Pseudo-label accuracy is over the last five rounds: of a client's examples where a method labels
them once (fl2, semifl, fedsem, fedtrinet; fixmatch with labels at the server), else of those that its steps draw. Beside a
paper's accuracy stands the difference to it; beside FedSiam-D's bytes mu, by which a share of layers is saved, and the share of
the online network's bytes that was.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import operator
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks.provenance import provenance
from fedjax_ssl.experiment.experiment import DIVERGED
from fedjax_ssl.models.layers import DTYPES
from launch.command import ask_for_huge_pages

DIGITS_10 = "configs/digits.py:fl2,labels=10"
SPLITS = {"IID": "iid", "Dirichlet .3": "dir0.3"}
# A row's method in configs/digits.py and what it sets besides. FixMatch's config has the learning rate of (FL)^2, whose parts
# it is compared with; here it has its own (LEARNING_RATES there). FedAvg's clients know all labels; FedProx has the rates of
# FixMatch and of UDA. FedCon with clients that stay, almost, as they are says what they add to its server's training; its bytes
# and seconds mean nothing.
TUNED_FIXMATCH = {"client.optimizer.learning_rate": 0.1, "server.optimizer.learning_rate": 0.1}
LABELS_AT_SERVER: dict[str, tuple[str, dict[str, Any]]] = {
    "supervised": ("supervised", {}),
    "FixMatch": ("fixmatch", TUNED_FIXMATCH),
    "FixMatch + FedProx": ("fixmatch", TUNED_FIXMATCH | {"method.prox_mu": 0.01}),
    "UDA": ("uda", {}),
    "UDA + FedProx": ("uda", {"method.prox_mu": 0.01}),
    "(FL)^2": ("fl2", {}),
    "SemiFL": ("semifl", {}),
    "FedMatch": ("fedmatch", {}),
    "FedCon": ("fedcon", {}),
    "FedCon (clients stay)": ("fedcon", {"client.optimizer.learning_rate": 1e-9}),
    "FedSiam-Pi": ("fedsiam_pi", {}),
    "FedSiam-MT": ("fedsiam_mt", {}),
    "FedSiam-D": ("fedsiam_d", {}),
    "FixMatch (central)": ("fixmatch_central", {}),
    "FreeMatch (central)": ("freematch_central", {}),
    "FedAvg (all labels)": ("fedavg", {}),
}
# FedDure's two splits of labeled and unlabeled data; FedAvg on the labels alone stands below all, on all labels above.
SPLITS_AT_CLIENTS = {"(IID, IID)": "iid", "(DIR, DIR)": "dirdir"}
LABELS_AT_CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg*": ("fedavg", {}),
    "FedAvg++": ("fedavg_pp", {}),
    "FedProx": ("fedprox", {}),
    "UDA": ("uda", {}),
    "UDA + FedProx": ("uda", {"method.prox_mu": 0.01}),
    "FixMatch": ("fixmatch", {}),
    "FixMatch + FedProx": ("fixmatch", {"method.prox_mu": 0.01}),
    "FedMatch": ("fedmatch", {}),
    "FedSem": ("fedsem", {}),
    "FedTriNet": ("fedtrinet", {}),
    "FedSiam-Pi": ("fedsiam_pi", {}),
    "FedSiam-MT": ("fedsiam_mt", {}),
    "FedSiam-D": ("fedsiam_d", {}),
    "FedLabel": ("fedlabel", {}),
    "FedDure": ("feddure", {}),
    "FedDure without C-reg": ("feddure", {"method.regulators": "no_c"}),
    "FedDure without F-reg": ("feddure", {"method.regulators": "no_f"}),
    "FedAvg-SL": ("fedavg", {"data.reveal_labels": True}),
}
# FedSiam's Table 5, in its released code's setting, with what the authors leave out: where the gain of its column comes from.
OWN_OPTIMIZER = {"client.optimizer.momentum": 0.9, "client.optimizer.weight_decay": 1e-4, "client.epochs": 15}
TO_THE_LETTER = {"method.normalization": "paper", "method.labeled_repeats": 1, "model.variant": "paper"}
FEDSIAM_MNIST: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "FedAvg": ("fedavg", {}, 95.13),
    "FedAvg++": ("fedavg_pp", {}, 96.20),
    "FedSem": ("fedsem", {}, 96.49),
    "FedFixMatch": ("fixmatch", {}, 93.19),
    "FedMatch": ("fedmatch", {}, 94.11),
    "FedSiam-Pi": ("pi", {}, 97.04),
    "FedSiam-MT": ("mt", {}, 97.16),
    "FedSiam-D": ("d", {}, 97.22),
    "Pi without consistency": ("no_siamese", {}, 97.03),
    "FedAvg with FedSiam's optimizer and repetition": ("fedavg", OWN_OPTIMIZER, None),
    "Pi by Eqs. 6 and 7, labels once, no dropout": ("pi", TO_THE_LETTER, None),
}
# FedSiam with labels at the server, where the paper has about 91.3 for both. Its rounds, and the config's, are 200 on MNIST and
# 150 on SVHN; here they are 150, for the time: a run takes 2 to 25 minutes on a CPU core.
SHORT = {"rounds": 150}
FEDSIAM_MNIST_SERVER: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "FedSiam-Pi": ("pi", SHORT, 91.3),
    "FedSiam-MT": ("mt", SHORT, 91.3),
    "Pi without consistency": ("no_siamese", SHORT, None),
    "MT without consistency": ("mt", SHORT | {"method.consistency_weight": 0.0}, None),
    "Pi with dropout in place of augmentation": ("pi", SHORT | {"model.variant": "released", "data.weak": "none"}, None),
}
# (FL)^2's Table 2: its parts, on top of FixMatch with FedAvg.
PARTS = {
    "FixMatch + FedAvg": {"threshold": "fixed", "consistency": "none", "aggregation": "uniform"},
    "+ SACR": {"threshold": "fixed", "consistency": "sacr", "aggregation": "uniform"},
    "CAT": {"threshold": "cat", "consistency": "none", "aggregation": "uniform"},
    "CAT + SACR": {"threshold": "cat", "consistency": "sacr", "aggregation": "uniform"},
    "CAT + SACR + LSAA": {"threshold": "cat", "consistency": "sacr", "aggregation": "lsaa"},
}
# Work whose accuracy is compared in float32 and in bfloat16.
IN_BOTH_DTYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "digits, (FL)^2": ("configs/digits.py:fl2,labels=40,split=iid", {}),
    "digits, FedDure": ("configs/digits.py:feddure,labels_at=clients,split=iid", {}),
    "MNIST, FedSiam-Pi, 10 rounds": ("configs/fedsiam_mnist.py:pi,gamma=0.1,variant=released", {"rounds": 10}),
}


class Cell(NamedTuple):
    """One experiment of a table.

    Attributes:
        row: what stands at the left of its line.
        column: what stands above it.
        config: config file with its argument.
        overrides: dotted keys and values.
        paper: the accuracy that the paper has there, in percent.
    """

    row: str
    column: str
    config: str
    overrides: dict[str, Any]
    paper: float | None = None


class Table(NamedTuple):
    """A table.

    Attributes:
        seeds: how many seeds each cell is run with unless the command line says otherwise.
        cells: in the order of their lines.
    """

    seeds: int
    cells: list[Cell]


TABLES = {
    "digits_server": Table(
        seeds=3,
        cells=[
            Cell(row, f"40 labels, {name}", f"configs/digits.py:{method},labels_at=server,labels=40,split={split}", overrides)
            for row, (method, overrides) in LABELS_AT_SERVER.items()
            for name, split in SPLITS.items()
        ],
    ),
    "digits_clients": Table(
        seeds=3,
        cells=[
            Cell(row, f"10 %, {name}", f"configs/digits.py:{method},labels_at=clients,split={split}", overrides)
            for row, (method, overrides) in LABELS_AT_CLIENTS.items()
            for name, split in SPLITS_AT_CLIENTS.items()
        ],
    ),
    "fedsiam_mnist": Table(
        seeds=3,
        cells=[
            Cell(row, "gamma .1, IID", f"configs/fedsiam_mnist.py:{word},gamma=0.1,variant=released", overrides, paper)
            for row, (word, overrides, paper) in FEDSIAM_MNIST.items()
        ],
    ),
    "fedsiam_mnist_server": Table(
        seeds=3,
        cells=[
            Cell(row, "gamma .01, IID", f"configs/fedsiam_mnist.py:{word},labels_at=server,gamma=0.01", overrides, paper)
            for row, (word, overrides, paper) in FEDSIAM_MNIST_SERVER.items()
        ],
    ),
    "precision": Table(
        seeds=3,
        cells=[
            Cell(dtype, column, config, overrides | {"execution.dtype": dtype})
            for dtype in DTYPES
            for column, (config, overrides) in IN_BOTH_DTYPES.items()
        ],
    ),
    "fl2_ablation": Table(
        seeds=5,
        cells=[
            Cell(row, "10 labels, IID", DIGITS_10, {f"method.{key}": value for key, value in parts.items()})
            for row, parts in PARTS.items()
        ],
    ),
}


def run(cell: Cell, seed: int, workdir: pathlib.Path, extra: list[str]) -> dict[str, Any]:
    """One run's results, from the files that it leaves; `error` where it fails or diverges."""
    name = "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in text) for text in (cell.row, cell.column))
    folder = workdir / name / str(seed)
    overrides = [f"--config.{key}={value}" for key, value in cell.overrides.items()]
    command = [sys.executable, "-m", "launch.run", f"--config={cell.config}", f"--workdir={folder}", f"--config.seed={seed}"]
    environment = {"JAX_COMPILATION_CACHE_DIR": str(workdir.absolute() / "cache"), **os.environ}
    done = subprocess.run([*command, *overrides, *extra], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"seed": seed, "error": error, "diverged": DIVERGED in error}
    config, summary = (json.loads((folder / file).read_text()) for file in ("config.json", "summary.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    error = left_out(rows) or fallen(rows)
    results = {
        "seed": seed,
        **({"error": error, "diverged": True} if error else {}),
        **{key: summary[key] for key in ("git_commit", "device", "jax_version")},
        "accuracy": summary["eval/accuracy"],
        "accuracy_last5": summary["eval/accuracy_last5"],
        "pseudo_label_accuracy": mean_of_last(rows, "diagnostics/pseudo_label_accuracy"),
        "bytes_up": summary.get("comm/bytes_up", 0),
        "bytes_down": summary.get("comm/bytes_down", 0),
        "forward_passes": rows[-1].get("cost/forward_passes", 0),
        "backward_passes": rows[-1].get("cost/backward_passes", 0),
        "seconds": summary["time/total_s"],
        "curve": [[row["round"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row],
    }
    if config["method"]["name"] == "fedsiam_d":
        besides_the_target = mean_of_last(rows, "client/upload_bytes_fraction", len(rows)) or 0.0
        results |= {"mu": config["method"]["saved"], "bytes_saved": 1.0 - besides_the_target}
    return results


def left_out(rows: list[dict[str, Any]]) -> str | None:
    """What is wrong with a run to whose rounds not all clients of the cohort added; None: nothing."""
    broken = [(row["round"], number) for row in rows if (number := row["client/non_finite"])]
    if not broken:
        return None
    return f"round {broken[0][0]}: clients returned {DIVERGED} and were left out, {sum(n for _, n in broken)} in all rounds"


def fallen(rows: list[dict[str, Any]]) -> str | None:
    """What is wrong with a run that lost most of what it had learned, as where its steps are too large; None: nothing."""
    accuracies = [(row["eval/accuracy"], row["round"]) for row in rows if "eval/accuracy" in row]
    (best, at), (last, _) = max(accuracies, key=lambda one: one[0]), accuracies[-1]
    return f"accuracy fell from {best:.1%} in round {at} to {last:.1%}" if last < best / 2 else None


def mean_of_last(rows: list[dict[str, Any]], key: str, rounds: int = 5) -> float | None:
    """The mean of what the last rounds have under `key`; None where they have nothing there."""
    values = [row[key] for row in rows[-rounds:] if row.get(key) is not None]
    return statistics.mean(values) if values else None


def spread(values: list[float]) -> str:
    """Mean and, of several values, sample standard deviation, in percent."""
    percent = [100 * value for value in values]
    deviation = f" ± {statistics.stdev(percent):.1f}" if len(percent) > 1 else ""
    return f"{statistics.mean(percent):.1f}{deviation}"


HEAD = "| method | setting | accuracy % | the paper | pseudo-labels correct % | MB up | MB down | s a run |\n|" + 8 * "---|"


def line(cell: Cell, runs: list[dict[str, Any]]) -> str:
    """A cell as a line of a Markdown table."""
    paper = "-" if cell.paper is None else f"{cell.paper:.2f}"
    if errors := [f"seed {r['seed']}: {r['error']}" for r in runs if "error" in r]:
        return f"| {cell.row} | {cell.column} | failed: {'; '.join(errors)} | {paper} | | | | |"
    accuracies = [r["accuracy"] for r in runs]
    if cell.paper is not None:
        paper += f" ({100 * statistics.mean(accuracies) - cell.paper:+.2f})"
    labeled = [r["pseudo_label_accuracy"] for r in runs if r["pseudo_label_accuracy"] is not None]
    up, down, seconds = (statistics.mean(r[key] for r in runs) for key in ("bytes_up", "bytes_down", "seconds"))
    saved = ""
    if "mu" in runs[0]:
        saved = f" (mu {runs[0]['mu']:g}, {statistics.mean(r['bytes_saved'] for r in runs):.2f} of bytes saved)"
    return (
        f"| {cell.row} | {cell.column} | {spread(accuracies)} | {paper} | {spread(labeled) if labeled else '-'} "
        f"| {up / 1e6:.1f}{saved} | {down / 1e6:.1f} | {seconds:.0f} |"
    )


def select(parser: argparse.ArgumentParser, cells: list[Cell], beginnings: str) -> list[Cell]:
    """The cells whose row begins with one of the comma-separated `beginnings`; ends the program for one that no row has."""
    words = tuple(beginnings.split(","))
    if strange := [word for word in words if not any(cell.row.startswith(word) for cell in cells)]:
        parser.error(f"argument --rows: got {strange[0]!r}, accepted: beginnings of {', '.join({c.row: 0 for c in cells})}")
    return [cell for cell in cells if cell.row.startswith(words)]


def write(path: pathlib.Path, table: Table, results: list[dict[str, Any]]) -> None:
    """Writes a table's cells as JSON, one a line; what `path` holds of the table's other cells stays.

    Under `from` is the process that wrote the cell; runs that it found finished have their own commit, device and JAX.
    """
    key, here = operator.itemgetter("row", "column"), provenance()
    old = json.loads(path.read_text())["cells"] if path.exists() else []
    cells = {key(cell): cell for cell in [*old, *({**result, "from": here} for result in results)]}
    rows = [json.dumps(cells[place]) for cell in table.cells if (place := (cell.row, cell.column)) in cells]
    path.write_text('{"cells": [\n' + ",\n".join(rows) + "\n]}\n")


def main() -> None:
    """Prints the table, line by line as its runs finish, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--first_seed", type=int, default=0, help="such as 10, to tune on others than the table's")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--rows", default="", help="comma-separated beginnings of the rows to run")
    arguments, extra = parser.parse_known_args()
    table = TABLES[arguments.table]
    seeds = range(arguments.first_seed, arguments.first_seed + (arguments.seeds or table.seeds))
    results = []
    print(HEAD)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        started = [
            (cell, [pool.submit(run, cell, seed, arguments.workdir / arguments.table, extra) for seed in seeds])
            for cell in select(parser, table.cells, arguments.rows)
        ]
        for cell, futures in started:
            runs = [future.result() for future in futures]
            print(line(cell, runs), flush=True)
            results.append({**cell._asdict(), "runs": runs})
    if arguments.json:
        write(arguments.json, table, results)
    if any("error" in one and not one["diverged"] for cell in results for one in cell["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
