"""The same work here and in what a user would pick instead: pfl-research, Flower's simulation, a plain PyTorch loop.

    python -m benchmarks.compare --peers=DIR [--only cnn fl2] [--json=benchmarks/results/compare_cpu.json]

`cnn`: rounds of pfl-research's CIFAR-10 benchmark, FedAvg on `emnist_cnn` with 1,000 clients of 50 images, batches of 10, one
epoch, SGD .1, dropout on, cohorts of 10 and 50. `fl2`: the clients' part of a round of (FL)^2 on WRN-28-2 (pseudo-labels, steps
with SACR and ASAM, the weighted average), which no simulator has, beside a PyTorch loop of the same, in the faster of its two
memory layouts. Images are random, and the same for all.

Here the layout is tuned first, once (`fedjax_ssl.tune`), as `launch.run` does before a long run; the results name it.

Before anything is timed, each program runs a job that no order of examples changes, without dropout, in float32, from the same
initial weights; its change of the model must agree with the one here, as ||a - b|| / ||b||, to 1e-4, or, of (FL)^2, 2.5e-3:
there rounding alone grows to 1.4e-3 in two steps, and no part of the method can be left out below 3.7e-3. Then each program
runs alone, in a process of its own, in turns, `--repeats` times: 3 rounds to warm up, then `--rounds`; median and quartiles
over all of them. Compilation, data and imports are in no round. Images are seen as they are, without augmentation.

The peers are installed with their own virtual environments under DIR, where they are not there yet: `--torch` is what pip is
asked for as PyTorch. Every program has the first `--threads` cores. pfl runs in one process and in as many as there are
threads, or in each of `--processes`, Flower likewise, in that many actors; the best of them is the rival. On a GPU
(`--device=cuda`) all multiply float32 in `--precision`. PyTorch is eager, as in the peers' own benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

SCRIPTS = pathlib.Path(__file__).parent / "peers"
PEERS = {"pfl": "pfl==0.6.0", "flower": "flwr[simulation]==1.41.0", "pytorch": ""}
WARM_UP = 3
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
OURS = "fedjax_ssl"
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PFL_PYTORCH_DEVICE": "cpu"}
"""Keeps a program from a GPU that there is."""
CNN = {
    "clients": 1000,
    "batch_size": 10,
    "epochs": 1,
    "learning_rate": 0.1,
    "dropout": True,
    "per_client": 50,
    "one_image": False,
}
FL2 = {
    "clients": 2, "cohort": 2, "batch_size": 32, "epochs": 1, "learning_rate": 0.03, "dropout": False, "per_client": 64,
    "confidence": 0.28, "rho": 0.1, "depth": 28, "width": 2, "eval_batch_size": 250, "channels_last": False,
}  # fmt: skip
CNN_CHECKED = {"clients": 10, "cohort": 10, "learning_rate": 0.05, "dropout": False, "one_image": True, "rounds": 2}
FL2_CHECKED = {"batch_size": 32, "per_client": 32, "epochs": 2, "depth": 10, "rounds": 1, "learning_rate": 0.01}
"""A job of each kind, and what differs where it is checked: few steps, in which rounding grows, that no order of examples
changes, as each of the CNN's clients has one image many times, and (FL)^2's batches are all that a client has."""
CLASSIFIER = 5.0
"""(FL)^2's classifier begins so many times as large: else all examples are of one class, and equally confident."""


def cnn_experiment(job: dict[str, Any]) -> Any:
    """Federated averaging on random images."""
    from configs import pfl_cifar10
    from fedjax_ssl import build
    from fedjax_ssl.data.sources import from_arrays

    config = pfl_cifar10.get_config()
    config.rounds = config.eval_every = 10**9
    config.data.num_clients, config.cohort_size = job["clients"], job["cohort"]
    config.client.update(batch_size=job["batch_size"], epochs=job["epochs"])
    config.client.optimizer.learning_rate = job["learning_rate"]
    config.data.update(mean=MEAN, std=STD)
    config.execution.precision = job["precision"]
    config.model.variant = "paper" if job["dropout"] else "plain"
    images = random_images(job["clients"] * job["per_client"])
    if job["one_image"]:  # ten clients, of one class each
        config.data.update(partition="class_shards", classes_per_client=1)
        images["train_images"] = images["train_images"][images["train_labels"]]
    return build(config.to_dict(), from_arrays(**images))


