"""Which convolution lowering is fast where: training and forward passes, inside and outside compiled loops.

    python -m benchmarks.conv_lowering [--model wide_resnet] [--lowering hybrid im2col] [--json FILE.json]

Networks: WRN-28-2, where `banded` is `hybrid` throughout, and `winograd` has a form of its own for some of those with 64
channels or more; the CNN of pfl-research's benchmark, where it has for the second layer; FedSiam's for MNIST, where `banded`
has for both layers, and `cnn` with its own 16 channels, where it has for the first; `tiled` is for GPUs. Training: SGD steps
on batches of 32 inside `lax.fori_loop`, for M clients that are vmapped or taken one after the other (`lax.map`). Forward:
batches of 256 with parameters that all examples share. Two rates are printed: images per second of wall time, and per second
of processor time over all threads, which other programs on the machine disturb less (but which counts threads that wait
busily); medians, after a run to warm up. XLA's convolution inside a training loop takes minutes a step of WRN-28-2 on a CPU:
`--lowering` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.provenance import provenance
from benchmarks.spread import quartiles
from fedjax_ssl.models import ModelFns, build
from fedjax_ssl.models.convolution import LOWERINGS
from fedjax_ssl.simulation.execution import Execution
from fedjax_ssl.simulation.simulator import Program

IMAGE_SHAPES = {"wide_resnet": (32, 32, 3), "emnist_cnn": (32, 32, 3), "mnist_cnn": (28, 28, 1), "cnn": (8, 8, 1)}
BUDGET_S = 8.0  # a case is repeated until it has run for this long, at least once


def patches_conv(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """A candidate that is not in the package: the full im2col, all kh kw shifts side by side and one product."""
    kh, kw, channels, features = kernel.shape
    images = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    height, width = ((size - k) // stride + 1 for size, k in zip(images.shape[1:3], (kh, kw), strict=True))
    rows = [slice(i, i + (height - 1) * stride + 1, stride) for i in range(kh)]
    columns = [slice(j, j + (width - 1) * stride + 1, stride) for j in range(kw)]
    patches = jnp.concatenate([images[:, row, column] for row in rows for column in columns], axis=-1)
    return patches @ kernel.reshape(kh * kw * channels, features)


def training(model: ModelFns, stats: Any, loop: str) -> Callable[..., Any]:
    """(params, images [M, B, H, W, ch], labels [M, B], steps) -> the clients' parameters after `steps` SGD steps each."""

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits, _ = model.apply(params, stats, images, train=True)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    def client(params: Any, images: jax.Array, labels: jax.Array, steps: jax.Array) -> Any:
        def step(_: jax.Array, params: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.01 * g, params, jax.grad(loss)(params, images, labels))

        # The number of steps is an argument, so that XLA cannot remove a loop of one step.
        return lax.fori_loop(0, steps, step, params)

    def cohort(params: Any, images: jax.Array, labels: jax.Array, steps: jax.Array) -> Any:
        if loop == "vmap":
            return jax.vmap(client, in_axes=(None, 0, 0, None))(params, images, labels, steps)
        return lax.map(lambda data: client(params, *data, steps), (images, labels))

    return cohort


def forward(model: ModelFns, stats: Any, train: bool) -> Callable[..., Any]:
    """(params, images [B, H, W, ch], batches) -> the sum of the logits of `batches` passes, in a loop (None: one, in none)."""

    def total(params: Any, images: jax.Array, batches: jax.Array | None) -> jax.Array:
        def one(_: Any, logits: jax.Array) -> jax.Array:  # depends on the loop's state: cannot be moved out of it
            return logits + model.apply(params, stats, images + 1e-6 * jnp.mean(logits), train=train)[0]

        start = jnp.zeros((images.shape[0], 10))
        return one(0, start) if batches is None else lax.fori_loop(0, batches, one, start)

    return total


class Timing(NamedTuple):
    """Seconds: to compile, of wall time (quartiles and median) and of processor time (median) per run."""

    compile_s: float
    wall_s: list[float]
    processor_s: float


def measure(program: Callable[..., Any], *args: Any) -> Timing:
    """Times the program as the package compiles it: one run to warm up, then those that fit BUDGET_S, at least one."""
    timed = Program(program, Execution())
    jax.block_until_ready(timed(*args))
    wall, processor = [], []
    while sum(wall) < BUDGET_S:
        started, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(timed(*args))
        wall.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return Timing(timed.compile_s, quartiles(wall), float(np.median(processor)))


def cases(network: str, lowerings: list[str], depth: int) -> Iterator[tuple[str, int, Callable[[], Timing]]]:
    """(description, images per run, a function that measures it) of every case."""
    keys = jax.random.split(jax.random.key(0), 3)
    image_shape, options = IMAGE_SHAPES[network], {"depth": depth} if network == "wide_resnet" else {}
    images = jax.random.normal(keys[0], (256, *image_shape))
    labels = jax.random.randint(keys[1], (2, 32), 0, 10)
    for lowering in lowerings:
        model = build(network, num_classes=10, conv=lowering, **options)
        params, stats = model.init(keys[2], image_shape)
        for train in (False, True):
            for batches in (None, jnp.int32(2)):
                name = f"forward  {'train' if train else 'eval ':5s} {'in no loop' if batches is None else 'in a loop'}"
                run = forward(model, stats, train)
                count = 256 * (1 if batches is None else 2)
                yield f"{lowering:8s} {name}", count, lambda r=run, p=params, b=batches: measure(r, p, images, b)
        for clients, loop in ((1, "map"), (2, "map"), (2, "vmap")):
            data = images[: clients * 32].reshape(clients, 32, *image_shape), labels[:clients]
            run = training(model, stats, loop)
            name = f"{lowering:8s} training M={clients} {loop}"
            yield name, clients * 32, lambda r=run, p=params, d=data: measure(r, p, *d, jnp.int32(1))


def main() -> None:
    """Measures every case of the chosen lowerings and prints a table."""
    LOWERINGS["patches"] = patches_conv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(IMAGE_SHAPES), default="wide_resnet")
    parser.add_argument("--lowering", nargs="+", choices=list(LOWERINGS), default=list(LOWERINGS))
    parser.add_argument("--depth", type=int, default=28, help="of wide_resnet: 10, 16, 22, 28, ...")
    parser.add_argument("--json", type=pathlib.Path, help="JSON file for the results")
    args = parser.parse_args()
    results = []
    print(f"{'case':38s} {'images/s':>9s} {'quartiles':>17s} {'images/cpu s':>12s} {'compile s':>9s}")
    for name, images, run in cases(args.model, args.lowering, args.depth):
        compile_s, (low, median, high), processor_s = run()
        spread = f"{images / high:,.0f} - {images / low:,.0f}"
        print(f"{name:38s} {images / median:9.1f} {spread:>17} {images / processor_s:12.1f} {compile_s:9.1f}", flush=True)
        rates = {"images_per_s": images / median, "quartiles": [images / high, images / low]}
        rates |= {"images_per_cpu_s": images / processor_s, "compile_s": compile_s}
        results.append({"case": " ".join(name.split()), **rates})
    if args.json:
        settings = {"model": args.model, "depth": args.depth}
        written = {**provenance(), **settings, "warm_up_runs": 1, "results": results}
        args.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
