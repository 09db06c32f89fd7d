"""The measured side of the benchmarks: all that touches the package's inside, in processes of their own.

    python -P benchmarks/programs.py

A process reads requests from standard input, a JSON list `[name, arguments]` on each line, and answers each with a line on
standard output: `@` and JSON. Names are methods of `Session`. This file imports nothing of `benchmarks`, so that it also runs
beside an older checkout of the package, which PYTHONPATH names. A GPU and cores are taken by the process alone that measures.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

RUNS_LONG = {"rounds": 10**6, "eval_every": 10**6, "checkpoint_every": 10**6}
"""What a config has of which only single rounds are timed: no evaluation ever."""
CLASSIFIER = 5.0
"""(FL)^2's classifier begins so many times as large in `compare`: else all examples are of one class and equally confident."""


def noise(count: int, shape: tuple[int, ...], test: int = 10, *, sorted_by_class: bool = False) -> Any:
    """A dataset of random images, each with a color and a contrast of its own, whose labels go round.

    Args:
        count: training images.
        shape: [H, W, ch].
        test: test images.
        sorted_by_class: each class has one image, many times.
    """
    from fedjax_ssl.data.sources import from_arrays

    rng, labels = np.random.default_rng(0), np.arange(count) % 10
    total = max(count, test)
    color = rng.integers(0, 128, (total, 1, 1, shape[2]), np.uint8)
    contrast = rng.integers(1, 65, (total, 1, 1, 1), np.uint8)
    images = np.empty((total, *shape), np.uint8)
    for i in range(0, total, 10_000):  # a million clients' images at once would take much memory
        part = images[i : i + 10_000]
        part[:] = 64 + color[i : i + 10_000] + rng.integers(0, 128, part.shape, np.uint8) % contrast[i : i + 10_000]
    train = images[labels] if sorted_by_class else images[:count]
    return from_arrays(train_images=train, train_labels=labels, test_images=images[:test], test_labels=np.arange(test) % 10)


