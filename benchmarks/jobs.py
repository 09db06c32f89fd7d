"""The jobs that `benchmarks/compare.py` times, and how they run here: the experiment of each, tuned, and what peers are handed.

A job is a dict of settings (see `benchmarks/peers/job.py`) in a folder, as `job.json`. Run here it leaves `report.json`, the
model at its end in `weights.npz`, and in `data.npz` what the peers read: the clients' images and labels, and the initial model.

    python -m benchmarks.jobs FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
CNN = {
    "clients": 1000, "batch_size": 10, "epochs": 1, "learning_rate": 0.1, "dropout": True, "per_client": 50,
    "one_image": False, "channels_last": False, "float64": False, "eval_every": 0,
}  # fmt: skip
FL2 = {
    "clients": 2, "batch_size": 32, "epochs": 1, "learning_rate": 0.03, "dropout": False, "per_client": 64,
    "confidence": 0.28, "rho": 0.1, "depth": 28, "width": 2, "eval_batch_size": 250, "channels_last": False,
    "float64": False, "eval_every": 0,
}  # fmt: skip
CNN_CHECKED = {"clients": 10, "cohort": 10, "learning_rate": 0.05, "dropout": False, "one_image": True, "rounds": 2}
FL2_CHECKED = {
    "clients": 2, "cohort": 2, "per_client": 8, "epochs": 2, "depth": 10, "rounds": 1, "learning_rate": 0.01, "float64": True
}  # fmt: skip
"""A job of each kind, and what differs where it is checked: few steps, in which rounding grows, that no order of examples
changes, as each of the CNN's clients has one image many times, and (FL)^2's batches are all that a client has. How many
images those are was chosen by how well our convolutions agree on a CPU: in a trial of five sizes best with 8, less with
more, probably where rounding turns a unit that is near to 0, which was not looked at unit by unit. `float64` is how a peer
computes."""
CLASSIFIER = 5.0
"""(FL)^2's classifier begins so many times as large: else all examples are of one class, and equally confident."""


def cnn_config(job: dict[str, Any]) -> Any:
    """Federated averaging."""
    from configs import pfl_cifar10

    config = pfl_cifar10.get_config()
    config.client.update(batch_size=job["batch_size"], epochs=job["epochs"])
    config.client.optimizer.learning_rate = job["learning_rate"]
    config.model.variant = "paper" if job["dropout"] else "plain"
    if job["one_image"]:  # clients of one class each
        config.data.update(partition="class_shards", classes_per_client=1)
    return config


def fl2_config(job: dict[str, Any]) -> Any:
    """(FL)^2, whose server has ten labels."""
    from configs import fl2_cifar10

    config = fl2_cifar10.get_config("paper,labels=10,split=iid")
    config.data.update(weak="none", strong="none")
    config.server.sbn_data, config.server.pretrain = "labeled", 0
    config.client.update(batch_size=job["batch_size"], epochs=job["epochs"])
    config.client.optimizer.update(learning_rate=job["learning_rate"], schedule="constant", persistent=False)
    config.method.confidence, config.method.rho = job["confidence"], job["rho"]
    config.execution.batch_size = job["eval_batch_size"]
    config.model.depth, config.model.width = job["depth"], job["width"]
    return config


def experiment_of(job: dict[str, Any], config: Any) -> Any:
    """A job's experiment, on random images."""
    from fedjax_ssl import build
    from fedjax_ssl.data.sources import from_arrays

    config.rounds = config.eval_every = 10**9
    config.data.num_clients, config.cohort_size = job["clients"], job["cohort"]
    config.data.update(mean=MEAN, std=STD)
    config.execution.precision = job["precision"]
    images = random_images(job["clients"] * job["per_client"] + (10 if job["kind"] == "fl2" else 0))
    if job.get("one_image"):
        images["train_images"] = images["train_images"][images["train_labels"]]
    return build(config.to_dict(), from_arrays(**images))


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
    """Writes what the peers read, unless it is there.

    Args:
        folder: where to, as `data.npz`.
        experiment: whose data it is; its normalization is set, or its dataset is known by name.
        rows: the clients' examples, all clients having as many.
        weights: the initial model, by the peers' names.
    """
    from fedjax_ssl.data.catalog import known

    if (folder / "data.npz").exists():
        return
    data, index = experiment.problem.data, np.asarray(rows.index)
    views = experiment.settings.data if experiment.settings.data.mean else known(experiment.settings.data.name)
    np.savez(
        folder / "data.npz",
        images=np.asarray(data.train.images)[index],
        labels=np.asarray(data.train.labels)[index],
        test_images=np.asarray(data.test.images),
        test_labels=np.asarray(data.test.labels),
        mean=views.mean,
        std=views.std,
        **{f"w:{name}": np.asarray(value, np.float32) for name, value in weights.items()},
    )


class Start(NamedTuple):
    """Where a job begins.

    Attributes:
        experiment: of the job.
        state: before its first round.
        row: its metrics.
        rows: the clients' examples.
        weights: the initial model, by the peers' names.
    """

    experiment: Any
    state: Any
    row: dict[str, Any]
    rows: Any
    weights: dict[str, np.ndarray]


