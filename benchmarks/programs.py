"""The measured side of the benchmarks: all that touches the package's inside, in processes of their own.

A process reads requests from standard input, a JSON list `[name, arguments]` on each line, where the name is a method of
`Session`, and answers each with a line on standard output: `@` and JSON. This file imports nothing of `benchmarks`, so that it
also runs beside an older checkout of the package, which PYTHONPATH names.
"""

import ctypes
import json
import math
import pathlib
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

RUNS_LONG = {"rounds": 10**6, "eval_every": 10**6, "checkpoint_every": 10**6}  # only single rounds are timed: no evaluation


def clocked(program: Callable[[], Any]) -> tuple[Any, float]:
    """What a program returns, and its seconds."""
    began = time.perf_counter()
    found = program()
    return found, time.perf_counter() - began


def noise(count: int, shape: tuple[int, ...], test: int = 10, *, sorted_by_class: bool = False) -> Any:
    """A dataset of `count` training and `test` test images of a shape [H, W, ch], whose labels go round. Images are random,
    each with a color and a contrast of its own; `sorted_by_class`: each class has one image, many times."""
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
        """Builds an experiment; `data` are the arguments of `noise`, None: the config's data."""
        import fedjax_ssl

        self.state: Any = None
        self.experiment, seconds = clocked(lambda: fedjax_ssl.build(config, noise(**data) if data else None))
        self._rounds = self.experiment.rounds()
        return {"build_s": seconds, "package": str(pathlib.Path(fedjax_ssl.__file__).parents[1])}

    def rounds(self, number: int) -> list[dict[str, Any]]:
        """Runs `number` rounds; of each its metrics, with `seconds` as measured here."""
        found = []
        for _ in range(number):
            (self.state, metrics), seconds = clocked(lambda: next(self._rounds))
            found.append({**(metrics[0] if isinstance(metrics, list) else metrics), "seconds": seconds})
        return found

    def evaluate(self, number: int) -> list[dict[str, Any]]:
        """Evaluates the initial model `number` times; the seconds of each."""
        if self.state is None:
            self.state, _ = self.experiment.start()
        return [{"seconds": clocked(lambda: self.experiment.simulator.evaluate(self.state))[1]} for _ in range(number)]

    def profile(self) -> dict[str, Any]:
        """What one more round took, in seconds, and its instructions: each with its operation, its scope, the seconds of all
        its calls, and of these the `flops` of products and the `bytes` read and written."""
        import jax

        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                _, seconds = clocked(lambda: self.rounds(1))
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            lines = [line for plane in jax.profiler.ProfileData.from_file(str(path)).planes for line in plane.lines]
            known = instructions_of(self.experiment.simulator._round._compiled.as_text())
            for event in (event for line in lines for event in line.events if event.name in known):
                one = known[event.name]
                one["seconds"] += event.duration_ns / 1e9
                one["calls"] += 1
        ran = [one for one in known.values() if one["calls"] and one["operation"] not in ("while", "conditional", "call")]
        for one in ran:
            one.update(flops=one["calls"] * one["flops"], bytes=one["calls"] * one["bytes"])
        return {"seconds": seconds, "instructions": ran}

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

        from fedjax_ssl.experiment import estimate

        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return estimate.forward_flops(model, 10, tuple(shape))

    def ceilings(self, precisions: list[str]) -> dict[str, Any]:
        """What all devices do at most: `flops` a second of large matrix products for each dtype and precision, and `bandwidth`,
        bytes a second, of adding 1 to a vector in place."""
        import jax
        import jax.numpy as jnp

        size, length = (1536, 2**25) if jax.default_backend() == "cpu" else (8192, 2**28)
        groups = jax.devices()[:1], jax.devices()  # the faster one counts: devices may share cores
        in_place = jax.jit(lambda x: x + 1, donate_argnums=0)

        def least_s(program: Callable[[Any], Any], array: Any, devices: list[Any]) -> float:
            arrays, seconds = [jax.device_put(array, device) for device in devices], []
            for _ in range(6):  # one to warm up
                began = time.perf_counter()
                arrays = jax.block_until_ready([program(x) for x in arrays])
                seconds.append(time.perf_counter() - began)
            return min(seconds[1:])

        def product_s(name: str, devices: list[Any]) -> float:
            dtype, precision = name.split()
            with jax.default_matmul_precision(None if precision == "default" else precision):
                product = jax.jit(jnp.matmul)
                return least_s(lambda a: product(a, a), jnp.full((size, size), 1 / size, dtype), devices) / len(devices)

        def add_s(devices: list[Any]) -> float:
            return least_s(in_place, jnp.zeros(length // len(devices), jnp.float32), devices)

        flops = {one: 2 * size**3 / min(product_s(one, devices) for devices in groups) for one in precisions}
        return {"flops": flops, "bandwidth": 8 * length / min(map(add_s, groups))}

    def write_start(self, folder: str) -> None:
        """Writes what the peers read, as `data.npz`: the clients' images [K, n, H, W, ch] and labels [K, n], all clients having
        as many, the views' mean and std, and the model that rounds begin with."""
        import jax

        state, _ = self.experiment.start()
        settings, problem = self.experiment.settings, self.experiment.problem
        weights = state.server.weights
        if settings.model.name == "wide_resnet":  # else all examples are of one class and equally confident
            last = {name: jax.device_put(5.0 * x, x.sharding) for name, x in weights.params["Dense_0"].items()}
            weights = weights._replace(params={**weights.params, "Dense_0": last})
            state = state._replace(server=state.server._replace(weights=weights))
        self._rounds = self.experiment.rounds(state)
        arrays = {f"w:{name}": np.asarray(x, np.float32) for name, x in TO_TORCH[settings.model.name](weights).items()}
        index = np.asarray(problem.tables[0]["unlabeled" if settings.data.labels_at == "server" else "labeled"].index)
        images = np.asarray(problem.train.images)
        arrays |= {"images": images[index], "labels": np.asarray(problem.train.labels)[index]}
        if settings.method.name == "feddure":
            arrays["unlabeled"] = images[np.asarray(problem.tables[0]["unlabeled"].index)]
            for layer, values in state.clients.w.items():
                arrays[f"f:{layer}.weight"] = np.asarray(values["kernel"]).swapaxes(1, 2)
                arrays[f"f:{layer}.bias"] = np.asarray(values["bias"])
        np.savez(pathlib.Path(folder, "data.npz"), mean=settings.data.mean, std=settings.data.std, **arrays)

    def write_end(self, folder: str) -> None:
        """Writes the model after the last round by the peers' names, as `weights.npz`."""
        to_torch = TO_TORCH[self.experiment.settings.model.name]
        np.savez(pathlib.Path(folder, "weights.npz"), **to_torch(self.state.server.weights))


_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)")
_ARRAY = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")


def _sizes(shape: str) -> list[tuple[int, list[int]]]:
    """The bits of a number, and the lengths of the axes, of each array in a shape as XLA writes it."""
    arrays = _ARRAY.findall(shape)
    return [(int(re.sub(r"\D", "", kind) or 8), [int(n) for n in axes.split(",") if n]) for kind, axes in arrays]


def _flops(operation: str, shape: str, operands: list[str], attributes: str) -> float:
    """Floating-point operations of a product or a convolution; 0 of anything else."""
    if operation == "dot":
        axes = re.search(r"lhs_contracting_dims={([\d,]*)}", attributes)
        lengths = _sizes(operands[0])[0][1]
        inner = math.prod(lengths[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1
    elif operation == "convolution":
        kernel, labels = _sizes(operands[1])[0][1], re.search(r"dim_labels=\w+_(\w+)->", attributes)
        inner = math.prod(kernel) // kernel[labels[1].index("o")] if labels else 0
    else:
        return 0.0
    return 2.0 * inner * math.prod(_sizes(shape)[0][1])


def instructions_of(program: str) -> dict[str, dict[str, Any]]:
    """The instructions of a compiled program's text by their names: operation, scope, and `flops` and `bytes` of a call."""
    computation, found, products = "", {}, {}
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        if match := _INSTRUCTION.match(line):
            name, shape, operation, arguments, rest = match.groups()
            operands = [found[one]["shape"] for one in re.findall(r"%([\w.\-]+)", arguments) if one in found]
            flops, scope = _flops(operation, shape, operands, rest), re.search(r'op_name="([^"]*)"', rest)
            products[computation] = products.get(computation, 0.0) + flops
            if operation == "fusion" and (called := re.search(r"calls=%([\w.\-]+)", rest)):
                flops = products.get(called[1], 0.0)
            size = sum(bits * math.prod(axes) / 8 for part in (shape, *operands) for bits, axes in _sizes(part))
            found[name] = {"operation": operation, "scope": scope[1] if scope else "", "shape": shape, "flops": flops}
            found[name] |= {"bytes": size, "seconds": 0.0, "calls": 0}
    return found


def _in_torch(layers: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Layers by PyTorch's names and in its layouts."""
    names = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var", "bias": "bias"}
    arrays = {f"{name}.{names[key]}": np.asarray(x) for name, layer in layers.items() for key, x in layer.items()}
    return {name: x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T for name, x in arrays.items()}


def torch_cnn(weights: Any) -> dict[str, np.ndarray]:
    """Weights of `emnist_cnn` for the peers' network, which flattens channels first."""
    first, second, third, last = (weights.params[name] for name in ("Conv_0", "Conv_1", "Dense_0", "Dense_1"))
    flat = np.asarray(third["kernel"]).reshape(14, 14, 64, 128).transpose(2, 0, 1, 3).reshape(12544, 128)
    return _in_torch({"conv1": first, "conv2": second, "linear1": {**third, "kernel": flat}, "linear2": last})


def torch_wide_resnet(weights: Any) -> dict[str, np.ndarray]:
    """Likewise of `wide_resnet`, with its static batch-norm statistics."""

    def named(names: dict[str, str], params: Any, stats: Any, prefix: str = "") -> dict[str, Any]:
        return {prefix + new: {**params[old], **stats.get(old, {})} for old, new in names.items() if old in params}

    layers = named({"Conv_0": "conv", "BatchNorm_0": "norm", "Dense_0": "linear"}, weights.params, weights.stats)
    names = {"BatchNorm_0": "norm1", "BatchNorm_1": "norm2", "Conv_0": "conv1", "Conv_1": "conv2", "Conv_2": "shortcut"}
    for block in [name for name in weights.params if name.startswith("Block_")]:
        layers |= named(names, weights.params[block], weights.stats[block], f"blocks.{block.removeprefix('Block_')}.")
    return _in_torch(layers)


def torch_resnet9(weights: Any) -> dict[str, np.ndarray]:
    """Likewise of FedDure's `resnet9`."""
    layers = {"linear": weights.params["Dense_0"]}
    for ours, theirs in (("Conv", "convs"), ("BatchNorm", "norms")):
        layers |= {f"{theirs}.{i}": weights.params[f"{ours}_{i}"] for i in range(8)}
    return _in_torch(layers)


TO_TORCH = {"emnist_cnn": torch_cnn, "wide_resnet": torch_wide_resnet, "resnet9": torch_resnet9}


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