def fl2_experiment(job: dict[str, Any]) -> Any:
    """(FL)^2 on random images."""
    from configs import fl2_cifar10
    from fedjax_ssl import build
    from fedjax_ssl.data.sources import from_arrays

    config = fl2_cifar10.get_config("paper,labels=10,split=iid")
    config.data.num_clients, config.cohort_size = job["clients"], job["cohort"]
    config.data.update(weak="none", strong="none", mean=MEAN, std=STD)
    config.server.sbn_data, config.server.pretrain = "labeled", 0
    config.client.update(batch_size=job["batch_size"], epochs=job["epochs"])
    config.client.optimizer.update(learning_rate=job["learning_rate"], schedule="constant", persistent=False)
    config.method.confidence, config.method.rho = job["confidence"], job["rho"]
    config.execution.batch_size = job["eval_batch_size"]
    config.model.depth, config.model.width = job["depth"], job["width"]
    config.execution.precision = job["precision"]
    config.execution.strategy = "sharded"  # the loops over clients that `run_round` has
    return build(config.to_dict(), from_arrays(**random_images(10 + job["clients"] * job["per_client"])))


def random_images(count: int) -> dict[str, np.ndarray]:
    """Noise of a color and a contrast of each image's own, with labels in turn."""
    rng, labels = np.random.default_rng(0), np.arange(count) % 10
    color, contrast = rng.uniform(64, 192, (count, 1, 1, 3)), rng.uniform(0, 64, (count, 1, 1, 1))
    images = np.stack([np.uint8(c + s * rng.uniform(-1, 1, (32, 32, 3))) for c, s in zip(color, contrast, strict=True)])
    return {"train_images": images, "train_labels": labels, "test_images": images[:10], "test_labels": labels[:10]}


