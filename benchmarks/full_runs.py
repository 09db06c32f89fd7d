"""Whole experiments by one command each: how long they take, and how good their models are.

    python -m benchmarks.full_runs pfl --workdir=DIR --peers=DIR --data_dir=DIR --json=benchmarks/results/full_pfl_h200.json
    python -m benchmarks.full_runs fl2 --workdir=DIR --data_dir=DIR --json=benchmarks/results/full_fl2_h200.json

`pfl`: `configs/pfl_cifar10.py`, 1,500 rounds with an evaluation every 10, which go as one dispatch here, beside pfl-research's
own loop with as many evaluations, in the number of processes that is its best over `--trial` rounds; the same data and initial
weights. `fl2`: (FL)^2 on CIFAR-10 with 40 labels, IID, the paper's settings, 800 rounds, beside the paper's accuracy.

Ours is `python -m launch.run` itself, in its fastest layout: looking for that is timed apart. The seconds are those of
`time/total_s` in metrics.jsonl: all from the initialization on, compiling, evaluation and checkpoints included; pfl's are
those of all its rounds. That both compute the same is what `benchmarks/compare.py` checks. Results are in a folder of DIR
named after the experiment; the same command goes on where an earlier one stopped, one with other settings is refused, and
`--budget` makes it stop after so many seconds (pfl's whole run starts anew then). With `--rounds=N` ours, with `--pfl_rounds=N`
pfl's loop runs its first N rounds alone, and the total is reckoned from them, with the checkpoints that are among them, and
marked so. `--random` puts random images of CIFAR-10's shape in its place, whose accuracy means nothing. What follows these
arguments, such as --config.execution.dtype=bfloat16, goes to `launch.run`. For machines without a network see
`benchmarks/compare.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import jobs, programs
from benchmarks.programs import Environments, Limits, Rival
from benchmarks.provenance import devices, provenance
from benchmarks.spread import quartiles
from launch.command import ask_for_huge_pages

RANDOM = {"train": 50_000, "test": 10_000}
"""Random images."""
TO_SAVE_S = 60.0
"""What a run is given to save its state where the budget ends."""
WARM_UP = 2
"""Rounds of a trial that are not counted."""


class Experiment(NamedTuple):
    """What is run.

    Attributes:
        config: config file with its argument.
        overrides: dotted keys and values.
        expected: accuracy in %, and whose.
        views: of random images, which have no name by which CIFAR-10's would be known.
    """

    config: str
    overrides: dict[str, Any]
    expected: str
    views: dict[str, str]


EXPERIMENTS = {
    "pfl": Experiment(
        "configs/pfl_cifar10.py", {"execution.rounds_per_dispatch": 10}, "about 70 (pfl-research's benchmark)", {}
    ),
    "fl2": Experiment(
        "configs/fl2_cifar10.py:paper,labels=40,split=iid",
        {},
        "81.5 ± 7.4 (the paper's Table 1)",
        {"weak": "flip_crop4"},
    ),
}


def words_of(experiment: Experiment, arguments: argparse.Namespace, extra: list[str]) -> list[str]:
    """The config and its overrides, as `launch.run` takes them."""
    values = {"execution.tune": "always", **experiment.overrides}
    if arguments.random:
        values |= {"data.name": "npz", "data.path": str(random_file(arguments.workdir)), "data.mean": jobs.MEAN}
        values |= {"data.std": jobs.STD, **{f"data.{key}": value for key, value in experiment.views.items()}}
    elif arguments.data_dir:
        values["data.data_dir"] = arguments.data_dir
    return [f"--config={experiment.config}", *(f"--config.{key}={value}" for key, value in values.items()), *extra]


def random_file(workdir: pathlib.Path) -> pathlib.Path:
    """A file with random images of CIFAR-10's shape, made where it is missing."""
    path = workdir / "random.npz"
    if not path.exists():
        made, train = jobs.random_images(sum(RANDOM.values())), RANDOM["train"]
        x, y = made["train_images"], made["train_labels"]
        np.savez(path, x_train=x[:train], y_train=y[:train], x_test=x[train:], y_test=y[train:])
    return path


