"""The same work here and in what a user would pick instead: pfl-research, Flower's simulation, a plain PyTorch loop.

    python -m benchmarks.compare --peers=DIR --json=benchmarks/results/compare_cpu.json

On a machine with an NVIDIA GPU and no network, whose Python has JAX and PyTorch, and with the peers' wheels in WHEELS (made
elsewhere, for that Python, by `pip download -d WHEELS pfl==0.6.0 "flwr[simulation]==1.41.0"`), as much as ten minutes allow:

    python -m benchmarks.compare --peers=DIR --system-torch --wheels=WHEELS --budget=570 \\
        --json=benchmarks/results/compare_h200.json

`cnn`: rounds of pfl-research's CIFAR-10 benchmark, FedAvg on `emnist_cnn` with 1,000 clients of 50 images, batches of 10, one
epoch, SGD .1, dropout on, cohorts of 10 and 50. `fl2`: the clients' part of a round of (FL)^2 on WRN-28-2 (pseudo-labels, steps
with SACR and ASAM, the weighted average), which no simulator has, with 2 clients on a CPU and 10 on a GPU, beside a PyTorch
loop of the same. PyTorch's loops run in both of its memory layouts. Images are random, and the same for all; nothing is
augmented.

Before anything is timed, each program runs a job that no order of examples changes, without dropout, from the same initial
weights; its change of the model must agree with the one here, as ||a - b|| / ||b||, to 1e-4 in float32 of the CNN; of (FL)^2,
which PyTorch computes in float64 there, likewise after two steps on WRN-10, where all lowerings agree to 3e-5: a hundredth
more of ASAM's radius or of the consistency term, or any part of the method left out, makes more than 1.5e-3. Then each
program runs alone, in a process of its own, the programs in turns, in orders in which each comes after each other one about as
often: a round to warm up, then `--rounds`, `--repeats` times. Ours is in the layout that a search finds and, where that is
another one, also in the usual one, which runs have that are too short for a search. Of pfl and Flower, which run in one process
(actor) or several, the fastest in the first turn goes on alone, as the rival.

A ratio is that of a turn's medians, theirs over ours; of the turns' ratios there are the median, the least and the most, which
enclose the median of all such turns with 97 % where six of them are independent. Searches for layouts take part of the time
where nothing is kept from before. `--budget` seconds are shared among what is asked for; what does not fit is named and left
out.

The peers are installed with their own virtual environments under DIR, where they are not there yet: `--torch` is what pip is
asked for as PyTorch, or `--system-torch` takes that of this Python. Every program has the first `--threads` cores. On a GPU all
multiply float32 in `--precision`. PyTorch is eager, as in the peers' own benchmarks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.jobs import KINDS
from benchmarks.programs import OURS, PEERS, Environments, Limits, Rival, has_gpu, processes_of
from benchmarks.provenance import provenance
from benchmarks.spread import balanced, quartiles
from launch.command import ask_for_huge_pages

WARM_UP = 1
USUAL = f"{OURS}, usual layout"
TUNING_SHARE = 1 / 8
"""Of the time that a cohort has."""


def change(folder: pathlib.Path) -> np.ndarray:
    """What a job changed in the model, as one vector in the order of the parameters' names."""
    with np.load(folder / "weights.npz") as end, np.load(folder / "data.npz") as start:
        return np.concatenate([(end[name] - start[f"w:{name}"]).ravel() for name in sorted(end.files)])


def difference(ours: pathlib.Path, theirs: pathlib.Path) -> float:
    """||theirs - ours|| / ||ours|| of two jobs' changes."""
    a, b = change(ours), change(theirs)
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


