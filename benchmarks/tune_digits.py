"""How the learning rates in `configs/digits.py` were chosen: each method's candidates at a seed that no table has.

    python -m benchmarks.tune_digits server --workdir=runs/tune --json=benchmarks/results/digits_server_tuning.json
    python -m benchmarks.tune_digits clients --workdir=runs/tune --json=benchmarks/results/digits_clients_tuning.json

The candidates are .01, .03, .1 and .3 for both holders; of FedCon, whose clients train by themselves, the clients' and the
server's apart, and its averages; of FedDure, whose clients have Adam, the clients' and its regulators' two. IID, 40 labels at
the server or 10 % of each client's. The best mean accuracy of the last five evaluations is chosen, marked with a star; a
method's config is then set by hand. Run time: some 20 minutes each on two CPU cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import pathlib
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.tables import LABELS_AT_CLIENTS, LABELS_AT_SERVER, Cell, run

SEED = 10
RATES = (0.01, 0.03, 0.1, 0.3)
CLIENT, SERVER = "client.optimizer.learning_rate", "server.optimizer.learning_rate"
Overrides = dict[str, Any]
# For the 800 steps that the server has here, and the paper's, for 10,000.
FEDCON_AVERAGES: tuple[Overrides, ...] = (
    {"method.teacher_rate": 0.02, "method.ramp_rounds": 20, "method.target_decay": 0.98},
    {"method.teacher_rate": 4e-4, "method.ramp_rounds": 100, "method.target_decay": 0.999},
)


def candidates(method: str) -> list[Overrides]:
    """What is tried for a method, as dotted keys and values."""
    if method == "fedcon":
        rates = [{CLIENT: client, SERVER: server} for client, server in itertools.product((0.1, 0.3, 1.0), (0.03, 0.1))]
        return [averages | rate for averages in FEDCON_AVERAGES for rate in rates]
    if method == "feddure":
        grid = itertools.product((1e-3, 3e-3, 1e-2), repeat=2)
        return [{CLIENT: rate, "method.eta_s": regulators, "method.eta_w": regulators} for rate, regulators in grid]
    return [{CLIENT: rate, SERVER: rate} for rate in RATES]


def cells(place: str) -> list[Cell]:
    """All candidates of all methods: a table's rows, each method once in the setting that its row has."""
    rows = LABELS_AT_SERVER if place == "server" else LABELS_AT_CLIENTS
    tuned: dict[tuple[str, bool], str] = {}
    for row, (method, own) in rows.items():
        tuned.setdefault((method, "data.reveal_labels" in own), row)
    return [
        Cell(
            row=row,
            column=", ".join(f"{key}={value:g}" for key, value in candidate.items()),
            config=f"configs/digits.py:{method},labels_at={place}",
            overrides=candidate | ({"data.reveal_labels": True} if revealed else {}),
        )
        for (method, revealed), row in tuned.items()
        for candidate in candidates(method)
    ]


def main() -> None:
    """Prints every candidate's accuracy, method by method, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=("server", "clients"), help="where the labels are")
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--rows", default="", help="comma-separated beginnings of the rows to run")
    arguments, extra = parser.parse_known_args()
    chosen = [cell for cell in cells(arguments.place) if cell.row.startswith(tuple(arguments.rows.split(",")))]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda cell: run(cell, SEED, arguments.workdir / arguments.place, extra), chosen)
        found = [{"row": cell.row, "overrides": cell.overrides, **result} for cell, result in zip(chosen, results, strict=True)]
    for row, group in itertools.groupby(found, key=lambda one: one["row"]):
        tried = list(group)
        best = max(tried, key=lambda one: one.get("accuracy_last5", 0.0))
        for one in tried:
            what = ", ".join(f"{key}={value:g}" for key, value in one["overrides"].items())
            accuracy = f"{100 * one['accuracy_last5']:.1f}" if "accuracy_last5" in one else one["error"]
            print(f"{row:20} {accuracy:>6}{'*' if one is best else ' '} {what}")
    if arguments.json:
        lines = ",\n".join(json.dumps({key: value for key, value in one.items() if key != "curve"}) for one in found)
        arguments.json.write_text(json.dumps({"seed": SEED, **provenance()}, indent=1)[:-2] + f',\n"runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