class Session:
    """An experiment in this process."""

    def build(self, config: dict[str, Any], data: dict[str, Any] | None = None) -> dict[str, Any]:
        """Builds an experiment from a config and runs nothing; `data` are the arguments of `noise`, None: the config's data."""
        import fedjax_ssl

        began = time.perf_counter()
        self.state: Any = None
        self.experiment = fedjax_ssl.build(config, noise(**data) if data else None)
        self._rounds = self.experiment.rounds()
        return {"build_s": time.perf_counter() - began, "package": str(pathlib.Path(fedjax_ssl.__file__).parents[1])}

    def rounds(self, number: int) -> list[dict[str, Any]]:
        """Runs so many rounds; of each its row of metrics, with `seconds` as measured here around `next`."""
        rows = []
        for _ in range(number):
            began = time.perf_counter()
            self.state, row = next(self._rounds)
            row = row[0] if isinstance(row, list) else row
            rows.append({**row, "seconds": time.perf_counter() - began})
        return rows

    def evaluate(self, number: int) -> list[dict[str, Any]]:
        """Evaluates the initial model so many times; the seconds of each."""
        if self.state is None:
            self.state, _ = self.experiment.start()
        found = []
        for _ in range(number):
            began = time.perf_counter()
            self.experiment.simulator.evaluate(self.state)
            found.append({"seconds": time.perf_counter() - began})
        return found

    def device(self) -> str:
        """The devices here, in words."""
        import jax

        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"

    def about(self) -> dict[str, Any]:
        """What the program is and needs, once it has run; gives the memory that compiling took back to the system."""
        import jax

        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        simulator, memory = self.experiment.simulator, jax.local_devices()[0].memory_stats() or {}
        return {
            "compile_s": simulator.compile_s,
            "program_bytes": simulator.memory_bytes,
            "peak_bytes": memory.get("peak_bytes_in_use") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "num_params": self.experiment.num_params,
            "device": self.device(),
            "execution": str(simulator.execution),
        }

    def forward_flops(self, model: dict[str, Any], shape: tuple[int, ...]) -> float:
        """Floating-point operations of one image's forward pass, with convolutions as XLA has them."""
        import jax

        from fedjax_ssl.models import build

        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            options = {key: value for key, value in model.items() if key != "norm"}  # which the package makes of it
            network = build(num_classes=10, conv=XLA_CONV, **options)
            params, stats = network.init(jax.random.key(0), tuple(shape))
            image = np.zeros((1, *shape), np.float32)
            analysis: Any = jax.jit(network.apply).lower(params, stats, image).cost_analysis()
        return float(analysis["flops"])

    def ceilings(self, precisions: list[str]) -> dict[str, Any]:
        """What all devices do at most: `flops` a second of large matrix products for each dtype and precision, and `bandwidth`,
        bytes a second, of adding 1 to a vector in place."""
        import jax
        import jax.numpy as jnp

        on_cpu = jax.default_backend() == "cpu"
        size, length = (1536, 2**25) if on_cpu else (8192, 2**28)
        groups = list({len(devices): devices for devices in (jax.devices()[:1], jax.devices())}.values())

        def product_s(name: str, devices: list[Any]) -> float:
            dtype, precision = name.split()
            matrices = [jax.device_put(jnp.ones((size, size), dtype), device) for device in devices]
            with jax.default_matmul_precision(None if precision == "default" else precision):
                product = jax.jit(jnp.matmul)
                return _least_s(lambda: [product(a, a) for a in matrices]) / len(devices)

        def add_s(devices: list[Any]) -> float:
            in_place = jax.jit(lambda x: x + 1, donate_argnums=0)
            vectors = [jax.device_put(jnp.zeros(length // len(devices), jnp.float32), device) for device in devices]

            def add() -> list[Any]:
                vectors[:] = [in_place(x) for x in vectors]
                return vectors

            return _least_s(add)

        flops = {one: 2 * size**3 / min(product_s(one, devices) for devices in groups) for one in precisions}
        return {"flops": flops, "bandwidth": 8 * length / min(map(add_s, groups))}

    def write_start(self, folder: str) -> None:
        """Writes what the peers read, as `data.npz`: the clients' examples, the views, and the model that rounds begin with."""
        state, _ = self.experiment.start()
        settings = self.experiment.settings
        if settings.model["name"] == "wide_resnet":
            state = _with_larger_classifier(state)
        self._rounds = self.experiment.rounds(state)
        weights = TO_TORCH[settings.model["name"]](state.server.weights)
        arrays = {f"w:{name}": np.asarray(value, np.float32) for name, value in weights.items()}
        arrays["images"], arrays["labels"] = client_data(self.experiment)
        np.savez(pathlib.Path(folder, "data.npz"), mean=settings.data.mean, std=settings.data.std, **arrays)  # type: ignore[arg-type]

    def write_end(self, folder: str) -> None:
        """Writes the model after the last round by the peers' names, as `weights.npz`."""
        weights = TO_TORCH[self.experiment.settings.model["name"]](self.state.server.weights)
        np.savez(pathlib.Path(folder, "weights.npz"), **weights)


XLA_CONV = "xla"
"""The name of XLA's own convolutions in `fedjax_ssl.models.build`."""


def client_data(experiment: Any) -> tuple[np.ndarray, np.ndarray]:
    """The clients' images [K, n, H, W, ch] and labels [K, n], all clients having as many."""
    problem, at_server = experiment.problem, experiment.settings.data.labels_at == "server"
    index = np.asarray(problem.tables[0]["unlabeled" if at_server else "labeled"].index)
    return np.asarray(problem.train.images)[index], np.asarray(problem.train.labels)[index]


def _with_larger_classifier(state: Any) -> Any:
    """The state with (FL)^2's last layer CLASSIFIER times as large."""
    import jax

    weights = state.server.weights
    last = {name: jax.device_put(CLASSIFIER * value, value.sharding) for name, value in weights.params["Dense_0"].items()}
    weights = weights._replace(params={**weights.params, "Dense_0": last})
    return state._replace(server=state.server._replace(weights=weights))


def _least_s(program: Callable[[], Any]) -> float:
    """The least seconds of five runs, after one to warm up."""
    import jax

    jax.block_until_ready(program())
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(program())
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _kernel(layer: dict[str, Any]) -> np.ndarray:
    return np.asarray(layer["kernel"]).transpose(3, 2, 0, 1)


def torch_cnn(weights: Any) -> dict[str, Any]:
    """Weights of `emnist_cnn` by the names and in the layouts of the peers' network, which flattens channels first."""
    first, second, third, last = (weights.params[name] for name in ("Conv_0", "Conv_1", "Dense_0", "Dense_1"))
    flat = np.asarray(third["kernel"]).reshape(14, 14, 64, 128).transpose(2, 0, 1, 3).reshape(12544, 128)
    return {
        "conv1.weight": _kernel(first), "conv1.bias": first["bias"], "conv2.weight": _kernel(second),
        "conv2.bias": second["bias"], "linear1.weight": flat.T, "linear1.bias": third["bias"],
        "linear2.weight": np.asarray(last["kernel"]).T, "linear2.bias": last["bias"],
    }  # fmt: skip


def torch_wide_resnet(weights: Any) -> dict[str, Any]:
    """Likewise of `wide_resnet`, with its static batch-norm statistics."""
    params, stats = weights.params, weights.stats
    found = {"conv.weight": _kernel(params["Conv_0"]), "linear.bias": params["Dense_0"]["bias"]}
    found["linear.weight"] = np.asarray(params["Dense_0"]["kernel"]).T

    def add_norm(name: str, layer: Any, of: Any) -> None:
        found.update({f"{name}.weight": layer["scale"], f"{name}.bias": layer["bias"]})
        found.update({f"{name}.running_mean": of["mean"], f"{name}.running_var": of["var"]})

    add_norm("norm", params["BatchNorm_0"], stats["BatchNorm_0"])
    for number in range(sum(name.startswith("Block_") for name in params)):
        block, own, name = params[f"Block_{number}"], stats[f"Block_{number}"], f"blocks.{number}"
        for i in range(2):
            add_norm(f"{name}.norm{i + 1}", block[f"BatchNorm_{i}"], own[f"BatchNorm_{i}"])
        for i, layer in enumerate(("conv1", "conv2", "shortcut")):
            if f"Conv_{i}" in block:
                found[f"{name}.{layer}.weight"] = _kernel(block[f"Conv_{i}"])
    return found


TO_TORCH = {"emnist_cnn": torch_cnn, "wide_resnet": torch_wide_resnet}


def main() -> None:
    """Answers requests until standard input ends; an error's line is the answer where one fails."""
    session = Session()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"found": getattr(session, name)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print("@" + json.dumps(answer, default=float), flush=True)


if __name__ == "__main__":
    main()