def torch_weights(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters of `emnist_cnn` by the names and in the layouts of the peers' network: it flattens channels first."""
    first, second, third, last = (params[name] for name in ("Conv_0", "Conv_1", "Dense_0", "Dense_1"))
    flat = np.asarray(third["kernel"]).reshape(14, 14, 64, 128).transpose(2, 0, 1, 3).reshape(12544, 128)
    return {
        "conv1.weight": np.asarray(first["kernel"]).transpose(3, 2, 0, 1), "conv1.bias": first["bias"],
        "conv2.weight": np.asarray(second["kernel"]).transpose(3, 2, 0, 1), "conv2.bias": second["bias"],
        "linear1.weight": flat.T, "linear1.bias": third["bias"],
        "linear2.weight": np.asarray(last["kernel"]).T, "linear2.bias": last["bias"],
    }  # fmt: skip


def torch_wide_resnet(params: dict[str, Any], stats: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Likewise of `wide_resnet`, with its static batch-norm statistics where they are given."""

    def conv(layer: dict[str, Any]) -> np.ndarray:
        return np.asarray(layer["kernel"]).transpose(3, 2, 0, 1)

    def norm(name: str, layer: dict[str, Any], stats: dict[str, Any] | None) -> dict[str, np.ndarray]:
        of_stats = {} if stats is None else {f"{name}.running_mean": stats["mean"], f"{name}.running_var": stats["var"]}
        return {f"{name}.weight": layer["scale"], f"{name}.bias": layer["bias"], **of_stats}

    found = {"conv.weight": conv(params["Conv_0"])}
    for number in range(sum(name.startswith("Block_") for name in params)):
        block, own = params[f"Block_{number}"], stats and stats[f"Block_{number}"]
        for i, name in enumerate(("norm1", "norm2")):
            found |= norm(f"blocks.{number}.{name}", block[f"BatchNorm_{i}"], own and own[f"BatchNorm_{i}"])
        for i, name in enumerate(("conv1", "conv2", "shortcut")):
            if f"Conv_{i}" in block:
                found[f"blocks.{number}.{name}.weight"] = conv(block[f"Conv_{i}"])
    found |= norm("norm", params["BatchNorm_0"], stats and stats["BatchNorm_0"])
    return found | {"linear.weight": np.asarray(params["Dense_0"]["kernel"]).T, "linear.bias": params["Dense_0"]["bias"]}


def write_data(folder: pathlib.Path, experiment: Any, rows: Any, weights: dict[str, np.ndarray]) -> None:
    """Writes what the peers read: each client's images and labels, as the split here has them, and the initial weights."""
    train, index = experiment.problem.data.train, np.asarray(rows.index)
    arrays = {f"w:{name}": np.asarray(value, np.float32) for name, value in weights.items()}
    images, labels = np.asarray(train.images)[index], np.asarray(train.labels)[index]
    np.savez(folder / "data.npz", images=images, labels=labels, mean=MEAN, std=STD, **arrays)


def run_cnn(job: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The rounds here; leaves the data for the peers and the model at the end."""
    from fedjax_ssl import tune

    experiment = tune(cnn_experiment(job))
    state, row = experiment.start()
    write_data(folder, experiment, experiment.problem.data.labeled, torch_weights(state.server.weights.params))
    seconds, rounds = [], experiment.rounds(state, row)
    for _ in range(job["warm_up"] + job["rounds"]):
        state, row = next(rounds)
        seconds.append(row["time/round_s"])
    np.savez(folder / "weights.npz", **torch_weights(state.server.weights.params))
    return {"seconds": seconds[job["warm_up"] :], "layout": experiment.layout._asdict()}


def run_fl2(job: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The clients' part of the rounds here, each from the same model."""
    import jax

    from fedjax_ssl import tune
    from fedjax_ssl.simulation.round import run_round
    from fedjax_ssl.simulation.simulator import Program

    experiment = tune(fl2_experiment(job))
    method, data, _, cohort_size = experiment.problem
    clients = method._replace(server_update=lambda server, aggregate, *_: (aggregate.update, {}))
    state, _ = experiment.start()
    params, stats = state.server.weights
    last = {name: CLASSIFIER * value for name, value in params["Dense_0"].items()}
    params = {**params, "Dense_0": last}
    state = state._replace(server=state.server._replace(weights=state.server.weights._replace(params=params)))
    write_data(folder, experiment, data.unlabeled, torch_wide_resnet(params, stats))
    execution = experiment.simulator.execution

    def change(state: Any, data: Any) -> Any:
        return run_round(clients, state, data, cohort_size, execution)[0].server.params

    program = Program(change, execution)
    placed, seconds = jax.device_put(data, state.round.sharding), []
    for _ in range(job["warm_up"] + job["rounds"] + 1):  # the first compiles
        started = time.perf_counter()
        changed = jax.block_until_ready(program(state, placed))
        seconds.append(time.perf_counter() - started)
    end = jax.tree.map(lambda w, c: w - c, params, changed)
    np.savez(folder / "weights.npz", **torch_wide_resnet(end))
    return {"seconds": seconds[job["warm_up"] + 1 :], "layout": experiment.layout._asdict()}


class Kind(NamedTuple):
    """A kind of job: its settings, what differs where it is checked and by how much a model may, how it runs here, cohorts."""

    job: dict[str, Any]
    checked: dict[str, Any]
    tolerance: float
    run: Callable[[dict[str, Any], pathlib.Path], dict[str, Any]]
    cohorts: list[int]


KINDS = {"cnn": Kind(CNN, CNN_CHECKED, 1e-4, run_cnn, [10, 50]), "fl2": Kind(FL2, FL2_CHECKED, 2.5e-3, run_fl2, [2])}


def here(folder: pathlib.Path) -> None:
    """Runs a folder's job in this process, which does nothing else."""
    from launch.command import keep_programs, use_all_cores

    use_all_cores()
    keep_programs()
    job = json.loads((folder / "job.json").read_text())
    report = KINDS[job["kind"]].run(job, folder)
    (folder / "report.json").write_text(json.dumps({**report, "versions": {}}))


def launch(program: str, job: dict[str, Any], folder: pathlib.Path, peers: pathlib.Path) -> dict[str, Any]:
    """Runs a job by a program in a process of its own: its report, or `error`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "report.json").unlink(missing_ok=True)
    if program == OURS:
        command = [sys.executable, "-m", "benchmarks.compare", f"--worker={folder}"]
    else:
        python = [str((peers / program / "bin" / "python").absolute())]
        if program == "pfl" and job["processes"] > 1:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={job['processes']}"]
        script = "run_pytorch_fl2" if job["kind"] == "fl2" else f"run_{program}"
        command = [*python, str(SCRIPTS / f"{script}.py"), str(folder)]
    environment = dict(os.environ) if job["device"] != "cpu" else {**os.environ, **ON_CPU}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode or not (folder / "report.json").exists():
        named = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.split("\n")
        return {"error": (named[-1].strip() if any(named) else "") or f"exit status {done.returncode}"}
    return json.loads((folder / "report.json").read_text())


def install(peers: pathlib.Path, torch: str) -> None:
    """Makes the virtual environments of the peers that are not there."""
    for name, package in PEERS.items():
        folder = peers / name
        if (folder / "installed").exists():
            continue
        print(f"installing {name} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *torch.split(), "numpy"], check=True)
        if package:
            subprocess.run([*pip, package], check=True)
        (folder / "installed").touch()


def change(folder: pathlib.Path) -> np.ndarray:
    """What a job changed in the model, as one vector in the order of the parameters' names."""
    with np.load(folder / "weights.npz") as end, np.load(folder / "data.npz") as start:
        return np.concatenate([(end[name] - start[f"w:{name}"]).ravel() for name in sorted(end.files)])


def difference(ours: pathlib.Path, theirs: pathlib.Path) -> float:
    """||theirs - ours|| / ||ours|| of two jobs' changes."""
    a, b = change(ours), change(theirs)
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


class Rival(NamedTuple):
    """What runs a job: its name, its program (a key of PEERS, or OURS), and what its job has of its own."""

    name: str
    program: str
    own: dict[str, Any]


def rivals_of(kind: str, processes: list[int]) -> Iterator[Rival]:
    """Everything that runs a kind of job, ours first; pfl and Flower with each number of processes, Flower with several."""
    yield Rival(OURS, OURS, {})
    yield Rival("PyTorch", "pytorch", {})
    if kind == "fl2":
        yield Rival("PyTorch, channels last", "pytorch", {"channels_last": True})
        return
    yield from (Rival(f"pfl, {number} processes", "pfl", {"processes": number}) for number in processes)
    several = [number for number in processes if number > 1] or processes
    yield from (Rival(f"Flower, {number} actors", "flower", {"processes": number}) for number in several)


def in_turn(rivals: list[Rival], job: dict[str, Any], peers: pathlib.Path, scratch: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Runs a job by each rival, in a folder of its own: their reports by name. The data are the first one's, which is ours."""
    reports, first = {}, scratch / rivals[0].name
    for rival in rivals:
        folder = scratch / rival.name
        if rival.program != OURS and not folder.exists():
            folder.mkdir(parents=True)
            if (first / "data.npz").exists():
                os.link(first / "data.npz", folder / "data.npz")
        reports[rival.name] = launch(rival.program, job | rival.own, folder, peers)
    return reports


def compare(kind: str, cohort: int, arguments: argparse.Namespace, scratch: pathlib.Path) -> list[dict[str, Any]]:
    """Checks, then times everything that runs a kind of job at one cohort, ours first: a result of each."""
    base = KINDS[kind].job | {"kind": kind, "device": arguments.device, "threads": arguments.threads, "processes": 1}
    timed = base | {"cohort": cohort, "warm_up": WARM_UP, "rounds": arguments.rounds, "precision": arguments.precision}
    timed["clients"] = max(cohort, timed["clients"])
    rivals = list(rivals_of(kind, arguments.processes or sorted({1, arguments.threads})))
    checked = base | KINDS[kind].checked | {"warm_up": 0, "precision": "float32"}
    results = in_turn(rivals, checked, arguments.peers, scratch / "checked")
    for name, report in results.items():
        if "error" in results[OURS] and name != OURS:
            report["error"] = f"not compared, as {OURS} failed"
        if "error" not in report:
            report["difference"] = difference(scratch / "checked" / OURS, scratch / "checked" / name)
            if not report["difference"] <= KINDS[kind].tolerance:
                report["error"] = f"its model differs by {report['difference']:.1e}"
        report["seconds"] = []
    for _ in range(arguments.repeats):
        able = [rival for rival in rivals if "error" not in results[rival.name]]
        if not able or able[0].program != OURS:
            break
        for name, report in in_turn(able, timed, arguments.peers, scratch / "timed").items():
            results[name]["seconds"] += report.get("seconds", [])
            results[name] |= {"error": report["error"]} if "error" in report else {}
    images = cohort * timed["per_client"] * timed["epochs"]
    ours = results[OURS]["seconds"]
    about = {"kind": kind, "cohort": cohort}
    return [{**about, "name": name, **summary(report, images, ours)} for name, report in results.items()]


def summary(report: dict[str, Any], images: int, ours: list[float]) -> dict[str, Any]:
    """A report with the median and quartiles of its rounds of so many images, and its median over ours."""
    if "error" in report:
        return report
    if not (report["seconds"] and ours):
        return report | {"error": f"not compared, as {OURS} failed"}
    low, median, high = (float(s) for s in np.quantile(report["seconds"], (0.25, 0.5, 0.75)))
    rates = {"round_s": median, "quartiles_s": [low, high], "images_per_s": images / median}
    return report | rates | {"times_ours": median / float(np.median(ours))}


def line(r: dict[str, Any]) -> str:
    """A line of the table."""
    what = f"{r['kind']:4} {r['cohort']:4} {r['name']:24}"
    if "error" in r:
        return f"{what} {r['error']}"
    spread = "{:.3f} - {:.3f}".format(*r["quartiles_s"])
    ratio, differs = r.get("times_ours", 0), r["difference"]
    return f"{what} {r['round_s']:8.3f} {spread:>17} {r['images_per_s']:9,.0f} {ratio:6.2f} {differs:9.1e}"


def main() -> None:
    """Compares, prints a table and writes it as JSON; exit status 1 where a program failed or disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path, help="folder of the peers' virtual environments")
    parser.add_argument("--torch", default="torch", help="what pip installs as PyTorch, with its options")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--cohort", nargs="+", type=int, help="clients a round, of all kinds; default: 10 and 50, and 2 of fl2")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of a process")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each program")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the peers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores that a program has")
    parser.add_argument("--processes", nargs="+", type=int, help="of pfl and Flower; default: one, and one a thread")
    parser.add_argument("--precision", default="tensorfloat32", choices=("tensorfloat32", "float32"), help="of a GPU")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        here(arguments.worker)
        return
    if arguments.peers is None:
        parser.error("the following arguments are required: --peers")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # and so those of all programs
    install(arguments.peers, arguments.torch)
    print(f"{'kind':4} {'M':>4} {'program':24} {'round s':>8} {'quartiles':>17} {'images/s':>9} {'/ ours':>6} {'differs':>9}")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in arguments.only:
            for cohort in arguments.cohort or KINDS[kind].cohorts:
                found = compare(kind, cohort, arguments, pathlib.Path(scratch) / f"{kind}-{cohort}")
                results += found
                print("\n".join(map(line, found)), flush=True)
    if arguments.json:
        from benchmarks.provenance import provenance

        settings = {"threads": arguments.threads, "precision": arguments.precision, "warm_up": WARM_UP, "cnn": CNN, "fl2": FL2}
        arguments.json.write_text(json.dumps({**provenance(), **settings, "results": results}, indent=1) + "\n")
    if any("error" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
