"""The same work here and in what a user would pick instead: pfl-research, Flower's simulation, a plain PyTorch loop.

    python -m benchmarks.compare --peers=DIR --json=benchmarks/results/compare_<machine>.json

`cnn` is FedAvg in pfl-research's CIFAR-10 benchmark; `fl2` is (FL)^2 on WRN-28-2, where our server takes one step of rate 0 and
PyTorch's none, also in bfloat16 where the processor multiplies it; `feddure` is a step of FedDure on ResNet-9 with 10 labeled
and 90 unlabeled images, by SGD. Each program first runs a job that no order of examples changes: its change of the model must
agree with ours to TOLERANCE. Then each runs in processes of its own, in balanced turns. Of pfl and Flower, in one process or
several, the fastest in the first turn goes on. pip installs the peers under DIR. Run time: 45 minutes on two CPU cores. Needs
Linux.
"""

import functools
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, round_time
from benchmarks.harness import Result, Rows, Worker, WorkerError
from benchmarks.programs import RUNS_LONG
from fedjax_ssl.models.convolution import multiplies_bfloat16

SCRIPTS = pathlib.Path(__file__).parent / "peers"
PEERS = {"pfl": ["pfl==0.6.0"], "flower": ["flwr[simulation]==1.41.0"], "pytorch": []}  # and PyTorch
OLDER = ("3.12", "3.11", "3.10")  # Python versions
OURS = "fedjax_ssl"
ON = {"cpu": {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PFL_PYTORCH_DEVICE": "cpu"}, "cuda": {}}
TOLERANCE = 1e-4
"""How far a peer's change of the model may be from ours, as ||a - b|| / ||b||. Our convolutions agree to 3e-5 in (FL)^2's;
a hundredth more of ASAM's radius or of the consistency term, or any part left out, makes more than 1.5e-3."""
TIMEOUT_S = 1200.0
ALIKE = {"epochs": 1, "side": 32, "channels_last": False, "float64": False, "dtype": "float32"}
CNN = {"clients": 1000, "per_client": 50, "batch_size": 10, "learning_rate": 0.1, "dropout": True, "rounds": 5}
FL2 = {"clients": 2, "per_client": 64, "batch_size": 32, "learning_rate": 0.03, "confidence": 0.28, "rho": 0.1, "rounds": 3}
FL2 |= {"depth": 28, "width": 2, "eval_batch_size": 250}
FEDDURE = {"clients": 2, "per_client": 100, "learning_rate": 0.01, "eta_s": 0.01, "eta_w": 5e-4, "steps": 1, "rounds": 3}
JOBS: dict[str, dict[str, Any]] = {"cnn": ALIKE | CNN, "fl2": ALIKE | FL2, "feddure": ALIKE | FEDDURE}
CHECKED: dict[str, dict[str, Any]] = {
    "cnn": {"learning_rate": 0.05, "dropout": False, "rounds": 2},
    "fl2": {"per_client": 8, "epochs": 2, "depth": 10, "rounds": 1, "learning_rate": 0.01, "float64": True},
    "feddure": {"eta_w": 0.05, "rounds": 1, "side": 8, "float64": True},
}
"""What differs where a job is checked: few steps, in which rounding grows; the CNN's clients have one image each, many times,
and the batches of (FL)^2 and of FedDure are all that a client has. FedDure takes one step, in which F-reg moves far. `float64`
is how a peer computes. Programs in bfloat16 are checked in float32."""
COHORTS = {"cnn": {"cpu": [10, 50], "cuda": [10, 50]}, "fl2": {"cpu": [2], "cuda": [10]}, "feddure": {"cpu": [2], "cuda": [10]}}
HEAD = ("job", "clients", "program", "s a round (quartiles)", "times ours (turns)", "images/s", "model differs")


def rows(one: Result) -> Rows:
    """A program's row of the table."""
    seconds, ratio = harness.between(one, "seconds", "quartiles"), harness.between(one, "ratio", "least_and_greatest")
    rate = harness.number(one["images_per_s"]) if "images_per_s" in one else ""
    return [[*map(str, one["case"].values()), seconds, ratio, rate, f"{one['difference']:.0e}" if "difference" in one else ""]]


class Rival(NamedTuple):
    """What runs a job: its name, its program (a key of PEERS, or OURS), and what its job has of its own."""

    name: str
    program: str
    own: dict[str, Any] = {}  # noqa: RUF012


def rivals_of(kind: str, processes: list[int]) -> list[Rival]:
    """Everything that runs a kind of job, ours first; pfl and Flower with each number of processes.

    (FL)^2 in bfloat16, too, where the processor has units for it; PyTorch by autocast.
    """
    last = {"channels_last": True}
    ours = [Rival(OURS, OURS), Rival("PyTorch", "pytorch"), Rival("PyTorch, channels last", "pytorch", last)]
    if kind == "fl2" and multiplies_bfloat16():
        half = {"dtype": "bfloat16"}
        ours += [Rival(f"{OURS}, bfloat16", OURS, half), Rival("PyTorch, channels last, bfloat16", "pytorch", last | half)]
    if kind != "cnn":
        return ours
    pfl = [Rival(f"pfl, {number} processes", "pfl", {"processes": number}) for number in processes]
    return [*ours, *pfl, *(Rival(f"Flower, {number} actors", "flower", {"processes": number}) for number in processes)]


def config_of(job: dict[str, Any]) -> dict[str, Any]:
    """The config of a job here."""
    from configs import fl2_cifar10, pfl_cifar10

    alike = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    if job["kind"] == "feddure":
        workload = round_time.WORKLOADS["feddure_resnet9"]
        config = round_time.config_of(workload, f"precision={job['precision']}", job["cohort"], job["steps"])
        config["data"] |= alike | {"image_size": job["side"]}
        # Not Adam: it makes steps of the gradients of biases before batch norm, which are 0 but for rounding.
        sgd = {"name": "sgd", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        config["client"]["optimizer"] = sgd | {"learning_rate": job["learning_rate"]}
        config["method"] |= {"eta_s": job["eta_s"], "eta_w": job["eta_w"]}
        return config
    if job["kind"] == "cnn":
        config = pfl_cifar10.get_config()
        config.model.variant = "paper" if job["dropout"] else "plain"
        if job["checked"]:  # clients of one class each
            config.data.update(partition="class_shards", classes_per_client=1)
    else:
        config = fl2_cifar10.get_config("paper,labels=10,split=iid")
        config.data.update(weak="none", strong="none")
        config.server.static_norm.data, config.server.optimizer.momentum = "labeled", 0.0
        config.server.training.update(pretrain=0, epochs=0, steps=1)
        config.server.training.optimizer.update(learning_rate=1e-30, weight_decay=0.0)
        config.client.optimizer.update(schedule="constant", persistent=False)
        config.method.update(confidence=job["confidence"], rho=job["rho"])
        config.model.update(depth=job["depth"], width=job["width"])
    config.client.update(batch_size=job["batch_size"], epochs=job["epochs"])
    config.client.optimizer.learning_rate = job["learning_rate"]
    config.data.update(num_clients=job["clients"], **alike)
    config.update(cohort_size=job["cohort"], **RUNS_LONG)
    config.execution.update(precision=job["precision"], dtype="float32" if job["checked"] else job["dtype"])
    return config.to_dict()


def run_ours(job: dict[str, Any], folder: pathlib.Path) -> Result:
    """A job's rounds here: its report, or `error`; the peers' data and the model at the end lie in the folder."""
    count = job["clients"] * job["per_client"] + (10 if job["kind"] == "fl2" else 0)
    data = {"count": count, "shape": (job["side"], job["side"], 3), "sorted_by_class": job["kind"] == "cnn" and job["checked"]}
    try:
        with Worker(environment=ON[job["device"]]) as worker:
            worker.ask("build", config=config_of(job), data=data)
            worker.ask("write_start", folder=str(folder))
            found = worker.ask("rounds", number=job["warm_up"] + job["rounds"])
            worker.ask("write_end", folder=str(folder))
            about = worker.ask("about")
    except WorkerError as error:
        return {"error": str(error)}
    seconds = [row["seconds"] for row in found[job["warm_up"] :]]
    return {"seconds": seconds, "device": about["device"], "compile_s": about["compile_s"]}


def run_peer(rival: Rival, job: dict[str, Any], folder: pathlib.Path, peers: pathlib.Path) -> Result:
    """A job's rounds by a peer in processes of its own: its report, or `error`."""
    if error := install(rival.program, peers):
        return {"error": error}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "report.json").unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # which is for this Python
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={job['processes']}"]
    several = torchrun if rival.program == "pfl" and job["processes"] > 1 else []
    script = job["kind"] if rival.program == "pytorch" else rival.program
    command = [f"{peers}/{rival.program}/bin/python", *several, str(SCRIPTS / f"run_{script}.py"), str(folder)]
    error = harness.run_alone(command, folder / "log", TIMEOUT_S, environment | ON[job["device"]])
    return {"error": error} if error else json.loads((folder / "report.json").read_text())


@functools.cache
def install(peer: str, peers: pathlib.Path) -> str:
    """Makes a peer's virtual environment where it is not there: what went wrong, in a line, or empty."""
    folder = peers / peer
    if (folder / "installed").exists():
        return ""
    pip = [f"--python={folder}/bin/python", "install", "--quiet", "torch", "numpy", *PEERS[peer]]
    errors = []
    for python in interpreters():
        print(f"installing {peer} into {folder}, with {python}", flush=True)
        venv = [python, "-m", "venv", "--clear", "--without-pip", str(folder)]  # not every Python can give it a pip of its own
        for command in (venv, [sys.executable, "-m", "pip", *pip]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors.append(harness.last_error(done.stderr) or f"exit status {done.returncode}")
                break
        else:
            (folder / "installed").touch()
            return ""
    return (
        f"not installed: {errors[0]}; by hand: pip install {' '.join(pip[3:])} in {folder}, and add an empty file `installed`"
    )


def interpreters() -> list[str]:
    """The Python of this process, and older ones of pyenv and on PATH, as not every peer has wheels for the newest."""
    versions = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"), "versions")
    of_pyenv = [str(path) for older in OLDER for path in sorted(versions.glob(f"{older}.*/bin/python"))]
    on_path = [path for older in OLDER if (path := shutil.which(f"python{older}"))]
    return [sys.executable, *of_pyenv, *on_path]


def difference(ours: pathlib.Path, theirs: pathlib.Path) -> float:
    """||theirs - ours|| / ||ours|| of what two jobs changed in the model."""

    def change(folder: pathlib.Path) -> np.ndarray:
        with np.load(folder / "weights.npz") as end, np.load(folder / "data.npz") as start:
            trained = sorted(name for name in end.files if "running_" not in name)
            return np.concatenate([np.ravel(end[name] - start[f"w:{name}"]) for name in trained])

    a, b = change(ours), change(theirs)
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


def compared(kind: str, own: dict[str, Any], repeats: int, peers: pathlib.Path, scratch: pathlib.Path) -> Iterator[Result]:
    """One kind of job by all its rivals: the results, cohort by cohort; all jobs have `own` device, threads and precision."""
    processes = sorted({1, own["threads"]}) if own["device"] == "cpu" else [4, 5, 8]  # of pfl and of Flower
    rivals = rivals_of(kind, processes)

    def run(rival: Rival, stage: str, changes: dict[str, Any]) -> Result:
        """A job's report by a rival, in a folder of its own, whose data are those that ours left at that stage."""
        job = JOBS[kind] | {"kind": kind, "processes": 1} | own | changes | rival.own
        folder = scratch / stage / rival.name
        folder.mkdir(parents=True, exist_ok=True)
        if rival.program == OURS:
            report = run_ours(job, folder)
        else:
            if not (folder / "data.npz").exists():
                os.link(scratch / stage / OURS / "data.npz", folder / "data.npz")
            report = run_peer(rival, job, folder, peers)
        said = report.get("error") or f"{np.median(report['seconds']):.3g} s a round"
        print(f"  {stage}: {rival.name}: {said}", flush=True)
        return report

    # As many clients in each of pfl's processes: otherwise its second round draws other clients.
    clients = math.lcm(10, *processes) if kind == "cnn" else 2
    fixed = {"clients": clients, "cohort": clients, "checked": True, "warm_up": 0, "precision": "float32"}
    found: dict[str, Result] = {}
    for rival in rivals:
        if rival.name != OURS and "error" in found[OURS]:
            found[rival.name] = {"error": f"not compared, as {OURS} failed"}
            continue
        report = run(rival, "checked", CHECKED[kind] | fixed)
        if "error" not in report:
            differs = difference(scratch / "checked" / OURS, scratch / "checked" / rival.name)
            report = {"difference": differs} if differs <= TOLERANCE else {"error": f"its model differs by {differs:.1e}"}
        found[rival.name] = report
    for cohort in COHORTS[kind][own["device"]]:
        changes = {"cohort": cohort, "clients": max(cohort, JOBS[kind]["clients"]), "checked": False, "warm_up": 1}
        able = [rival for rival in rivals if "error" not in found[rival.name]]
        reports: dict[str, list[Result]] = {rival.name: [] for rival in able}
        for turn in range(repeats):
            for rival in harness.balanced(able, turn):  # the first is ours, which writes the data
                reports[rival.name].append(run(rival, f"timed-{cohort}", changes))
            able = fastest(able, reports)
        images = cohort * JOBS[kind]["per_client"] * JOBS[kind]["epochs"]
        for name, of in found.items():
            measured = summary(reports[name], reports[OURS], images) if name in reports else {}
            yield {"case": {"kind": kind, "cohort": cohort, "name": name}, **of, **measured}


def fastest(rivals: list[Rival], reports: dict[str, list[Result]]) -> list[Rival]:
    """The rivals that have not failed; of pfl, and of Flower, only the number of processes that was the fastest."""
    able = [rival for rival in rivals if "error" not in reports[rival.name][-1]]
    medians = {rival.name: float(np.median(reports[rival.name][-1]["seconds"])) for rival in able}
    best = {program: min(medians[r.name] for r in able if r.program == program) for program in {r.program for r in able}}
    return [rival for rival in able if "processes" not in rival.own or medians[rival.name] == best[rival.program]]


def summary(reports: list[Result], ours: list[Result], images: int) -> Result:
    """The reports of a program's turns as one: seconds, their median and quartiles, and the ratio to ours turn by turn."""
    if failed := [report for report in (*reports, *ours) if "error" in report]:
        return {"error": failed[0]["error"]}
    turns = [report["seconds"] for report in reports]
    ratios = [float(np.median(a) / np.median(b["seconds"])) for a, b in zip(turns, ours, strict=False)]
    found = reports[0] | harness.spread(np.ravel(turns).tolist())
    beside = {"ratio": float(np.median(ratios)), "least_and_greatest": [min(ratios), max(ratios)]}
    return {**found, "images_per_s": images / found["seconds"], "turns": turns, **beside}


def main() -> None:
    """Compares, prints a table and writes it; exit status 1 where a program failed or disagrees."""
    parser = harness.parser(__doc__)
    parser.add_argument("--peers", type=pathlib.Path, required=True, help="folder of the peers' virtual environments")
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=6, help="turns, processes of each program")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    own = {"threads": harness.cores(), "precision": "float32" if arguments.device == "cpu" else "tensorfloat32"}
    of_all = own | {"device": arguments.device}, arguments.repeats, arguments.peers.absolute()
    for program in sorted({rival.program for kind in arguments.only for rival in rivals_of(kind, [1])} - {OURS}):
        if error := install(program, arguments.peers.absolute()):
            print(f"{program}: {error}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{scratch}/programs"
        found = (one for kind in arguments.only for one in compared(kind, *of_all, pathlib.Path(scratch, kind)))
        harness.collect(arguments.json, found, rows, "1 round of each process", **own, jobs=JOBS)


if __name__ == "__main__":
    main()