def rivals_of(kind: str, processes: list[int]) -> Iterator[Rival]:
    """Everything that runs a kind of job, ours first; pfl and Flower with each number of processes."""
    yield Rival(OURS, OURS, {})
    yield Rival("PyTorch", "pytorch", {})
    yield Rival("PyTorch, channels last", "pytorch", {"channels_last": True})
    if kind == "fl2":
        return
    yield from (Rival(f"pfl, {number} processes", "pfl", {"processes": number}) for number in processes)
    yield from (Rival(f"Flower, {number} actors", "flower", {"processes": number}) for number in processes)


class Comparison:
    """One kind of job by all its rivals.

    Args:
        kind: a key of KINDS.
        arguments: the command line.
        missing: programs that are not there -> why.
        scratch: a folder.
    """

    def __init__(self, kind: str, arguments: argparse.Namespace, missing: dict[str, str], scratch: pathlib.Path) -> None:
        self._name, self._kind, self._arguments, self._scratch = kind, KINDS[kind], arguments, scratch
        self._environments = Environments.of(arguments)
        self._rivals = list(rivals_of(kind, arguments.processes))
        self._base = self._kind.job | {"kind": kind, "device": arguments.device, "threads": arguments.threads, "processes": 1}
        self._checked = {r.name: {"error": missing[r.program]} for r in self._rivals if r.program in missing}

    def run(self, cohort: int, limits: Limits) -> list[dict[str, Any]]:
        """Tunes, checks, then times everything at one cohort: a result of each rival, ours first."""
        job = self._base | {"cohort": cohort, "warm_up": WARM_UP, "precision": self._arguments.precision}
        job |= {"clients": max(cohort, job["clients"]), "rounds": self._arguments.rounds or self._kind.rounds}
        tuning = {"warm_up": 0, "rounds": 0, "tuning_limit_s": limits.left * TUNING_SHARE}
        tuned = self._attempt(self._rivals[0], job | tuning, f"timed-{cohort}", limits)
        results, rivals = {OURS: tuned}, self._rivals
        if "layout" in tuned:
            job["layout"], usual = tuned["layout"], tuned["usual_layout"]
            if usual != tuned["layout"]:
                rivals = [*rivals, Rival(USUAL, OURS, {"layout": usual})]
            results = self._check(rivals, job["layout"], limits)
        turns = self._time([r for r in rivals if "difference" in results.get(r.name, {})], job, limits)
        for name, reports in turns.items():
            results[name] |= merged(reports)
        if "seconds" in results[OURS]:
            results[OURS]["tuning_s"] = tuned["tuning_s"]
        images, about = cohort * job["per_client"] * job["epochs"], {"kind": self._name, "cohort": cohort}
        return [{**about, "name": r.name, **summary(results.get(r.name, {}), images, results[OURS])} for r in rivals]

    def _attempt(self, rival: Rival, job: dict[str, Any], stage: str, limits: Limits) -> dict[str, Any]:
        """Runs a job in a folder of the rival's own; the data there are those that ours left at that stage."""
        folder, data = self._scratch / stage / rival.name, self._scratch / stage / OURS / "data.npz"
        folder.mkdir(parents=True, exist_ok=True)
        if data.exists() and not (folder / "data.npz").exists():
            os.link(data, folder / "data.npz")
        return limits.attempt(rival, job, folder, self._environments)

    def _check(self, rivals: list[Rival], layout: dict[str, Any], limits: Limits) -> dict[str, dict[str, Any]]:
        """What is wrong with each rival, or the `difference` of its model; the peers' is computed once, ours in each layout."""
        # As many clients in each of pfl's processes: otherwise its second round draws other clients.
        together = math.lcm(self._kind.checked["cohort"], *(rival.own.get("processes", 1) for rival in rivals))
        job = self._base | self._kind.checked | {"clients": together, "cohort": together}
        job |= {"warm_up": 0, "precision": "float32", "layout": layout}
        results: dict[str, dict[str, Any]] = {}
        for rival in rivals:
            report = self._checked.get(rival.name) or self._attempt(rival, job, "checked", limits)
            if rival.program != OURS and "left_out" not in report:
                self._checked[rival.name] = report
            if problem := {key: report[key] for key in ("error", "left_out") if key in report}:
                results[rival.name] = problem
                if rival.name == OURS:
                    break
                continue
            differs = difference(self._scratch / "checked" / OURS, self._scratch / "checked" / rival.name)
            if differs <= self._kind.tolerance:
                results[rival.name] = {"difference": differs}
            else:
                results[rival.name] = {"error": f"its model differs by {differs:.1e}"}
        return results

    def _time(self, able: list[Rival], job: dict[str, Any], limits: Limits) -> dict[str, list[dict[str, Any]]]:
        """The reports of each rival, one a turn; empty for a turn that it had no part in."""
        if not able or able[0].name != OURS:
            return {}
        reports: dict[str, list[dict[str, Any]]] = {rival.name: [] for rival in able}
        for turn in range(self._arguments.repeats or self._kind.repeats):
            others = random.Random(f"{self._name} {job['cohort']}").sample(able[1:], len(able) - 1)
            shuffled = [able[0], *others]  # ours is the first of the first turn: without it the others say nothing
            order = [shuffled[i] for i in balanced(len(able), turn)]
            if turn == 0:
                order.sort(key=lambda rival: rival.name == USUAL)  # last, as there may be no time for all
            found: dict[str, dict[str, Any]] = {}
            for rival in order:
                found[rival.name] = self._attempt(rival, job, f"timed-{job['cohort']}", limits)
                if rival.name == OURS and "seconds" not in found[OURS]:
                    break
            for name in reports:
                reports[name].append(found.get(name, {}))
            able = fastest([rival for rival in able if "seconds" in found.get(rival.name, {})], found)
            if not able or able[0].name != OURS:
                break
        return reports