def prepare(words: list[str], folder: pathlib.Path) -> dict[str, Any]:
    """Looks for the fastest layout, in this process; of federated averaging also writes what pfl reads, and returns its job."""
    import jax

    from fedjax_ssl import build, tune
    from fedjax_ssl.experiment.settings import Settings
    from launch import command

    command.use_all_cores()
    command.keep_programs()
    command.parse([sys.argv[0], *words])
    experiment, began = build(Settings.from_dict(command.CONFIG.value.to_dict())), time.perf_counter()
    if experiment.settings.execution.tune != "never":
        experiment = tune(experiment)
    found = {"tuning_s": time.perf_counter() - began, "layout": experiment.layout._asdict()}
    found |= {"device": devices(experiment.layout.devices), "rounds": experiment.settings.rounds}
    found |= {"cohort": experiment.settings.cohort_size}
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    settings, client = experiment.settings, experiment.settings.client
    if settings.model["name"] != "emnist_cnn":
        return found
    state, _ = experiment.start()
    jobs.write_data(folder, experiment, experiment.problem.data.labeled, jobs.torch_weights(state.server.weights.params))
    own = {"clients": settings.data.num_clients, "cohort": settings.cohort_size, "eval_every": settings.eval_every}
    own |= {"batch_size": client.batch_size, "epochs": client.epochs, "learning_rate": client.optimizer.learning_rate}
    own |= {"precision": "float32" if settings.execution.precision == "float32" else "tensorfloat32"}
    return found | {"job": jobs.CNN | own | {"kind": "cnn", "device": device}}


