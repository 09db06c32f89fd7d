"""What a machine does at most: large matrix products, and memory that is read and written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.workloads import DTYPES
from fedjax_ssl.simulation.execution import multiplied_in


class Ceilings(NamedTuple):
    """What all devices together do at most: floating-point operations per second by dtype, and bytes per second."""

    flops: dict[str, float]
    bandwidth: float


def measured(dtypes: Iterable[str]) -> Ceilings:
    """Multiplies matrices in each of the dtypes, and adds 1 to a vector in place, which is read and written once.

    On one device, and on all at once, the better of the two: those of a CPU share its cores.
    """
    on_cpu = jax.default_backend() == "cpu"
    size, length = (1536, 2**25) if on_cpu else (8192, 2**28)
    groups = {len(devices): devices for devices in (jax.devices()[:1], jax.devices())}.values()
    flops = {dtype: max(_flops(size, dtype, devices) for devices in groups) for dtype in dtypes}
    return Ceilings(flops, max(_bandwidth(length // len(devices), devices) for devices in groups))


def best_time(program: Callable[[], Any], repeats: int = 5) -> float:
    """The least seconds of some runs, after one to warm up."""
    times = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        jax.block_until_ready(program())
        if repeat:
            times.append(time.perf_counter() - started)
    return min(times)


def _flops(size: int, dtype: str, devices: list[jax.Device]) -> float:
    matrix = jax.random.normal(jax.random.key(0), (size, size)).astype(DTYPES[dtype]["dtype"])
    matrices = [jax.device_put(matrix, device) for device in devices]
    with multiplied_in(DTYPES[dtype]["precision"]):
        product = jax.jit(lambda a: a @ a)
        seconds = best_time(lambda: [product(a) for a in matrices])
    return len(devices) * 2 * size**3 / seconds


def _bandwidth(length: int, devices: list[jax.Device]) -> float:
    in_place = jax.jit(lambda x: x + 1, donate_argnums=0)  # a result of its own would take fresh pages each time
    vectors = [jax.device_put(jnp.zeros(length, jnp.float32), device) for device in devices]

    def add() -> list[jax.Array]:
        vectors[:] = [in_place(x) for x in vectors]
        return vectors

    return len(devices) * 2 * vectors[0].nbytes / best_time(add)