def fastest(rivals: list[Rival], reports: dict[str, dict[str, Any]]) -> list[Rival]:
    """Of rivals that differ in their number of processes alone, the fastest in a turn; of the others all."""

    def seconds(rival: Rival) -> float:
        return float(np.median(reports[rival.name]["seconds"]))

    def alike(rival: Rival) -> tuple[str, str]:
        return rival.program, json.dumps({key: value for key, value in rival.own.items() if key != "processes"})

    best = {alike(rival): rival for rival in sorted(rivals, key=seconds, reverse=True)}
    return [rival for rival in rivals if best[alike(rival)] == rival]


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The reports of several turns as one: `seconds` by turn, the rest the first's, which compiled.

    A turn for which no time was left is as if it had not been asked for; one that failed fails the whole.
    """
    failed = [report for report in reports if "error" in report]
    able = [report for report in reports if "seconds" in report]
    if failed or not able:
        return {key: value for report in failed or reports for key, value in report.items() if key in ("error", "left_out")}
    return {**able[0], "seconds": [report.get("seconds", []) for report in reports]}


def summary(report: dict[str, Any], images: int, ours: dict[str, Any]) -> dict[str, Any]:
    """A result: a report with the median and quartiles of its rounds of so many images, and its ratio to ours."""
    if "error" in report or "left_out" in report:
        return {key: report[key] for key in ("error", "left_out", "difference") if key in report}
    if "seconds" not in ours:
        return {"left_out" if "left_out" in ours else "error": f"not compared, as {OURS} was not timed"}
    ratios = [float(np.median(t) / np.median(o)) for t, o in zip(report["seconds"], ours["seconds"], strict=True) if t and o]
    low, median, high = quartiles(np.concatenate(report["seconds"]))
    rates = {"round_s": median, "quartiles_s": [low, high], "images_per_s": images / median}
    beside = {"ratios": ratios, "times_ours": float(np.median(ratios)), "least_and_most": [min(ratios), max(ratios)]}
    return report | rates | beside


HEAD = (
    f"{'kind':4} {'M':>4} {'program':24} {'round s':>8} {'quartiles':>17} {'images/s':>9} {'/ ours':>6} {'turns':>13} "
    f"{'differs':>9}"
)


def line(r: dict[str, Any]) -> str:
    """A line of the table."""
    what = f"{r['kind']:4} {r['cohort']:4} {r['name']:24}"
    if problem := r.get("error") or r.get("left_out"):
        return f"{what} {problem}"
    spread = "{:.3f} - {:.3f}".format(*r["quartiles_s"])
    turns = "{:.2f} - {:.2f}".format(*r["least_and_most"])
    return (
        f"{what} {r['round_s']:8.3f} {spread:>17} {r['images_per_s']:9,.0f} {r['times_ours']:6.2f} {turns:>13} "
        f"{r['difference']:9.1e}"
    )


def write(path: pathlib.Path, arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Writes the results so far as JSON; their device is the one that our processes named."""
    device = next((r["device"] for r in results if r["name"] == OURS and "device" in r), arguments.device)
    settings: dict[str, Any] = {"threads": arguments.threads, "warm_up": WARM_UP}
    if arguments.device != "cpu":
        settings["precision"] = arguments.precision
    settings |= {name: {**KINDS[name].job, "tolerance": KINDS[name].tolerance} for name in arguments.only}
    path.write_text(json.dumps({**provenance(device), **settings, "results": results}, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    """The command line, with the defaults of this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Environments.add_options(parser)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--cohort", nargs="+", type=int, help="clients a round of the CNN; default: 10 and 50")
    parser.add_argument("--rounds", type=int, help="timed rounds of a process; default: 5, of fl2 3")
    parser.add_argument("--repeats", type=int, help="turns, processes of each program; default: 6")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where JAX finds a GPU")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores that a program has")
    parser.add_argument(
        "--processes", nargs="+", type=int, help="of pfl and Flower; default: one, and one a thread; on a GPU 4, 5, 8"
    )
    parser.add_argument("--precision", choices=("tensorfloat32", "float32"), help="of a GPU; default: tensorfloat32")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds of each process")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of all")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    arguments = parser.parse_args()
    if arguments.peers is None:
        parser.error("the following arguments are required: --peers")
    arguments.device = arguments.device or ("cuda" if has_gpu() else "cpu")
    if arguments.device == "cpu" and arguments.precision:
        parser.error("argument --precision: of a GPU alone, a CPU has float32")
    arguments.precision = arguments.precision or ("float32" if arguments.device == "cpu" else "tensorfloat32")
    arguments.processes = arguments.processes or processes_of(arguments.device, arguments.threads)
    return arguments


def main() -> None:
    """Compares, prints a table and writes it as JSON; exit status 1 where a program failed or disagrees."""
    arguments = parsed()
    limits = Limits(arguments.timeout, time.monotonic() + arguments.budget)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # and so those of all programs
    wanted = {rival.program for kind in arguments.only for rival in rivals_of(kind, [1])} - {OURS}
    installed = {name: Environments.of(arguments).install(name) for name in PEERS if name in wanted}
    missing = {name: error for name, error in installed.items() if error}
    results: list[dict[str, Any]] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Programs are compiled once in a comparison, whatever an earlier one has kept: the first process says what it takes.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(scratch, "programs"))
        cohorts = {kind: KINDS[kind].cohorts[arguments.device] for kind in arguments.only}
        if arguments.cohort and "cnn" in cohorts:
            cohorts["cnn"] = arguments.cohort
        left = sum(2 * len(of_kind) + 1 for of_kind in cohorts.values())
        for kind in arguments.only:
            comparison = Comparison(kind, arguments, missing, pathlib.Path(scratch, kind))
            for number, cohort in enumerate(cohorts[kind]):
                parts = 2 if number else 3  # a kind's peers are checked with its first cohort
                found = comparison.run(cohort, limits.share(left / parts))
                left -= parts
                results += found
                print("\n".join(map(line, found)), flush=True)
                if arguments.json:
                    write(arguments.json, arguments, results)
    if any("error" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
