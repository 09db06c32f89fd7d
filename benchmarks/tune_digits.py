"""How the learning rates in `configs/digits.py` were chosen: each method's candidates at a seed that no table has.

    python -m benchmarks.tune_digits server --workdir=runs/tune --json=benchmarks/results/digits_server_tuning.json
    python -m benchmarks.tune_digits clients --workdir=runs/tune --json=benchmarks/results/digits_clients_tuning.json

The candidates are .01, .03, .1 and .3 for both holders, and 1 where .3 is the best; of FedCon, whose clients train by
themselves, the clients' and the server's apart, and its averages; of FedDure, whose clients have Adam, the clients' and its
regulators'. IID, 40 labels at the server or 10 % of each client's, one run each. The best mean accuracy of the last five
evaluations is chosen, marked with a star; the config is then set by hand, and a test compares the two. What the file holds of
other candidates stays. Run time: some 20 minutes each on two CPU cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import pathlib
import sys
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.tables import LABELS_AT_CLIENTS, LABELS_AT_SERVER, Cell, run, select
from launch.command import ask_for_huge_pages

SEED = 10
RATES, LARGER = (0.01, 0.03, 0.1, 0.3), 1.0
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
        grid = itertools.product((1e-3, 3e-3, 1e-2), (1e-3, 3e-3, 1e-2, 3e-2))
        return [{CLIENT: rate, "method.eta_s": regulators, "method.eta_w": regulators} for rate, regulators in grid]
    return [{CLIENT: rate, SERVER: rate} for rate in RATES]


def cells(place: str) -> list[Cell]:
    """All candidates of all methods: a table's rows, each method once in the setting that its row has."""
    rows = LABELS_AT_SERVER if place == "server" else LABELS_AT_CLIENTS
    tuned: dict[tuple[str, bool], str] = {}
    for row, (method, own) in rows.items():
        tuned.setdefault((method, "data.reveal_labels" in own), row)
    return [
        cell_of(row, f"configs/digits.py:{method},labels_at={place}", candidate, revealed)
        for (method, revealed), row in tuned.items()
        for candidate in candidates(method)
    ]


def cell_of(row: str, config: str, candidate: Overrides, revealed: bool) -> Cell:
    """A candidate as a cell of a table."""
    column = ", ".join(f"{key}={value:g}" for key, value in candidate.items())
    return Cell(row, column, config, candidate | ({"data.reveal_labels": True} if revealed else {}))


def score(result: dict[str, Any]) -> float:
    """What the choice is by: the mean accuracy of the last five evaluations; of a run that failed less than any other's."""
    return -1.0 if "error" in result else result["accuracy_last5"]


def beyond(found: list[tuple[Cell, dict[str, Any]]]) -> list[Cell]:
    """The candidates to add: the larger rate of each row whose best is the largest of RATES."""
    added = []
    for _, group in itertools.groupby(found, key=lambda one: one[0].row):
        best, _ = max(group, key=lambda one: score(one[1]))
        if best.overrides.get(CLIENT) == best.overrides.get(SERVER) == RATES[-1]:
            revealed = "data.reveal_labels" in best.overrides
            added.append(cell_of(best.row, best.config, {CLIENT: LARGER, SERVER: LARGER}, revealed))
    return added


def write(path: pathlib.Path, place: str, found: list[tuple[Cell, dict[str, Any]]]) -> None:
    """Writes the runs as JSON, one a line; what `path` holds of other candidates stays.

    Under `from` is the process that wrote the run; one that it found finished has its own commit, device and JAX.
    """
    here = provenance()
    new = [{"row": cell.row, "overrides": cell.overrides, **result, "from": here} for cell, result in found]
    old = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = {json.dumps([one["row"], one["overrides"]], sort_keys=True): one for one in [*old, *new]}
    order = {row: i for i, row in enumerate(dict.fromkeys(cell.row for cell in cells(place)))}
    kept = sorted((one for one in runs.values() if one["row"] in order), key=lambda one: order[one["row"]])
    lines = ",\n".join(json.dumps({key: value for key, value in one.items() if key != "curve"}) for one in kept)
    path.write_text(f'{{"seed": {SEED}, "runs": [\n{lines}\n]}}\n')


def main() -> None:
    """Prints every candidate's accuracy, method by method, and writes them as JSON; exit status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=("server", "clients"), help="where the labels are")
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--rows", default="", help="comma-separated beginnings of the rows to run")
    arguments, extra = parser.parse_known_args()

    def measured(chosen: list[Cell]) -> list[tuple[Cell, dict[str, Any]]]:
        results = pool.map(lambda cell: run(cell, SEED, arguments.workdir / arguments.place, extra), chosen)
        return list(zip(chosen, results, strict=True))

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        found = measured(select(parser, cells(arguments.place), arguments.rows))
        found += measured(beyond(found))
    rows = list(dict.fromkeys(cell.row for cell, _ in found))
    found.sort(key=lambda one: rows.index(one[0].row))
    for _, group in itertools.groupby(found, key=lambda one: one[0].row):
        tried = list(group)
        best, _ = max(tried, key=lambda one: score(one[1]))
        for cell, result in tried:
            accuracy = result["error"] if "error" in result else f"{100 * score(result):.1f}{'*' if cell is best else ' '}"
            print(f"{cell.row:20} {accuracy:>7} {cell.column}")
    if arguments.json:
        write(arguments.json, arguments.place, found)
    if any("error" in result and not result["diverged"] for _, result in found):
        sys.exit(1)


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