def once(path: pathlib.Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a file holds; where it is missing, what is made now, and kept unless it is an error or was left out."""
    if path.exists():
        return json.loads(path.read_text())
    made = make()
    if "error" not in made and "left_out" not in made:
        path.write_text(json.dumps(made))
    return made


def command(words: list[str], log: pathlib.Path, limits: Limits, ask_first: float = 0.0) -> dict[str, Any]:
    """Runs a Python program within the limits: nothing, or `error` or `left_out`."""
    if limits.left < programs.LEAST_S + ask_first:
        return {"left_out": "not finished, --budget is used up: the same command goes on"}
    try:
        status = programs.run([sys.executable, *words], log, limits.left - ask_first, ask_first=ask_first)
    except subprocess.TimeoutExpired:
        status = -1
    if status in (-1, 143):
        return {"left_out": "not finished, --budget was used up: the same command goes on"}
    return {"error": programs.last_error(log.read_text(errors="replace")) or f"exit status {status}"} if status else {}


def ours(words: list[str], workdir: pathlib.Path, rounds: int, whole: int, limits: Limits) -> dict[str, Any]:
    """The first rounds of a run by `launch.run`, or as many of them as there is time for: what came of them."""
    folder = workdir / "ours"
    stop = [f"--stop_after={rounds}"] if rounds < whole else []
    found = command(["-m", "launch.run", *words, f"--workdir={folder}", *stop], workdir / "ours.log", limits, TO_SAVE_S)
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        return found
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    layout = json.loads((folder / "layout.json").read_text())["layout"]
    total, compiling = rows[-1]["time/total_s"], rows[-1]["time/compile_s"]
    begun = rows[0]["time/total_s"] - rows[0]["time/round_s"]  # initialized and compiled, but for evaluation
    about = {"accuracy": accuracies[-1:], "layout": layout, **spread([row["time/round_s"] for row in rows])}
    return {**found, **reckoned(len(rows), whole, total, max(begun, compiling)), "compile_s": compiling, **about}


def reckoned(rounds: int, whole: int, total: float, once: float = 0.0) -> dict[str, Any]:
    """The seconds of a whole run from those of its first rounds: all but what is done once grow with them."""
    seconds = once + (total - once) * whole / rounds
    return {"rounds": rounds, "of": whole, "total_s": seconds, "extrapolated": rounds < whole}


def spread(seconds: list[float]) -> dict[str, Any]:
    """Median and quartiles of rounds."""
    low, median, high = quartiles(seconds)
    return {"round_s": median, "quartiles_s": [low, high]}


def pfl(
    job: dict[str, Any], workdir: pathlib.Path, rounds: int, whole: int, arguments: argparse.Namespace, limits: Limits
) -> dict[str, Any]:
    """The first rounds of the same work in pfl-research, in its best number of processes: what came of them."""
    environments = Environments.of(arguments)
    if error := environments.install("pfl"):
        return {"error": error}

    threads = len(os.sched_getaffinity(0))
    counts = arguments.processes or programs.processes_of(job["device"], threads)

    def attempt(name: str, **own: int) -> dict[str, Any]:
        folder = workdir / name
        folder.mkdir(exist_ok=True)
        if not (folder / "data.npz").exists():
            os.link(workdir / "data.npz", folder / "data.npz")
        rival = Rival(name, "pfl", {"threads": threads, **own})
        return once(folder / "kept.json", lambda: limits.attempt(rival, job, folder, environments))

    trial = arguments.trial
    trials = {n: attempt(f"pfl-{trial}-{n}", processes=n, warm_up=WARM_UP, rounds=trial) for n in counts}
    able = {n: float(np.mean(report["seconds"])) for n, report in trials.items() if "seconds" in report}
    left_out = [report for report in trials.values() if "left_out" in report]  # which may be the best
    if left_out or not able:
        return next(iter(left_out or trials.values()))
    best = min(able, key=able.__getitem__)
    report = attempt(f"pfl-{rounds}-{best}", processes=best, warm_up=0, rounds=rounds)
    if "seconds" not in report:
        return report
    # In its first round pfl also evaluates all clients of the cohort, and PyTorch chooses its algorithms: more than in the
    # others that end with an evaluation on the test set.
    evaluated = report["seconds"][:: job["eval_every"]]
    first = max(0.0, evaluated[0] - float(np.mean(evaluated[1:] or evaluated)))
    found = reckoned(rounds, whole, sum(report["seconds"]), first) | {"compile_s": 0.0}
    found |= {
        **spread(report["seconds"]),
        "accuracy": [report["accuracy"]],
        "processes": best,
        "trials_s": able,
        "versions": report["versions"],
    }
    return found | {"failed": {n: report["error"] for n, report in trials.items() if "error" in report}}


def line(name: str, r: dict[str, Any]) -> str:
    """A line of the table."""
    if "total_s" not in r:
        return f"{name:24} {r.get('error') or r.get('left_out')}"
    accuracy = f"{100 * r['accuracy'][0]:.1f}" if r["accuracy"] else ""
    total, rounds = f"{'~' if r['extrapolated'] else ''}{r['total_s']:,.0f}", f"{r['rounds']:,}/{r['of']:,}"
    problem = r.get("error") or r.get("left_out") or ""
    return f"{name:24} {rounds:>12} {total:>9} {r['compile_s']:10.0f} {accuracy:>10}  {problem}".rstrip()


def main() -> None:
    """Runs, prints a table and writes it as JSON; exit status 1 where a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder for the runs")
    parser.add_argument("--data_dir", default="", help="TFDS folder with cifar10")
    parser.add_argument("--random", action="store_true", help="random images in place of CIFAR-10")
    parser.add_argument("--rounds", type=int, help="how many of ours are run, from which the total is reckoned; default: all")
    parser.add_argument("--pfl_rounds", type=int, help="how many of pfl's; default: as many as of ours")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of all")
    parser.add_argument("--processes", nargs="+", type=int, help="of pfl that are tried; default: as `compare` has them")
    parser.add_argument("--trial", type=int, default=20, help="rounds of each that are timed")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    Environments.add_options(parser)
    arguments, extra = parser.parse_known_args()
    experiment, workdir = EXPERIMENTS[arguments.experiment], arguments.workdir / arguments.experiment
    if arguments.prepare:
        (workdir / "found.json").write_text(json.dumps(prepare(extra, workdir)))
        return
    if arguments.experiment == "pfl" and arguments.peers is None:
        parser.error("the following arguments are required: --peers")
    workdir.mkdir(parents=True, exist_ok=True)
    words = words_of(experiment, arguments, extra)
    kept = workdir / "prepared.json"
    if kept.exists() and (there := json.loads(kept.read_text())["words"]) != words:
        parser.error(f"{workdir} holds another run: {' '.join(there)}; give another --workdir")
    limits = Limits(math.inf, time.monotonic() + arguments.budget)

    def prepared() -> dict[str, Any]:
        of_layout = ["-m", "benchmarks.full_runs", arguments.experiment, f"--workdir={arguments.workdir}", "--prepare", *words]
        ended = command(of_layout, workdir / "prepare.log", limits)
        return ended or {"words": words, **json.loads((workdir / "found.json").read_text())}

    found = once(kept, prepared)
    results = {programs.OURS: found}
    if "tuning_s" in found:
        whole = found["rounds"]
        rounds = min(arguments.rounds or whole, whole)
        results = {programs.OURS: ours(words, workdir, rounds, whole, limits) | {"tuning_s": found["tuning_s"]}}
        if "job" in found:
            results["pfl"] = pfl(found["job"], workdir, min(arguments.pfl_rounds or rounds, whole), whole, arguments, limits)
    report(experiment, results, found, arguments)


def report(
    experiment: Experiment, results: dict[str, dict[str, Any]], found: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """Prints the results and writes them; exit status 1 where one is an error."""
    print(f"{'program':24} {'rounds':>12} {'total s':>9} {'compiling':>10} {'accuracy %':>10}")
    print("\n".join(line(name, r) for name, r in results.items()))
    if "tuning_s" in found:
        print(f"the layout was looked for in {found['tuning_s']:.0f} s; ~: from fewer rounds; expected {experiment.expected} %")
    totals = [r["total_s"] for r in results.values() if "total_s" in r]
    ratio = {"times_ours": totals[1] / totals[0]} if len(totals) > 1 else {}
    if ratio:
        print(f"pfl takes {ratio['times_ours']:.2f} times as long")
    if arguments.json:
        about = {"experiment": arguments.experiment, "random_images": arguments.random, "expected": experiment.expected}
        about |= {"cohort": found.get("cohort")}
        about = {**provenance(found.get("device", "unknown")), **about, **ratio, "results": results}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    if any("error" in r for r in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    ask_for_huge_pages()
    main()
