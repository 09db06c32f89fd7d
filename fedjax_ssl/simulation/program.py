"""Functions that are compiled once, and XLA's options for them."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fedjax_ssl.arrays import PyTree
from fedjax_ssl.local.forward_passes import forward_batches_of
from fedjax_ssl.simulation.execution import Execution

ON_CPU: dict[str, str | bool] = {
    "xla_backend_optimization_level": "2",  # LLVM's: faster to compile than 3
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner",  # combined sums go on after one fails: see `distributed`
}
ONEDNN: dict[str, str | bool] = {"xla_cpu_experimental_onednn_custom_call": True}
"""XLA options for programs that use `onednn_conv`: bfloat16 products are done by oneDNN, which uses the CPU's matrix units."""
ON_GPU: dict[str, str | bool] = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_autotune_level": "0",
}
"""With these options the same run gives the same bits: no sum depends on the order of threads, and no choice on measured times.
Matrix products are cuBLAS's, as Triton's take long to compile."""


def compiler_options(platform: str, conv: str = "xla") -> dict[str, str | bool]:
    """XLA's options on `cpu` or `gpu` for a form of convolution, without those that the environment variable XLA_FLAGS sets."""
    options = {"cpu": ON_CPU, "gpu": ON_GPU}.get(platform, {}) | (ONEDNN if conv == "onednn" else {})
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


@contextlib.contextmanager
def _kept(conv: str) -> Iterator[None]:
    """Within it programs are not put into JAX's cache on disk if they use `onednn_conv`, which jax 0.12 cannot store."""
    name, before = "jax_persistent_cache_min_compile_time_secs", jax.config.jax_persistent_cache_min_compile_time_secs
    if conv == "onednn":
        jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


class Program:
    """A function that is compiled at its first call and never traced again: other shapes or placements are an error."""

    def __init__(self, function: Callable[..., PyTree], execution: Execution, **jit_options: Any) -> None:
        self._jitted = jax.jit(function, **jit_options)
        self._execution = execution
        self._compiled: jax.stages.Compiled | None = None
        self.compile_s = 0.0  # seconds that tracing and compiling took
        self.fits = False  # whether memory was enough for a whole call; the caller sets this

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.compile_s += time.perf_counter() - start

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        precision = self._execution.precision
        of_products = contextlib.nullcontext() if precision == "default" else jax.default_matmul_precision(precision)
        with of_products, forward_batches_of(self._execution.batch_size):
            yield

    def eval_shape(self, *args: PyTree) -> PyTree:
        """Shapes and dtypes of the results."""
        with self._timed(), self._tracing():
            return self._jitted.eval_shape(*args)

    def memory_bytes(self) -> tuple[int, int]:
        """Device memory of a call: in all, and of its arguments; 0 before the first call, or if unknown."""
        if self._compiled is None or (needs := self._compiled.memory_analysis()) is None:
            return 0, 0
        arguments = needs.argument_size_in_bytes
        return arguments + needs.output_size_in_bytes + needs.temp_size_in_bytes - needs.alias_size_in_bytes, arguments

    def __call__(self, *args: PyTree) -> PyTree:
        """Runs the function, which is compiled at the first call."""
        return self.compiled(*args)(*args)

    def compiled(self, *args: PyTree) -> jax.stages.Compiled:
        """The compiled program for these arguments, which is compiled at the first call."""
        if self._compiled is None:
            with self._timed():
                with self._tracing():
                    lowered = self._jitted.lower(*args)
                conv = self._execution.conv
                with _kept(conv):
                    self._compiled = lowered.compile(compiler_options(jax.default_backend(), conv))
        return self._compiled