def start_cnn(experiment: Any) -> Start:
    """Whole rounds, one after another."""
    state, row = experiment.start()
    weights = torch_weights(state.server.weights.params)
    return Start(experiment, state, row, experiment.problem.data.labeled, weights)


def start_fl2(experiment: Any) -> Start:
    """The clients' part of the rounds, each from the same model, in whatever layout the experiment has."""
    import jax

    experiment = clients_alone(experiment)
    state, row = experiment.start()
    params, stats = state.server.weights
    last = {name: jax.device_put(CLASSIFIER * value, value.sharding) for name, value in params["Dense_0"].items()}
    params = {**params, "Dense_0": last}
    state = state._replace(server=state.server._replace(weights=state.server.weights._replace(params=params)))
    return Start(experiment, state, row, experiment.problem.data.unlabeled, torch_wide_resnet(params, stats))


def clients_alone(experiment: Any) -> Any:
    """The experiment with a server that keeps what its clients' updates amount to, and otherwise stays as it is."""
    import jax
    import jax.numpy as jnp

    method = experiment.problem.method

    def init(key: Any, spec: Any) -> Any:
        server, clients = method.init(key, spec)
        return server._replace(own=jax.tree.map(jnp.zeros_like, server.weights.params)), clients

    def keep(server: Any, aggregate: Any, *_: Any) -> Any:  # what is not in the state would not be computed
        return server._replace(own=aggregate.update.params), {}

    problem = experiment.problem._replace(method=method._replace(init=init, server_update=keep))
    simulator = type(experiment.simulator)(problem, experiment.simulator.execution, experiment.layout.forward_batch_size)
    return dataclasses.replace(experiment, problem=problem, simulator=simulator)


def end_fl2(server: Any) -> dict[str, np.ndarray]:
    """The clients' weighted average."""
    import jax

    return torch_wide_resnet(jax.tree.map(lambda w, c: w - c, server.weights.params, server.own))


class Kind(NamedTuple):
    """A kind of job.

    Attributes:
        job: its settings.
        checked: what differs where it is checked.
        tolerance: how much the change of a peer's model may differ from the one here, see `compare.difference`.
        cohorts: which are timed, by device.
        rounds: timed in a process, where nothing else is said.
        repeats: processes of each program, likewise.
        config: of the experiment, by the job.
        start: the experiment's start.
        end: the model at the end, by the peers' names, from the server's state.
    """

    job: dict[str, Any]
    checked: dict[str, Any]
    tolerance: float
    cohorts: dict[str, list[int]]
    rounds: int
    repeats: int
    config: Callable[[dict[str, Any]], Any]
    start: Callable[[Any], Start]
    end: Callable[[Any], dict[str, np.ndarray]]


KINDS = {
    "cnn": Kind(
        job=CNN,
        checked=CNN_CHECKED,
        tolerance=1e-4,
        cohorts={"cpu": [10, 50], "cuda": [10, 50]},
        rounds=5,
        repeats=6,
        config=cnn_config,
        start=start_cnn,
        end=lambda server: torch_weights(server.weights.params),
    ),
    "fl2": Kind(
        job=FL2,
        checked=FL2_CHECKED,
        tolerance=1e-4,
        cohorts={"cpu": [2], "cuda": [10]},
        rounds=3,
        repeats=6,
        config=fl2_config,
        start=start_fl2,
        end=end_fl2,
    ),
}


def run(job: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """A job's rounds here, in the layout that it has, or else in the fastest, which is looked for first.

    Returns:
        `seconds` of the rounds after the warm-up, `layout`, `compile_s`, `device` and `versions`; of a search also `tuning_s`
        and `usual_layout`, in which the job would be without one.
    """
    from fedjax_ssl.experiment.tuning import in_layout, tuned

    from benchmarks.provenance import devices, versions
    from fedjax_ssl.experiment.layout import Layout

    kind = KINDS[job["kind"]]
    experiment, began = experiment_of(job, kind.config(job)), time.perf_counter()
    search: dict[str, Any] = {}
    if "layout" in job:
        experiment = in_layout(experiment, Layout(**job["layout"]))
    else:
        search["usual_layout"] = experiment.layout._asdict()
        experiment = tuned(experiment, give_up=lambda: time.perf_counter() - began > job["tuning_limit_s"])
        search["tuning_s"] = time.perf_counter() - began
    experiment, state, row, rows, weights = kind.start(experiment)
    write_data(folder, experiment, rows, weights)
    seconds, rounds = [], experiment.rounds(state, row)
    for _ in range(job["warm_up"] + job["rounds"]):
        state, row = next(rounds)
        seconds.append(row["time/round_s"])
    np.savez(folder / "weights.npz", **kind.end(state.server))
    return {
        "seconds": seconds[job["warm_up"] :],
        "layout": experiment.layout.shrunk(experiment.simulator.execution)._asdict(),
        **search,
        "compile_s": row["time/compile_s"],
        "device": devices(experiment.layout.devices),
        "versions": versions(),
    }


def main() -> None:
    """Runs a folder's job in this process, which does nothing else."""
    from launch.command import keep_programs, use_all_cores

    use_all_cores()
    keep_programs()
    folder = pathlib.Path(sys.argv[1])
    report = run(json.loads((folder / "job.json").read_text()), folder)
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
